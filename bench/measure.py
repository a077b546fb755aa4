"""Turns, medians and spreads."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Series", "Table", "alternate", "cpu", "fits", "number", "percentiles", "tls", "wall"]

Clock = Callable[[], float]


@dataclass(frozen=True)
class Series:
    """One subject's results, one per round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def over(self, other: Series) -> Series:
        """This subject's results as multiples of the other's, round by round."""
        return Series(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def per(self, amount: float) -> Series:
        """``amount`` of something per second, of series of seconds."""
        return Series(tuple(amount / value for value in self.values))

    def __str__(self) -> str:
        """The median, and the quartiles where there are enough rounds for them."""
        if len(self.values) < 3:
            return number(self.median)
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return f"{number(self.median)} ({number(low)}..{number(high)})"


def percentiles(times: list[float]) -> tuple[float, float]:
    """The median, and what 95 of 100 stay below."""
    ordered = sorted(times)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


def number(value: float) -> str:
    """Three digits that count."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def alternate(subjects: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Series]:
    """Each subject once per round, first in another place each round; a subject returns what it measured."""
    names = list(subjects)
    values: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            values[name].append(subjects[name]())
    return {name: Series(tuple(one)) for name, one in values.items()}


def _timed(clock: Clock, work: Callable[[], object], times: int) -> float:
    start = clock()
    for _ in range(times):
        work()
    return (clock() - start) / times


def cpu(work: Callable[[], object], times: int = 1) -> float:
    """Seconds of this thread's CPU per call."""
    return _timed(time.thread_time, work, times)


def wall(work: Callable[[], object], times: int = 1) -> float:
    """Seconds per call."""
    return _timed(time.perf_counter, work, times)


def fits(work: Callable[[], object], seconds: float, most: int = 1000) -> int:
    """How many calls take about ``seconds``, at least one; calls it once."""
    once = wall(work)
    return max(1, min(most, int(seconds / max(once, 1e-9))))


@dataclass
class Table:
    """Rows of text for a terminal that are also Markdown."""

    title: str
    head: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """A row; a series as its median and spread."""
        self.rows.append([number(cell) if isinstance(cell, float) else str(cell) for cell in cells])

    def print(self) -> None:
        widths = [max(len(row[i]) for row in [self.head, *self.rows]) for i in range(len(self.head))]
        print(f"\n### {self.title}\n")
        for row in [self.head, ["-" * width for width in widths], *self.rows]:
            print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        sys.stdout.flush()


def tls() -> str:
    """What UCX was told to use, for a title."""
    return os.environ.get("UCX_TLS", "default")
