"""Blocks to and from each tier of the offloading connector, beside a copy of the same bytes and plain pwrite and pread.

Files are in a temporary directory and never synced: what is measured is the page cache and the file system, not a disk.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.measure import Series, Table, alternate, wall
from kvconn.config import LIMITS, FsTierSettings
from kvconn.geometry import Region
from kvconn.offload.copier import DramCopier
from kvconn.offload.keys import Identity
from kvconn.offload.tiers.fs import FsTier
from kvconn.offload.tiers.host import HostTier

__all__ = ["run"]

KIB = 1024
#: bytes of a block over all layers, and layers
SHAPES = ((16 * KIB, 4), (64 * KIB, 16), (256 * KIB, 32), (2048 * KIB, 32))
#: bytes per turn
TURN = 16 * 1024 * KIB
IDENTITY = Identity("bench", ("all",), "all")


def run(rounds: int = 9) -> Iterator[Table]:
    host = Table(
        "Offload: host memory, between a cache in DRAM and its slots (ratios of time)",
        ("block x layers", "store GB/s", "load GB/s", "memcpy/store", "memcpy/load"),
    )
    files = Table(
        "Offload: files, between slots and the page cache, beside pwrite and pread of the same bytes (ratios of time)",
        ("block", "store GB/s", "load GB/s", "pwrite/store", "pread/load", "files made/store"),
    )
    for block_bytes, layers in SHAPES:
        one = Host(block_bytes, layers)
        got = alternate({"store": one.store, "load": one.load, "memcpy": one.memcpy}, rounds)
        store, load, plain = got["store"], got["load"], got["memcpy"]
        host.add(f"{block_bytes // KIB} KiB x {layers}", _speed(store), _speed(load), plain.over(store),
                 plain.over(load))  # fmt: skip
        one.close()
    yield host
    with tempfile.TemporaryDirectory() as root:  # removed at the end: making files was slow after that
        for block_bytes, _ in SHAPES:
            disk = Files(tempfile.mkdtemp(dir=root), block_bytes)
            subjects = {"store": disk.store, "load": disk.load, "pwrite": disk.pwrite, "pread": disk.pread}
            got = alternate(subjects | {"create": disk.create}, rounds)
            disk.close()
            store, load = got["store"], got["load"]
            files.add(f"{block_bytes // KIB} KiB", _speed(store), _speed(load), got["pwrite"].over(store),
                      got["pread"].over(load), got["create"].over(store))  # fmt: skip
    yield files


def _speed(seconds: Series) -> Series:
    return seconds.per(TURN / 1e9)


class Host:
    """A cache of ``layers`` regions, and as many slots as a turn has blocks."""

    def __init__(self, block_bytes: int, layers: int) -> None:
        self.count, length = TURN // block_bytes, block_bytes // layers
        self.cache = np.ones((layers, self.count * length), np.uint8)
        regions = [Region(f"{i}", one.ctypes.data, length, length, self.count, 0, "DRAM")
                   for i, one in enumerate(self.cache)]  # fmt: skip
        self.copier = DramCopier(regions)
        self.tier = HostTier(self.count, block_bytes)
        self.target = np.ones(TURN, np.uint8)
        for warm in (self.store, self.load, self.memcpy):
            warm()

    def _copy(self, load: bool) -> None:
        for block in range(self.count):
            self.copier.copy(self.tier.address(block), (block,), load=load)

    def store(self) -> float:
        return wall(partial(self._copy, False))

    def load(self) -> float:
        return wall(partial(self._copy, True))

    def memcpy(self) -> float:
        return wall(lambda: ctypes.memmove(self.target.ctypes.data, self.cache.ctypes.data, TURN))

    def close(self) -> None:
        self.tier.close()


class Files:
    """The file tier in ``root``, and one plain file beside it. What a turn stores is a turn's worth of new blocks."""

    def __init__(self, root: str, block_bytes: int) -> None:
        self.block_bytes, self.count = block_bytes, TURN // block_bytes
        self.tier = FsTier(FsTierSettings("fs", root, 1 << 40), IDENTITY, block_bytes)
        self.together = min(self.tier.batch, LIMITS.save_bytes // block_bytes)
        self.slots = HostTier(self.count, block_bytes)
        self.slots.write(0, os.urandom(self.slots.slots * block_bytes))
        self.serial = itertools.count()
        self.newest: list[bytes] = []
        self.root, self.at = root, -TURN
        self.plain = os.open(f"{root}/plain", os.O_RDWR | os.O_CREAT, 0o600)
        self.kept = [bytes(self.slots.read_all([slot], block_bytes)) for slot in range(self.count)]
        for warm in (self.store, self.load, self.pwrite, self.pread):
            warm()

    def store(self) -> float:
        numbers = itertools.islice(self.serial, self.count)
        self.newest = [n.to_bytes(32, "little") for n in numbers]
        return wall(self._store)

    def _store(self) -> None:
        """As the worker half does: some blocks at once, copied first."""
        for at in range(0, self.count, self.together):
            keys = self.newest[at : at + self.together]
            self.tier.write_all(keys, self.slots.read_all(range(at, at + len(keys)), self.block_bytes))

    def load(self) -> float:
        return wall(self._load)

    def _load(self) -> None:
        for slot, key in enumerate(self.newest):
            data = self.tier.read(key)
            if data is None:
                raise RuntimeError("a block that was stored is not there")
            self.slots.write(slot, data)

    def pwrite(self) -> float:
        """To the file's end: pages that were given back a moment ago are cheaper than those that new files get."""
        self.at += TURN
        return wall(self._each(lambda at, data: os.pwrite(self.plain, data, at)))

    def pread(self) -> float:
        return wall(self._each(lambda at, _: os.pread(self.plain, self.block_bytes, at)))

    def _each(self, do: Callable[[int, bytes], object]) -> Callable[[], None]:
        def all_of_them() -> None:
            for slot, data in enumerate(self.kept):
                do(self.at + slot * self.block_bytes, data)

        return all_of_them

    def create(self) -> float:
        """As many empty files: opened, closed, renamed."""
        names = [f"{self.root}/empty-{next(self.serial)}" for _ in range(0, self.count, self.together)]

        def all_of_them() -> None:
            for name in names:
                os.close(os.open(f"{name}-new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                os.rename(f"{name}-new", name)

        return wall(all_of_them)

    def close(self) -> None:
        os.close(self.plain)
        self.slots.close()
        self.tier.close()
