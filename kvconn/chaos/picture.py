"""Curves as an SVG, by hand: no library, and a text that a repository can keep."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

__all__ = ["Curve", "svg"]

#: name and unit, and (x, y) from left to right
Curve = tuple[str, Sequence[tuple[float, float]]]
WIDTH, HEIGHT, LEFT, TOP, GAP = 720, 110, 150, 24, 36


def svg(title: str, curves: Sequence[Curve]) -> str:
    """One panel per curve, below each other, over the same x; each from 0 to its own largest value."""
    total = TOP + len(curves) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {total}">',
        "<style>text {font: 12px sans-serif}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    right = max((x for _, points in curves for x, _ in points), default=1.0) or 1.0
    for index, (name, points) in enumerate(curves):
        parts += _panel(name, points, right, TOP + index * (HEIGHT + GAP) + 8)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, points: Sequence[tuple[float, float]], right: float, top: float) -> list[str]:
    most = max((y for _, y in points), default=0.0) or 1.0
    path = " ".join(
        f"{LEFT + x / right * WIDTH:.1f},{top + HEIGHT - max(0.0, y) / most * HEIGHT:.1f}" for x, y in points
    )
    return [
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#bbb"/>',
        f'<text x="8" y="{top + 16}">{escape(name)}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{most:.4g}</text>',
        f'<text x="{LEFT - 6}" y="{top + HEIGHT}" text-anchor="end">0</text>',
        f'<text x="{LEFT + WIDTH}" y="{top + HEIGHT + 14}" text-anchor="end">{right:.4g}</text>',
        f'<polyline points="{path}" fill="none" stroke="#1f5fa8" stroke-width="1.2"/>',
    ]
