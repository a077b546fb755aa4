"""Groups over each other in one pool: one region on the wire, as vLLM has it, and one per layer again behind it."""

from __future__ import annotations

import msgspec
import pytest

from kvconn.base import GroupView
from kvconn.geometry import RankCache, Region
from kvconn.nixl.blocks import blocks_held, reach
from kvconn.nixl.overlay import fold, members_of, unfold
from kvconn.nixl.wire import SHARED, AgentMetadata, KvconnAgent

A, B = 1 << 20, 1 << 21
GROUPS = (GroupView("window", ("0", "2"), 64), GroupView("full", ("1", "3")))
#: two layers of each group; 0 and 1 in one tensor, 2 and 3 in another
REGIONS = tuple(
    Region(str(layer), base, 256, 256, 8, layer % 2) for layer, base in enumerate((A, A, B, B))
)  # fmt: skip
CACHE = RankCache(REGIONS, 32, GROUPS)


def on_the_wire(ours: bool = True) -> AgentMetadata:
    tensors = fold(REGIONS)
    agent = KvconnAgent(8, 1, reach=[64, 64], members=members_of(tensors, GROUPS)) if ours else None
    return AgentMetadata(
        "P", b"a", [A, B], 0, 8, [256, 256], [256, 256], "LBHNC", 32, region_num_blocks=[8, 8],
        region_group_ids=[SHARED, SHARED], region_names=["0", "2"], region_mem_types=["DRAM", "DRAM"], kvconn=agent,
    )  # fmt: skip


@pytest.mark.parametrize("ours", [True, False], ids=["kvconn", "stock"])
def test_a_shared_region_is_its_layers_again(ours: bool) -> None:
    """A stock peer does not say whose layers they are; the same model is laid out as ours is."""
    whole = unfold(on_the_wire(ours), CACHE)
    assert whole is not None and whole.kv_caches_base_addr == [A, A, B, B]
    assert whole.region_names == ["0", "1", "2", "3"] and whole.region_group_ids == [0, 1, 0, 1]
    if ours:
        assert whole.kvconn is not None and whole.kvconn.members is None
        assert whole.kvconn.reach == [64, None, 64, None]


def test_a_peer_whose_groups_do_not_share_is_taken_as_it_is() -> None:
    apart = msgspec.structs.replace(on_the_wire(False), region_group_ids=[0, 1])
    assert unfold(apart, CACHE) is apart


@pytest.mark.parametrize(
    "edit",
    [
        {"region_names": None},
        {"region_names": ["0", "3"]},
        {"kv_caches_base_addr": [A], "region_names": ["0"], "region_group_ids": [SHARED]},
    ],
    ids=["no names", "another layer first", "another number of regions"],
)
def test_a_stock_peer_that_shares_otherwise_is_not_guessed_at(edit: dict[str, object]) -> None:
    assert unfold(msgspec.structs.replace(on_the_wire(False), **edit), CACHE) is None


def test_a_peer_that_contradicts_itself_is_refused() -> None:
    said = on_the_wire()
    assert said.kvconn is not None and said.kvconn.members is not None
    for members in ([[], []], [said.kvconn.members[0]], said.kvconn.members[::-1]):
        agent = msgspec.structs.replace(said.kvconn, members=members)
        assert unfold(msgspec.structs.replace(said, kvconn=agent), CACHE) is None


def test_a_reference_names_as_many_blocks_of_a_window_as_its_readers_count_on() -> None:
    group, ids = GroupView("window", (), 64, named=3), tuple(range(100, 110))
    assert blocks_held(group, ids, 300, 32) == (107, 108, 109)
    assert blocks_held(group, ids, 320, 32) == (108, 108, 109)  # what lies before is needed by nobody
    assert blocks_held(group, ids, 20, 32) == (100,) and reach(group) == 64
