"""The host tier over real memory."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from kvconn.offload.tiers.host import HostTier

BLOCK = 3000


def test_one_page_aligned_buffer_of_equal_slots() -> None:
    tier = HostTier(3, BLOCK)
    assert tier.address(0) % mmap.PAGESIZE == 0
    assert [tier.address(slot) - tier.address(0) for slot in range(3)] == [0, BLOCK, 2 * BLOCK]
    tier.close()


def test_slots_do_not_overlap() -> None:
    tier = HostTier(3, BLOCK)
    for slot in range(3):
        ctypes.memset(tier.address(slot), slot + 1, BLOCK)
    tier.write(1, b"x" * (BLOCK - 1))
    assert tier.read_all([2, 0], BLOCK) == b"\3" * BLOCK + b"\1" * BLOCK
    assert tier.read_all([1], BLOCK) == b"x" * (BLOCK - 1) + b"\2"
    tier.close()


@pytest.mark.parametrize("slot", [-1, 3])
def test_there_is_no_such_slot(slot: int) -> None:
    tier = HostTier(3, BLOCK)
    with pytest.raises(AssertionError):
        tier.address(slot)
    tier.close()


def test_close_is_idempotent_and_repr_readable() -> None:
    tier = HostTier(3, BLOCK)
    assert repr(tier) == "HostTier(slots=3 of 3000 bytes)"
    tier.close()
    tier.close()
