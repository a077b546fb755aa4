"""The disk tier's directory: space, kind, and how fast blocks are written, made durable and read.

Rules
1. Measured in a child, because a dead network file system hangs whoever touches it. The child's files have no name
   after they are opened, so nothing is left behind when it is killed.
2. Read speeds are after the pages were dropped from the cache, as far as the file system obeys.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from kvconn.doctor.children import Ending, begin, decoded, explain, run_child, say_result
from kvconn.doctor.findings import Finding, fail, ok, warn

__all__ = ["DiskFacts", "child", "gather", "judge"]

LIMIT: Final = 60.0
SIZE: Final = 64 << 20
CHUNK: Final = 1 << 20
BLOCK: Final = 256 << 10
ROUNDS: Final = 16
FREE_FLOOR: Final = 1 << 30
#: below this, loading a block from the tier may take longer than computing it again.
SLOW_READ: Final = 200e6
VOLATILE: Final = frozenset({"tmpfs", "ramfs", "overlay"})
REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "lustre", "ceph", "gpfs", "beegfs"})


class DiskFacts(msgspec.Struct, frozen=True):
    """Seconds; ``durable`` is the median of one block written and fsynced."""

    path: str
    kind: str = ""
    free: int = 0
    write: float = 0.0
    sync: float = 0.0
    read: float = 0.0
    durable: float = 0.0
    right: bool = True
    trouble: str = ""


def gather(path: Path) -> DiskFacts:
    return facts_of(str(path), run_child(["disk", str(path.absolute())], LIMIT))


def facts_of(path: str, ending: Ending) -> DiskFacts:
    found = decoded(ending, DiskFacts)
    return found if found is not None else DiskFacts(path, trouble=explain(ending))


def child(path: str) -> None:
    """In the child: write, sync, drop, read, compare."""
    begin("look at the directory")
    free, kind = shutil.disk_usage(path).free, kind_of(path, Path("/proc/self/mounts").read_text())
    chunk = os.urandom(CHUNK)
    count = min(SIZE, free // 4) // CHUNK
    if count == 0:
        raise OSError(f"only {free} bytes are free")
    begin("write")
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        fd = file.fileno()
        start = time.perf_counter()
        for _ in range(count):
            _write(fd, chunk)
        written = time.perf_counter()
        begin("fsync")
        os.fsync(fd)
        synced = time.perf_counter()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        begin("read")
        read_from = time.perf_counter()
        pieces = [os.read(fd, CHUNK) for _ in range(count)]
        read = time.perf_counter() - read_from
    begin("write and fsync single blocks")
    durable = statistics.median(_durable(path, chunk[:BLOCK]) for _ in range(ROUNDS))
    scale = SIZE / (count * CHUNK)
    say_result(
        DiskFacts(
            path, kind, free, (written - start) * scale, (synced - start) * scale, read * scale, durable,
            right=all(piece == chunk for piece in pieces),
        )
    )  # fmt: skip


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _durable(path: str, block: bytes) -> float:
    with tempfile.TemporaryFile(dir=path, buffering=0) as file:
        start = time.perf_counter()
        _write(file.fileno(), block)
        os.fsync(file.fileno())
        return time.perf_counter() - start


def kind_of(path: str, mounts: str) -> str:
    """The file system of the longest mount point above ``path``; the last mount on a point is the one seen."""
    real, best, kind = os.path.realpath(path), -1, ""
    for cells in (line.split() for line in mounts.splitlines()):
        if len(cells) < 3:
            continue
        point = cells[1].replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= best:
            best, kind = len(point), cells[2]
    return kind


def judge(facts: DiskFacts) -> list[Finding]:
    if facts.trouble:
        return [
            fail(
                f"disk tier: {facts.path} cannot be used",
                f"The tier could not store or load. What happened: {facts.trouble}",
                "a directory that exists, is writable for the engine's user, and answers",
            )
        ]
    if not facts.right:
        return [
            fail(
                f"disk tier: {facts.path} gives back other bytes than were written",
                "Checksums would turn every block into a miss.",
                "another disk",
            )
        ]
    read = SIZE / facts.read
    where = f"{facts.path} ({facts.kind or 'unknown file system'}, {facts.free / 2**30:.1f} GiB free)"
    write, durable = SIZE / facts.write / 1e6, SIZE / facts.sync / 1e6
    found = [
        ok(
            f"disk tier: {where} writes {write:.0f} MB/s, with fsync {durable:.0f} MB/s, reads {read / 1e6:.0f} MB/s; "
            f"a block of {BLOCK >> 10} KiB is durable after {facts.durable * 1e3:.1f} ms"
        )
    ]
    if read < SLOW_READ:
        found.append(
            warn(
                f"disk tier: it reads {read / 1e6:.0f} MB/s",
                "Loading a block may take longer than computing it again.",
                "a local NVMe disk, or no disk tier",
            )
        )
    if facts.free < FREE_FLOOR:
        found.append(
            warn(
                f"disk tier: {facts.free / 2**20:.0f} MiB are free",
                "A full disk turns stores into skips.",
                "free space, or set the tier's max_bytes below it",
            )
        )
    if facts.kind in VOLATILE:
        found.append(
            warn(
                f"disk tier: {facts.kind} does not survive the container or the host",
                "After a restart everything is a miss.",
                "a mounted volume on a disk",
            )
        )
    elif facts.kind.split(".")[0] in REMOTE:
        found.append(
            warn(
                f"disk tier: {facts.kind} is a network or user-space file system",
                "Its speed is shared, and when it hangs, loads wait until their deadline.",
                "a local disk, unless sharing the tier between hosts is what you want",
            )
        )
    return found
