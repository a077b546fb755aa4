"""Is a long run as good at its end as at its beginning? Pure, over :class:`~kvconn.chaos.samples.Sample`.

Rules
1. The first tenth of the time is the beginning, the last tenth the end; of each the median counts.
2. Throughput may fall by a quarter; files and handles may grow by a few, memory by a part of itself: caches of Python
   and of UCX fill for a while.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import msgspec

from kvconn.chaos.samples import Sample

__all__ = ["Ends", "drift", "ends", "rates"]

#: of the beginning's throughput
LEAST_RATE = 0.75
#: of the memory after the beginning, files, handles
MOST_RSS, MOST_FDS, MOST_HANDLES = 1.10, 8, 24
#: fewer samples say nothing
ENOUGH = 20


class Ends(msgspec.Struct, frozen=True):
    """Medians of the first and of the last tenth: requests per second, bytes, files, handles. ``kv``: at the end."""

    rate: tuple[float, float]
    rss: tuple[float, float]
    fds: tuple[float, float]
    handles: tuple[float, float]


def rates(samples: Sequence[Sample]) -> list[float]:
    """Requests per second between each sample and the next."""
    return [(b.done - a.done) / (b.at - a.at) for a, b in itertools.pairwise(samples) if b.at > a.at]


def ends(samples: Sequence[Sample]) -> Ends | None:
    """The two ends; None of too few samples. Memory and files begin at the second tenth, when every pool was used."""
    if len(samples) < ENOUGH:
        return None
    tenth = len(samples) // 10
    rate = rates(samples)
    filled = samples[tenth : 2 * tenth]
    return Ends(
        (statistics.median(rate[:tenth]), statistics.median(rate[-tenth:])),
        _medians([s.rss for s in filled], [s.rss for s in samples[-tenth:]]),
        _medians([s.fds for s in filled], [s.fds for s in samples[-tenth:]]),
        _medians([s.handles for s in filled], [s.handles for s in samples[-tenth:]]),
    )


def _medians(first: Sequence[int], last: Sequence[int]) -> tuple[float, float]:
    return statistics.median(first), statistics.median(last)


def drift(samples: Sequence[Sample]) -> list[str]:
    """One line per thing that is not flat; empty when all is, or too little is known."""
    both = ends(samples)
    if both is None:
        return []
    found = []
    if both.rate[1] < LEAST_RATE * both.rate[0]:
        found.append(f"throughput fell from {both.rate[0]:.1f} to {both.rate[1]:.1f} requests/s")
    if both.rss[1] > MOST_RSS * both.rss[0]:
        found.append(f"memory grew from {both.rss[0] / 2**20:.0f} to {both.rss[1] / 2**20:.0f} MiB")
    if both.fds[1] > both.fds[0] + MOST_FDS:
        found.append(f"open files grew from {both.fds[0]:.0f} to {both.fds[1]:.0f}")
    if both.handles[1] > both.handles[0] + MOST_HANDLES:
        found.append(f"posted reads grew from {both.handles[0]:.0f} to {both.handles[1]:.0f}")
    return found
