"""The host tier over real memory."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from kvconn.errors import ConfigError
from kvconn.offload.tiers.host import HostTier

BLOCK = 3000


def put(tier: HostTier, key: bytes) -> bool:
    address = tier.reserve(key)
    if address is None:
        return False
    ctypes.memset(address, key[0], BLOCK)
    tier.commit(key)
    return True


@pytest.fixture
def tier() -> HostTier:
    return HostTier(3 * BLOCK + 17, BLOCK)


def test_one_page_aligned_buffer_of_whole_blocks(tier: HostTier) -> None:
    assert tier.slots == 3
    first = tier.reserve(b"a")
    assert first is not None and first % mmap.PAGESIZE == 0
    assert [tier.reserve(key) for key in (b"b", b"c")] == [first + BLOCK, first + 2 * BLOCK]


def test_bytes_are_kept_by_content(tier: HostTier) -> None:
    for key in (b"a", b"b", b"c"):
        assert put(tier, key)
    assert [tier.read(key) for key in (b"a", b"b", b"c")] == [b"a" * BLOCK, b"b" * BLOCK, b"c" * BLOCK]
    assert tier.read(b"d") is None and len(tier) == 3


def test_the_least_recently_used_makes_room(tier: HostTier) -> None:
    for key in (b"a", b"b", b"c"):
        put(tier, key)
    assert tier.touch(b"a")
    put(tier, b"d")
    assert [tier.touch(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert tier.evicted == 1 and tier.read(b"a") == b"a" * BLOCK


def test_what_is_being_written_is_pinned_and_unreadable(tier: HostTier) -> None:
    put(tier, b"a")
    for key in (b"b", b"c", b"d"):
        assert tier.reserve(key) is not None
    assert not tier.touch(b"a"), "evicted for the last reservation"
    assert tier.reserve(b"e") is None
    assert tier.touch(b"b") and tier.read(b"b") is None
    tier.abandon(b"b")
    assert put(tier, b"e") and not tier.touch(b"b")


def test_less_than_one_block_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: expected at least one block of 3000 bytes .* got 2999"):
        HostTier(2999, BLOCK)


def test_close_is_idempotent_and_repr_readable(tier: HostTier) -> None:
    put(tier, b"a")
    tier.reserve(b"b")
    assert repr(tier) == "HostTier(slots=3 stored=1 writing=1 evicted=0)"
    tier.close()
    tier.close()
    assert len(tier) == 0
