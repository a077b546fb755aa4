"""What a person sees of a replay: phases, live progress, the table.

Rules
1. Progress goes to stderr, results to stdout: ``--json`` can be piped.
2. On a terminal one panel is redrawn; anywhere else (CI logs) one plain line is written every few seconds.
3. Numbers only; what they mean is judged in :mod:`kvconn.cli.verdict`.
"""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvconn.cli.verdict import FINE, NAMED, Verdict
from kvconn.engine.client import EngineStats
from kvconn.engine.router import Offloaded, Progress, ReplayReport

__all__ = ["View", "print_report"]

LINE_EVERY = 2.0


class View:
    """Phases and progress on a console; a context manager because a terminal must be given back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, what: str) -> None:
        """Something long begins."""
        self._console.print(what, style="bold", highlight=False)
        self._next_line = 0.0

    def progress(self, progress: Progress) -> None:
        """The replay, now."""
        if self._live is not None:
            self._live.update(_panel(progress), refresh=True)
        else:
            self._line(_plain(progress))

    def compared(self, finished: int, total: int) -> None:
        """The monolithic run, now."""
        text = f"  monolithic {finished}/{total}"
        if self._live is not None:
            self._live.update(text, refresh=True)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LINE_EVERY
            self._console.print(text, highlight=False, soft_wrap=True)


def _plain(progress: Progress) -> str:
    sides = " | ".join(f"{name} {_side(stats)}" for name, stats in (("P", progress.prefill), ("D", progress.decode)))
    return (
        f"  {progress.elapsed:5.1f} s  finished {progress.finished}/{progress.total} | {sides}"
        f" | moved {_size(progress.bytes_moved)}"
    )


def _side(stats: EngineStats) -> str:
    return (
        f"running {stats.running} waiting {stats.waiting} pending release {stats.pending_release}"
        f" KV {_use(stats.kv_blocks_used, stats.kv_blocks_total)}"
    )


def _panel(progress: Progress) -> Table:
    table = Table(title=f"{progress.elapsed:.0f} s   finished {progress.finished}/{progress.total}")
    for column in ("", "running", "waiting", "pending release", "KV in use"):
        table.add_column(column, justify="left" if not column else "right")
    for name, stats in (("P", progress.prefill), ("D", progress.decode)):
        table.add_row(
            name,
            str(stats.running),
            str(stats.waiting),
            str(stats.pending_release),
            _use(stats.kv_blocks_used, stats.kv_blocks_total),
        )
    table.caption = f"moved {_size(progress.bytes_moved)}"
    return table


def print_report(console: Console, report: ReplayReport, verdict: Verdict) -> None:
    """The table, then the verdict's sentences."""
    table = Table(title="kvconn replay", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(report):
        table.add_row(name, value)
    console.print(table)
    style = {FINE: "green", NAMED: "yellow"}.get(verdict.code, "red")
    for line in verdict.lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def _rows(report: ReplayReport) -> list[tuple[str, str]]:
    right = report.compared - len({wrong.id for wrong in report.mismatches})
    tokens = f"{right}/{report.compared}" if report.compared else "not compared"
    when = "after drain" if report.stall is None else "at the stall"
    return [
        ("finished", f"{report.finished}/{report.total}"),
        ("tokens equal to a monolithic run", tokens),
        (f"KV blocks in use {when}, P", _use(report.prefill_blocks_used, report.prefill_blocks_total)),
        (f"KV blocks in use {when}, D", _use(report.decode_blocks_used, report.decode_blocks_total)),
        ("moved", f"{_size(report.bytes_moved)} in {report.transfers} reads, {report.descriptors} descriptors"),
        ("in flight, polls included", f"{report.gb_per_s:.3f} GB/s"),
        ("P's finish to D's first token, p50", f"{report.handoff_p50_ms:.0f} ms"),
        ("P's finish to D's first token, p95", f"{report.handoff_p95_ms:.0f} ms"),
        ("blocks stored by the sibling", f"{report.blocks_stored} (+{report.blocks_deduplicated} it had)"),
        *_offloaded("P", report.offload["P"], "prefill tokens saved"),
        *_offloaded("D", report.offload["D"], "tokens not read from P"),
        ("duplicates absorbed", str(report.duplicates_absorbed)),
        ("leases expired", str(report.leases_expired)),
        *_troubles(report),
        ("prefix-hit tokens", str(report.prefix_hit_tokens)),
        ("smallest top-2 margin", f"{report.min_margin:.2e}" if math.isfinite(report.min_margin) else "not a model"),
        ("wall time of the replay", f"{report.wall_s:.1f} s"),
    ]


def _offloaded(side: str, done: Offloaded, saved: str) -> list[tuple[str, str]]:
    """What a sibling that loads did; nothing where none was asked."""
    if not done.asked:
        return []
    return [
        (f"{side}: hit rate of host memory", _rate(done.hits_host, done.asked)),
        (f"{side}: hit rate of files", _rate(done.hits_files, done.asked)),
        (f"{side}: stored, loaded (all ranks)", f"{_size(done.bytes_stored)}, {_size(done.bytes_loaded)}"),
        (f"{side}: stores skipped", str(done.stores_skipped)),
        (f"{side}: {saved}", str(done.tokens_loaded)),
    ]


def _rate(hits: int, asked: int) -> str:
    return f"{100 * hits / asked:.1f}% ({hits} of {asked} blocks)"


def _troubles(report: ReplayReport) -> list[tuple[str, str]]:
    """A row each; one for all when nothing happened."""
    rows = [
        ("failed loads", report.failed_loads),
        ("stale reads caught", report.stale_reads),
        ("references refused", report.references_refused),
        ("unfenced reads", report.unfenced_reads),
    ]
    if not any(count for _, count in rows):
        return [("failed/stale/refused/unfenced", "0 / 0 / 0 / 0")]
    return [(name, str(count)) for name, count in rows]


def _use(used: int, total: int) -> str:
    return f"{used}/{total}"


def _size(count: float) -> str:
    return f"{count / (1 << 20):.1f} MiB"
