"""What engines take while they run: memory, files, handles, blocks, and how much they do.

Rules
1. Memory and files are of all processes of all engines together, from /proc; handles are posted reads of all ranks, as
   their explain sockets say.
2. Handles are asked for only where no engine is stopped: one that stands does not answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

__all__ = ["Sample", "Sampler", "files", "resident"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_HANDLES = re.compile(r"\bhandles=(\d+)")


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """``at`` seconds from the start. ``rss`` in bytes; ``kv`` blocks in use; ``done`` requests so far."""

    at: float
    done: int
    rss: int
    fds: int
    handles: int
    kv: int


class Sampler:
    """Takes one every ``every`` seconds. The functions say what there is now."""

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        kv: Callable[[], int],
        summaries: Callable[[], Iterable[str]],
        began: float,
        every: float = 2.0,
    ) -> None:
        self._pids = pids
        self._kv = kv
        self._summaries = summaries
        self._began = began
        self._every = every
        self._next = began
        self.samples: list[Sample] = []

    def look(self, done: int, now: float) -> None:
        """Take one if it is time."""
        if now < self._next:
            return
        self._next = now + self._every
        pids = list(self._pids())
        sample = Sample(
            at=now - self._began,
            done=done,
            rss=sum(map(resident, pids)),
            fds=sum(map(files, pids)),
            handles=sum(int(n) for text in self._summaries() for n in _HANDLES.findall(text)),
            kv=self._kv(),
        )
        self.samples.append(sample)


def resident(pid: int) -> int:
    """Bytes; 0 of a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def files(pid: int) -> int:
    """Open file descriptors; 0 of a process that is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
