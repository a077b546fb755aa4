"""Copies one block between the engine's cache and its slot in host memory.

Rules
1. Regions lie in a slot one behind the other, in wire order.
2. A copy has happened when :meth:`Copier.copy` returns. It blocks the thread that calls it, and no other.
3. A store begins behind what the engine had launched when its step ended (:meth:`Copier.mark`): on a GPU the host is
   ahead of the blocks that it fills.
In DRAM a copy is a ``memmove`` on the calling thread. In VRAM it runs on side streams, one per direction, so that it
waits for no kernel of the engine's and no kernel waits for it; the host tier is page-locked for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvconn.errors import ConfigError
from kvconn.geometry import Region
from kvconn.memory import device_block_bytes, host_bytes

__all__ = ["Copier", "DramCopier", "VramCopier", "make_copier", "slot_bytes"]


def slot_bytes(regions: Sequence[Region]) -> int:
    """Bytes of one block over all ``regions``."""
    return sum(region.length for region in regions)


class Copier(ABC):
    """Between ``regions`` and slots that begin at addresses of host memory."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(regions)
        self.offsets = tuple(itertools.accumulate((region.length for region in regions), initial=0))[:-1]

    @abstractmethod
    def copy(self, slot: int, blocks: tuple[int, ...], *, load: bool, after: Any = None) -> None:
        """Block ``blocks[g]`` of each group to address ``slot``, or back when ``load``; behind the mark ``after``."""

    def mark(self) -> Any:
        """What the engine has launched so far on this thread's stream; None where nothing is asynchronous."""
        return None

    def close(self) -> None:
        """Let go of the host tier, before it is unmapped. Idempotent."""


class DramCopier(Copier):
    """The cache is in host memory."""

    def __init__(self, regions: Sequence[Region]) -> None:
        super().__init__(regions)
        self._pieces = [
            (region.group, region.base, region.stride, offset, region.length)
            for region, offset in zip(self.regions, self.offsets, strict=True)
        ]

    def copy(self, slot: int, blocks: tuple[int, ...], *, load: bool, after: Any = None) -> None:
        move = ctypes.memmove
        if load:
            for group, base, stride, offset, length in self._pieces:
                move(base + blocks[group] * stride, slot + offset, length)
        else:
            for group, base, stride, offset, length in self._pieces:
                move(slot + offset, base + blocks[group] * stride, length)


class VramCopier(Copier):
    """The cache is on one GPU. ``host`` and ``size``: the host tier, which is page-locked. Raises ConfigError."""

    def __init__(self, regions: Sequence[Region], host: int, size: int) -> None:
        super().__init__(regions)
        import torch

        devices = {region.device_id for region in regions}
        if len(devices) != 1:
            raise ConfigError(f"layers: expected all on one GPU, got GPUs {sorted(devices)}")
        self._torch: Any = torch
        self._device = torch.device("cuda", devices.pop())
        self._cudart: Any = self._torch.cuda.cudart()
        self._host, self._size = host, size
        code = int(self._cudart.cudaHostRegister(host, size, 0))
        if code != 0:
            raise ConfigError(
                f"cpu_bytes_to_use: cannot page-lock {size} bytes of host memory for the GPU (CUDA error {code}); "
                "raise the limit of locked memory or use less"
            )
        self._caches = [device_block_bytes(region, self._device) for region in regions]
        self._streams: dict[bool, Any] = {load: self._torch.cuda.Stream(self._device) for load in (False, True)}

    def mark(self) -> Any:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def copy(self, slot: int, blocks: tuple[int, ...], *, load: bool, after: Any = None) -> None:
        stream = self._streams[load]
        if after is not None:
            stream.wait_event(after)
        with self._torch.cuda.stream(stream):
            for region, offset, cache in zip(self.regions, self.offsets, self._caches, strict=True):
                device = cache[blocks[region.group]]
                host = self._torch.from_numpy(host_bytes(slot + offset, region.length))
                target, source = (device, host) if load else (host, device)
                target.copy_(source, non_blocking=True)
        stream.synchronize()

    def close(self) -> None:
        if self._size:
            with contextlib.suppress(RuntimeError):
                self._cudart.cudaHostUnregister(self._host)
            self._caches, self._size = [], 0


def make_copier(regions: Sequence[Region], host: int, size: int) -> Copier:
    """For where the cache is. Raises ConfigError for layers in both memories."""
    kinds = {region.mem_type for region in regions}
    if len(kinds) > 1:
        raise ConfigError("layers: offloading moves a cache that is all in DRAM or all in VRAM, got both")
    return DramCopier(regions) if kinds == {"DRAM"} else VramCopier(regions, host, size)
