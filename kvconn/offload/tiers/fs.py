"""The file tier: files of a few blocks each, in a directory that engines may share and that outlives them.

Rules
1. ``root_dir/<namespace>/<share>/<writer>/<n>.kv``, all names ours: what is not the same bytes lies elsewhere, or under
   another key. What is in a file: :mod:`.segments`; what is in the directory: :mod:`.shares`.
2. Blocks that are written together are one file, which is made under another name and renamed: readers see all of it or
   nothing. Nothing is synced: after a crash of the machine, files may be torn or missing. That is a miss, and never
   wrong bytes: a file that is not exactly what was written is removed, with all its blocks.
3. ``max_bytes`` bounds one rank's share, and a file has a sixteenth of that at most, or one block. The directory is
   scanned after each sixteenth of that which this engine wrote, and the files longest unused are removed down to
   fifteen sixteenths; a second engine may add its own sixteenth to the bound. Uses are the files' modification times.
4. ``root_dir`` itself is never made: a disk that is not mounted must not fill the one below.
5. Plain system calls, not NIXL's POSIX backend: docs/offloading.md, "Files", has the reason.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from stat import S_ISDIR

from kvconn.config import FsTierSettings
from kvconn.errors import ConfigError
from kvconn.offload.keys import Identity
from kvconn.offload.tiers.base import MAX_KEY, SecondaryTier
from kvconn.offload.tiers.segments import BLOCKS_MAX, Place, length_of, pack, read_block
from kvconn.offload.tiers.shares import TEMPORARY, WRITER, ShareIndex

__all__ = ["FsTier"]

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: seconds after which a temporary file belongs to nobody any more
ABANDONED = 600.0
#: removed blocks that wait to be told, and how many are told at once
REMOVED_MAX, TOLD_MAX = 1 << 16, 1024


class FsTier(SecondaryTier):
    """Blocks of ``block_bytes`` at most. Raises ConfigError."""

    name = "fs"
    batch = BLOCKS_MAX

    def __init__(self, settings: FsTierSettings, identity: Identity, block_bytes: int) -> None:
        least = length_of(1, block_bytes)
        if settings.max_bytes < least:
            raise ConfigError(f"max_bytes: expected at least one block of {least} bytes, got {settings.max_bytes}")
        if not os.path.isdir(settings.root_dir):
            raise ConfigError(f"root_dir: expected a directory that exists, got {settings.root_dir!r}")
        self._root = settings.root_dir
        self._max = settings.max_bytes
        #: blocks of a file (rule 3), so that what is written at once is one file, and is there or not as one
        self.batch = max(1, min(self.batch, settings.max_bytes // 16 // least))
        self._identity = identity
        self._shares = {share: ShareIndex(settings.root_dir, identity, share, block_bytes) for share in identity.shares}
        self._lock = threading.Lock()
        self._writer = secrets.token_hex(WRITER // 2)
        self._next = 0
        self._serial = itertools.count()
        self._used: int | None = None
        self._since_scan = 0
        #: not told yet, oldest first; taken from without the lock, which is held over calls to the disk
        self._removed: dict[bytes, None] = {}

    # -- the tier ------------------------------------------------------------------------------------------------

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            for share in self._shares.values():
                self._look(share)
            return [all(share.find(key) is not None for share in self._shares.values()) for key in keys]

    def write(self, key: bytes, data: bytes) -> bool:
        return all(self.write_all([key], memoryview(data)))

    def write_all(self, keys: Sequence[bytes], data: memoryview) -> list[bool]:
        new, size = self._unknown(keys), len(data) // len(keys)
        if new:
            self._publish([keys[k] for k in new], _picked(data, size, new))
        return [True] * len(keys)

    def read(self, key: bytes) -> bytes | None:
        while (found := self._find(key)) is not None:  # a file that fails is forgotten, and another may have the block
            data = self._read_at(*found)
            if data is not None:
                return data
        return None

    def take_removed(self) -> list[bytes]:
        oldest = list(self._removed)[:TOLD_MAX]
        return [key for key in oldest if self._removed.pop(key, False) is None]

    # -- what is there -------------------------------------------------------------------------------------------

    def _share(self) -> ShareIndex:
        assert self._identity.share is not None, "a scheduler half moves no bytes"
        return self._shares[self._identity.share]

    def _look(self, share: ShareIndex) -> None:
        share.look()
        bad = share.take_bad()
        for path in bad if share is self._shares.get(self._identity.share or "") else ():
            self._remove(path)

    def _find(self, key: bytes) -> tuple[str, Place] | None:
        share = self._share()
        with self._lock:
            if share.find(key) is None:
                self._look(share)
            return share.find(key)

    def _read_at(self, path: str, place: Place) -> bytes | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            with self._lock:
                self._share().drop(path)
            return None
        try:
            data = read_block(fd, place)
        finally:
            os.close(fd)
        if data is None:
            with self._lock:
                self._remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def _unknown(self, keys: Sequence[bytes]) -> list[int]:
        """Which of ``keys`` no file has, each once; the files of the others count as used."""
        share = self._share()
        used: set[str] = set()
        with self._lock:
            self._look(share)
            for key in keys:
                assert 0 < len(key) <= MAX_KEY, "keys are bounded where they come in"
                found = share.find(key)
                if found is not None and found[0] not in used:
                    try:
                        os.utime(found[0])
                        used.add(found[0])
                    except FileNotFoundError:
                        share.drop(found[0])
            return sorted({key: k for k, key in enumerate(keys) if share.find(key) is None}.values())

    # -- files ---------------------------------------------------------------------------------------------------

    def _publish(self, keys: Sequence[bytes], data: memoryview) -> None:
        """One file of these blocks, whole or not at all."""
        share = self._share()
        head, places = pack(share.owner, keys, data)
        length = len(head) + len(data)
        with self._lock:
            self._make_room(length)
        temporary = f"{share.folder}/{TEMPORARY}/{self._writer}-{next(self._serial)}"
        try:
            self._write_new(temporary, (head, data))
            with self._lock:
                self._rename(temporary, share.path(self._writer, self._next))
                share.add(self._writer, self._next, places)
                for key in keys:
                    self._removed.pop(key, None)  # back before it was told
                self._next += 1
                self._used = (self._used or 0) + length
                self._since_scan += length
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _write_new(self, path: str, parts: tuple[bytes, memoryview]) -> None:
        """The parts one behind the other, in one call: each costs this thread a wait for the interpreter."""
        try:
            fd = os.open(path, NEW, 0o600)
        except FileNotFoundError:
            self._make_folder(path)
            fd = os.open(path, NEW, 0o600)
        try:
            written = os.writev(fd, parts)
            if written < sum(map(len, parts)):  # a disk that is nearly full
                rest = memoryview(b"".join(parts))[written:]
                while rest:
                    rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    def _rename(self, temporary: str, path: str) -> None:
        try:
            os.rename(temporary, path)
        except FileNotFoundError:  # the first one, or what was there has been removed
            self._make_folder(path)
            os.rename(temporary, path)

    def _make_folder(self, path: str) -> None:
        if not os.path.isdir(self._root):
            raise FileNotFoundError(f"{self._root} is gone")
        os.makedirs(os.path.dirname(path), exist_ok=True)

    # -- room ----------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        fits = self._used is not None and self._used + size <= self._max
        if not fits or self._since_scan * 16 > self._max:
            self._scan(size)

    def _scan(self, size: int) -> None:
        """What is really there, other engines' files included; the longest unused goes (rule 3)."""
        files = sorted(self._files())
        self._used = sum(length for _, length, _ in files)
        self._since_scan = 0
        if self._used + size <= self._max:
            return
        target = self._max - self._max // 16
        for _, length, path in files:
            if self._used + size <= target:
                break
            with contextlib.suppress(OSError):  # one that cannot be removed keeps no other
                self._unlink(path)
                self._used -= length
        if self._used + size > self._max:
            raise OSError(errno.ENOSPC, "max_bytes is full of files that cannot be removed", self._share().folder)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(last use, length, path) of this share's files, those of earlier versions and others' temporary ones
        included. Directories without any are removed: nobody writes there, or whoever does makes it again."""
        old = time.time() - ABANDONED
        for directory in _entries(self._share().folder):
            entries = _entries(directory.path) if directory.is_dir(follow_symlinks=False) else []
            if not entries and directory.name not in (TEMPORARY, self._writer):
                with contextlib.suppress(OSError):
                    os.rmdir(directory.path)
            for entry in entries:
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed by another engine
                    continue
                if S_ISDIR(stat.st_mode):
                    continue
                if directory.name != TEMPORARY:
                    yield stat.st_mtime, stat.st_size, entry.path
                elif stat.st_mtime >= old:  # somebody is writing it: the last to go
                    yield math.inf, stat.st_size, entry.path
                else:
                    with contextlib.suppress(OSError):
                        self._unlink(entry.path)

    def _remove(self, path: str) -> None:
        """A file that is not what was written."""
        length = 0
        with contextlib.suppress(FileNotFoundError):  # another engine was faster
            length = os.path.getsize(path)
        self._unlink(path)
        if self._used is not None:
            self._used = max(0, self._used - length)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        for key in self._share().drop(path):
            if len(self._removed) < REMOVED_MAX:
                self._removed[key] = None

    def __repr__(self) -> str:
        used = "not scanned" if self._used is None else f"{self._used}/{self._max} bytes"
        return f"FsTier({self._root} {used})"


def _picked(data: memoryview, size: int, which: Sequence[int]) -> memoryview:
    """Some of the blocks in ``data``, of ``size`` bytes each."""
    first, last = which[0], which[-1]
    if last - first + 1 == len(which):
        return data[first * size : (last + 1) * size]
    return memoryview(b"".join([data[k * size : (k + 1) * size] for k in which]))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
