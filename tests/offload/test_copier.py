"""Blocks between a cache and their slots: byte-exact, nothing beside them."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest
import torch

from kvconn.errors import ConfigError
from kvconn.geometry import Region
from kvconn.offload.copier import Copier, make_copier, slot_bytes
from kvconn.offload.tiers.host import HostTier

COUNT, SLOTS = 5, 3
#: (stride, length) in bytes: one dense, one with room between its blocks
SHAPES = [(96, 96), (256, 160)]


def regions_at(bases: list[int], mem_type: str) -> list[Region]:
    return [
        Region(f"layer.{i}", base, stride, length, COUNT, 0, mem_type)
        for i, (base, (stride, length)) in enumerate(zip(bases, SHAPES, strict=True))
    ]


def stores_and_loads(copier: Copier, tier: HostTier, caches: list[Any]) -> None:
    """``caches``: uint8 tensors, one per region. Block 3 goes to slot 1, and from there to block 0."""
    before = [cache.cpu().numpy().copy() for cache in caches]
    copier.copy(tier.address(1), (3,), load=False, after=copier.mark())
    stored = b"".join(
        old[3 * stride :][:length].tobytes() for old, (stride, length) in zip(before, SHAPES, strict=True)
    )
    assert tier.read_all([1], len(stored)) == stored
    assert tier.read_all([0, 2], tier.slot_bytes) == bytes(2 * tier.slot_bytes)

    copier.copy(tier.address(1), (0,), load=True, after=copier.mark())
    for cache, old, (stride, length) in zip(caches, before, SHAPES, strict=True):
        old[:length] = old[3 * stride :][:length]
        assert np.array_equal(cache.cpu().numpy(), old)
    copier.close()
    copier.close()
    tier.close()


def cache_bytes(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [stride * COUNT for stride, _ in SHAPES]
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device) for size in sizes]


def test_in_dram() -> None:
    caches = cache_bytes("cpu")
    regions = regions_at([cache.data_ptr() for cache in caches], "DRAM")
    tier = HostTier(SLOTS, slot_bytes(regions))
    stores_and_loads(make_copier(regions, tier.address(0), SLOTS * tier.slot_bytes), tier, caches)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: copies between VRAM and the host tier did not run")
def test_in_vram() -> None:
    caches = cache_bytes("cuda:0")
    regions = regions_at([cache.data_ptr() for cache in caches], "VRAM")
    tier = HostTier(SLOTS, -(-slot_bytes(regions) // mmap.PAGESIZE) * mmap.PAGESIZE)
    stores_and_loads(make_copier(regions, tier.address(0), SLOTS * tier.slot_bytes), tier, caches)


def test_a_cache_in_both_memories_is_refused() -> None:
    regions = [Region("a", 4096, 64, 64, 1, 0, "DRAM"), Region("b", 8192, 64, 64, 1, 0, "VRAM")]
    with pytest.raises(ConfigError, match="all in DRAM or all in VRAM, got both"):
        make_copier(regions, 0, 0)


def test_a_cache_on_two_gpus_is_refused() -> None:
    regions = [Region(str(i), 4096 * (i + 1), 64, 64, 1, 0, "VRAM", device_id=i) for i in range(2)]
    with pytest.raises(ConfigError, match=r"all on one GPU, got GPUs \[0, 1\]"):
        make_copier(regions, 0, 0)
