"""The file tier: one file per block and share, in a directory that engines may share and that outlives them.

Rules
1. ``root_dir/<namespace>/<share>/<xx>/<key>.kv``, all in hex: what is not the same bytes has another name.
2. A file is written under another name in its directory and renamed: readers see all of it or nothing. Nothing is
   synced: after a crash of the machine, files may be torn or missing. That is a miss, and never wrong bytes:
3. every file begins with what its namespace, share, key and length hash to, and with two sums over its data, of 32 and
   64 bits. A file that is not exactly that is removed. The sums are quick and find accidents; they do not keep out
   anybody who may write in ``root_dir``.
4. ``max_bytes`` bounds one rank's share. The directory is scanned after each sixteenth of that which this engine
   wrote, and the files longest unused are removed down to fifteen sixteenths; a second engine may add its own
   sixteenth to the bound. Uses are the files' modification times.
5. ``root_dir`` itself is never made: a disk that is not mounted must not fill the one below.
6. Plain system calls, not NIXL's POSIX backend: docs/offloading.md, "Files", has the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from kvconn.config import FsTierSettings
from kvconn.errors import ConfigError
from kvconn.offload.keys import Identity
from kvconn.offload.tiers.base import MAX_KEY, SecondaryTier

__all__ = ["FsTier"]

MAGIC = b"kvconn2\n"
DIGEST, SUMS = 16, 4 + 8
HEADER = len(MAGIC) + SUMS + DIGEST
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
SUFFIX, TEMPORARY = ".kv", ".tmp-"
#: seconds after which a temporary file belongs to nobody any more
ABANDONED = 600.0
REMOVED_MAX = 4096
#: one for all tiers of a process, so that no two write one temporary file
_serial = itertools.count()


class FsTier(SecondaryTier):
    """Blocks of ``block_bytes`` at most. Raises ConfigError."""

    name = "fs"

    def __init__(self, settings: FsTierSettings, identity: Identity, block_bytes: int) -> None:
        if settings.max_bytes < HEADER + block_bytes:
            raise ConfigError(
                f"max_bytes: expected at least one block of {HEADER + block_bytes} bytes, got {settings.max_bytes}"
            )
        if not os.path.isdir(settings.root_dir):
            raise ConfigError(f"root_dir: expected a directory that exists, got {settings.root_dir!r}")
        self._root = settings.root_dir
        self._max = settings.max_bytes
        self._block_bytes = block_bytes
        self._identity = identity
        self._lock = threading.Lock()
        self._used: int | None = None
        self._since_scan = 0
        self._removed: list[bytes] = []

    # -- the tier ------------------------------------------------------------------------------------------------

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        return [all(os.path.exists(self._path(key, share)) for share in self._identity.shares) for key in keys]

    def write(self, key: bytes, data: bytes) -> bool:
        share = self._share()
        path = self._path(key, share)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        header = self._header(key, share, data)
        length = len(header) + len(data)
        self._make_room(length)
        temporary = f"{os.path.dirname(path)}/{TEMPORARY}{os.getpid()}-{next(_serial)}"
        try:
            self._write_new(temporary, (header, data))
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        with self._lock:
            self._used = (self._used or 0) + length
            self._since_scan += length
        return True

    def read(self, key: bytes) -> bytes | None:
        share = self._share()
        path = self._path(key, share)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            header, data = os.read(fd, HEADER), _read(fd, self._block_bytes)
        finally:
            os.close(fd)
        if header != self._header(key, share, data):
            self._remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def take_removed(self) -> list[bytes]:
        with self._lock:
            removed, self._removed = self._removed, []
        return removed

    # -- files ---------------------------------------------------------------------------------------------------

    def _share(self) -> str:
        assert self._identity.share is not None, "a scheduler half moves no bytes"
        return self._identity.share

    def _folder(self, share: str) -> str:
        return f"{self._root}/{self._identity.namespace}/{share}"

    def _path(self, key: bytes, share: str) -> str:
        assert 0 < len(key) <= MAX_KEY, "keys are bounded where they come in"
        name = key.hex()
        return f"{self._folder(share)}/{name[:2]}/{name}{SUFFIX}"

    def _header(self, key: bytes, share: str, data: bytes) -> bytes:
        digest = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=DIGEST)
        for part in (self._identity.namespace.encode(), share.encode(), key):
            digest.update(len(part).to_bytes(4, "little"))
            digest.update(part)
        words = np.frombuffer(data, np.dtype("<u8"), len(data) // 8)
        total = int(np.add.reduce(words))
        return MAGIC + zlib.crc32(data).to_bytes(4, "little") + total.to_bytes(8, "little") + digest.digest()

    def _write_new(self, path: str, parts: tuple[bytes, bytes]) -> None:
        """The parts one behind the other, in one call: each costs this thread a wait for the interpreter."""
        try:
            fd = os.open(path, NEW, 0o600)
        except FileNotFoundError:
            if not os.path.isdir(self._root):
                raise FileNotFoundError(f"{self._root} is gone") from None
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, NEW, 0o600)
        try:
            written = os.writev(fd, parts)
            if written < sum(map(len, parts)):  # a disk that is nearly full
                rest = memoryview(b"".join(parts))[written:]
                while rest:
                    rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    # -- room ----------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        with self._lock:
            fits = self._used is not None and self._used + size <= self._max
            if not fits or self._since_scan * 16 > self._max:
                self._scan(size)

    def _scan(self, size: int) -> None:
        """What is really there, other engines' files included; the longest unused goes (rule 4)."""
        files = sorted(self._files())
        self._used = sum(length for _, length, _ in files)
        self._since_scan = 0
        if self._used + size <= self._max:
            return
        target = self._max - self._max // 16
        for _, length, path in files:
            if self._used + size <= target:
                break
            self._unlink(path)
            self._used -= length

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(last use, length, path) of this share's files, temporary ones of others included."""
        folder = self._folder(self._share())
        old = time.time() - ABANDONED
        for directory in _entries(folder):
            for entry in _entries(directory.path) if directory.is_dir(follow_symlinks=False) else ():
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed by another engine
                    continue
                if entry.name.startswith(TEMPORARY) and stat.st_mtime < old:
                    self._unlink(entry.path)
                else:
                    yield stat.st_mtime, stat.st_size, entry.path

    def _remove(self, path: str) -> None:
        with self._lock:
            length = 0
            with contextlib.suppress(FileNotFoundError):  # another engine was faster
                length = os.path.getsize(path)
            self._unlink(path)
            if self._used is not None:
                self._used = max(0, self._used - length)

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        name = os.path.basename(path)
        if name.endswith(SUFFIX) and len(self._removed) < REMOVED_MAX:
            with contextlib.suppress(ValueError):
                self._removed.append(bytes.fromhex(name.removesuffix(SUFFIX)))

    def __repr__(self) -> str:
        used = "not scanned" if self._used is None else f"{self._used}/{self._max} bytes"
        return f"FsTier({self._root} {used})"


def _read(fd: int, limit: int) -> bytes:
    """Up to the file's end, at most one byte more than ``limit``."""
    data = os.read(fd, limit + 1)
    while 0 < len(data) <= limit and (more := os.read(fd, limit + 1 - len(data))):
        data += more
    return data


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
