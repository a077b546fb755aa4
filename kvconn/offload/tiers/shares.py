"""What lies in the directory of one share, as far as this process has looked: which segment has which block.

Rules
1. ``<folder>/<writer>/<n>.kv``: whoever writes has a directory of its own, and numbers what it publishes there without
   a gap. So one look per writer, for the next number, finds what is new.
2. What others removed leaves gaps, which a look for the next number does not pass, and entries of files that are gone.
   So a directory that changed, though it has no next number, is listed. File systems tell changes with their clocks'
   ticks only: what that misses is mended by each RELISTth look, which lists everything. A missing file is a miss
   wherever one is opened.
3. A block that two writers published is known at both.
Not safe for several threads at once: its owner locks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvconn.offload.keys import Identity
from kvconn.offload.tiers.segments import Place, key_of, read_entries

__all__ = ["SUFFIX", "TEMPORARY", "WRITER", "ShareIndex"]

SUFFIX, TEMPORARY = ".kv", ".tmp"
#: characters of a writer's name
WRITER = 16
RELIST = 64
#: without waiting: what lies there may be a pipe
LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass
class _Writer:
    """One directory. ``next``: the number to look for; ``segments``: keys by number; ``changed``: when the directory
    was, None: it may have been by what we know of."""

    next: int = 0
    changed: int | None = None
    segments: dict[int, list[bytes]] = field(default_factory=dict)


class ShareIndex:
    """Blocks of ``share`` below ``root``, none longer than ``block_bytes``."""

    def __init__(self, root: str, identity: Identity, share: str, block_bytes: int) -> None:
        self.folder = f"{root}/{identity.namespace}/{share}"
        self.owner = key_of(identity.namespace, share)
        self._block_bytes = block_bytes
        self._writers: dict[str, _Writer] = {}
        self._places: dict[bytes, tuple[tuple[str, Place], ...]] = {}
        self._looks = 0
        #: files that are no segments, since the last call of :meth:`take_bad`
        self._bad: list[str] = []

    def find(self, key: bytes) -> tuple[str, Place] | None:
        """The segment that has ``key``, and where in it."""
        places = self._places.get(key)
        return places[-1] if places is not None else None

    def look(self) -> None:
        """Take in what was published, and forget what is gone (rules 1 and 2)."""
        there = [name for name in _names(self.folder) if len(name) == WRITER]
        for gone in self._writers.keys() - set(there):
            for number in list(self._writers[gone].segments):
                self._forget(gone, number)
            del self._writers[gone]
        again = self._looks % RELIST == 0
        self._looks += 1
        for name in there:
            with contextlib.suppress(OSError):  # one directory that cannot be read must not hide the others
                if again or name not in self._writers:
                    self._list(name)
                else:
                    self._follow(name)

    def _list(self, name: str) -> None:
        changed = self._changed(name)
        numbers = map(_number, _names(f"{self.folder}/{name}"))
        there = {number for number in numbers if number is not None}
        writer = self._writers.setdefault(name, _Writer())
        for gone in writer.segments.keys() - there:
            self._forget(name, gone)
        for number in sorted(there - writer.segments.keys()):
            with contextlib.suppress(OSError):  # one file that cannot be read must not hide the others
                self._take(name, number)
        writer.next = max(writer.next, max(there, default=-1) + 1)
        writer.changed = changed

    def _follow(self, name: str) -> None:
        writer = self._writers[name]
        number = writer.next
        while self._take(name, number):
            number = writer.next = number + 1
        changed = self._changed(name)
        if writer.changed is None:
            writer.changed = changed
        elif writer.changed != changed:
            self._list(name)

    def _changed(self, name: str) -> int | None:
        with contextlib.suppress(OSError):
            return os.stat(f"{self.folder}/{name}").st_mtime_ns
        return None

    def _take(self, name: str, number: int) -> bool:
        """Learn what a segment has. False: there is none."""
        path = self.path(name, number)
        try:
            fd = os.open(path, LOOK)
        except FileNotFoundError:
            return False
        try:
            places = read_entries(fd, self.owner)
        finally:
            os.close(fd)
        if places is None or any(place.length > self._block_bytes for place in places):
            self._bad.append(path)
        else:
            self.add(name, number, places)
        return True

    def add(self, name: str, number: int, places: Iterable[Place]) -> None:
        """A segment that is there."""
        path = self.path(name, number)
        writer = self._writers.setdefault(name, _Writer())
        known = {place.key: place for place in places}
        writer.segments[number] = list(known)
        writer.next = max(writer.next, number + 1)
        writer.changed = None
        for key, place in known.items():
            self._places[key] = (*self._places.get(key, ()), (path, place))

    def path(self, name: str, number: int) -> str:
        return f"{self.folder}/{name}/{number}{SUFFIX}"

    def drop(self, path: str) -> list[bytes]:
        """A file is gone: the keys that are not known any more for that."""
        name, _, file = path.removeprefix(f"{self.folder}/").partition("/")
        number = _number(file)
        return self._forget(name, number) if name in self._writers and number is not None else []

    def _forget(self, name: str, number: int) -> list[bytes]:
        path = self.path(name, number)
        gone = []
        for key in self._writers[name].segments.pop(number, ()):
            left = tuple(place for place in self._places.pop(key) if place[0] != path)
            if left:
                self._places[key] = left
            else:
                gone.append(key)
        return gone

    def take_bad(self) -> list[str]:
        """Files that were looked at and are no segments. Consumes."""
        bad, self._bad = self._bad, []
        return bad

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"ShareIndex({self.folder} blocks={len(self)} writers={len(self._writers)})"


def _number(file: str) -> int | None:
    """Of a segment; None: a file of this name is none."""
    name = file.removesuffix(SUFFIX)
    return int(name) if name != file and name.isascii() and name.isdecimal() else None


def _names(folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)
    return []
