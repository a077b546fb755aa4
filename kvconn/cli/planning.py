"""What ``kvconn plan`` reads, prints and draws.

Rules
1. A description is a file or the JSON itself; a live peer is asked over its side channel, first rank first, because it
   says there how many there are.
2. A pair that can't work is printed as a table of the fields that differ, and drawn not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from kvconn.cli.asking import address_of, peer_at
from kvconn.errors import ConfigError
from kvconn.geometry import Place
from kvconn.nixl.shape import Shape, parse_shape
from kvconn.nixl.survey import Edge, Survey, peer_of, survey

__all__ = ["plan", "print_survey", "read_shape", "to_json", "to_svg"]

#: a description is a few hundred bytes
LARGEST: Final = 1 << 20
#: of the picture: a rank's box and the space between columns and rows, in pixels
WIDE, HIGH, ACROSS, DOWN, MARGIN = 150, 44, 420, 64, 24


def plan(d: str, p: str | None, source: str | None, key_file: str | None, tokens: int) -> Survey:
    """The pair of these options. Raises ConfigError, PeerError."""
    reader = read_shape(d, "--d")
    described = read_shape(p, "--p") if p is not None else None
    if source is not None:
        return survey(reader, peer_at(address_of(source), described, key_file), tokens)
    if described is None:
        raise ConfigError("--p: expected the engine that is read, or --from where it runs")
    return survey(reader, peer_of(described), tokens)


def read_shape(given: str, option: str) -> Shape:
    """The JSON itself, or what is in the file of that name. Raises ConfigError."""
    if given.lstrip().startswith("{"):
        return parse_shape(given, option)
    try:
        with Path(given).open("rb") as file:
            raw = file.read(LARGEST + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"{option}: expected a JSON object or a readable file: {err}") from None
    if len(raw) > LARGEST:
        raise ConfigError(f"{option}: {given} is longer than {LARGEST} bytes")
    return parse_shape(raw, option)


def to_json(survey: Survey) -> str:
    return msgspec.json.encode({"works": not survey.problems, "survey": survey}).decode()


def print_survey(console: Console, survey: Survey) -> None:
    """Who reads what of whom, or which fields differ."""
    if survey.problems:
        table = Table("field", "D", "P", "what to do")
        for problem in survey.problems:
            table.add_row(problem.field, problem.ours, problem.theirs, problem.hint)
        console.print(table, markup=False)
        console.print("this pair cannot exchange KV", style="red", highlight=False)
        return
    table = Table("D", "P", "heads", "layers", "tokens", "MB", "ranges", "told by")
    for edge in survey.edges:
        table.add_row(*_row(edge))
    console.print(table)
    console.print(
        f"MB and ranges of one prompt of {survey.tokens} tokens whose blocks lie scattered"
        + ("; D puts heads and tokens in order afterwards" if any(edge.permutes for edge in survey.edges) else ""),
        highlight=False,
        soft_wrap=True,
    )


def _row(edge: Edge) -> tuple[str, ...]:
    ends = place_name(edge.reader), place_name(edge.source)
    if edge.heads is None:
        return *ends, "-", "-", "-", "only told", "-", str(edge.readers)
    heads, layers = heads_name(edge.heads), str(edge.layers)
    return *ends, heads, layers, edge.tokens, f"{edge.nbytes / 1e6:,.1f}", f"{edge.ranges:,}", str(edge.readers)


def place_name(place: Place) -> str:
    return f"pp{place.pp} tp{place.tp}"


def heads_name(heads: tuple[int, int]) -> str:
    return str(heads[0]) if heads[0] == heads[1] else f"{heads[0]}-{heads[1]}"


def to_svg(survey: Survey) -> str:
    """P's ranks on the left, D's on the right, a line per edge: dashed where a rank is only told."""
    left = sorted({edge.source for edge in survey.edges})
    right = sorted({edge.reader for edge in survey.edges})
    rows = max(len(left), len(right))
    width, height = 2 * MARGIN + 2 * WIDE + ACROSS, 2 * MARGIN + rows * DOWN
    body = [*_lines(survey.edges, left, right), *_boxes("P", left, MARGIN), *_boxes("D", right, MARGIN + WIDE + ACROSS)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><title>who reads what of whom</title>'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(body)}</svg>\n'
    )


def _middle(index: int) -> int:
    return MARGIN + index * DOWN + DOWN // 2


def _lines(edges: tuple[Edge, ...], left: list[Place], right: list[Place]) -> Iterator[str]:
    most = max((edge.nbytes for edge in edges), default=0) or 1
    for edge in edges:
        y1, y2 = _middle(left.index(edge.source)), _middle(right.index(edge.reader))
        read = edge.heads is not None
        style = f'stroke="#2563eb" stroke-width="{1 + 3 * edge.nbytes / most:.1f}"' if read else (
            'stroke="#9ca3af" stroke-dasharray="4 4"'
        )  # fmt: skip
        title = escape(" | ".join(_row(edge)))
        ends = f'x1="{MARGIN + WIDE}" y1="{y1}" x2="{MARGIN + WIDE + ACROSS}" y2="{y2}"'
        yield f"<line {ends} {style}><title>{title}</title></line>"
        if edge.heads is not None:
            what = f"heads {heads_name(edge.heads)}, {edge.layers} layers"
            what += "" if edge.tokens == "all" else f", tokens {edge.tokens}"
            x, y = MARGIN + WIDE + 3 * ACROSS // 4, y1 + 3 * (y2 - y1) // 4
            yield f'<text x="{x}" y="{y - 4}" text-anchor="middle" fill="#374151">{escape(what)}</text>'


def _boxes(side: str, places: list[Place], x: int) -> Iterator[str]:
    for index, place in enumerate(places):
        y = _middle(index)
        yield (
            f'<rect x="{x}" y="{y - HIGH // 2}" width="{WIDE}" height="{HIGH}" rx="6" fill="#f3f4f6" stroke="#374151"/>'
            f'<text x="{x + WIDE // 2}" y="{y + 4}" text-anchor="middle">{side}: {place_name(place)}</text>'
        )
