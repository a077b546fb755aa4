"""Peers that contradict themselves: one rank's handshake is not what the others say.

The load is refused, by name, or its bytes are right; never wrong bytes, never an exception. Where a region is cannot be
checked against anything; that a rank lies about that alone is not asked here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import Cells
from kvconn.config import ParallelConfig
from kvconn.nixl.wire import AgentMetadata, HandshakePayload
from tests.nixl.test_ranks import PCP, Fleet, Shape
from tests.told import listening

ONE = ParallelConfig()
SHAPES = {
    "tp 2 to 1": Shape(ParallelConfig(tp=2), ONE, 4),
    "tp 2 to 2": Shape(ParallelConfig(tp=2), ParallelConfig(tp=2), 4),
    "dcp 2 to 1": Shape(ParallelConfig(tp=2, dcp=2), ONE),
    "pcp 2 dcp 2 to tp 2": Shape(PCP, ParallelConfig(tp=2)),
    "pp 2 tp 2 to 1": Shape(ParallelConfig(pp=2, tp=2), ONE, 4),
    "tokens first to heads first, tp 2 to 1": Shape(ParallelConfig(tp=2), ONE, 4, p_tokens_first=True),
}
THEIRS, OURS = [3, 9, 4, 5], [11, 2, 1, 12]
FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=40)


def edit(frame: bytes, change: dict[str, Any]) -> bytes:
    """A rank's answer with these fields otherwise: of the metadata, ``kvconn.x`` of ours in it, ``seal_key``."""
    payload = msgspec.msgpack.decode(frame, type=HandshakePayload)
    metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
    assert payload.kvconn is not None and metadata.kvconn is not None
    for name, value in change.items():
        if name == "seal_key":
            payload = msgspec.structs.replace(payload, kvconn=msgspec.structs.replace(payload.kvconn, seal_key=value))
        elif name.startswith("kvconn."):
            ours = msgspec.structs.replace(metadata.kvconn, **{name.removeprefix("kvconn."): value})
            metadata = msgspec.structs.replace(metadata, kvconn=ours)
        else:
            metadata = msgspec.structs.replace(metadata, **{name: value})
    return msgspec.msgpack.encode(
        msgspec.structs.replace(payload, agent_metadata_bytes=msgspec.msgpack.encode(metadata))
    )


def without(frame: bytes, region: int) -> bytes:
    """The same rank without one of its regions."""
    metadata = read(frame)
    lists = ("kv_caches_base_addr", "block_lens", "block_strides", "region_num_blocks", "region_group_ids",
             "region_names", "region_mem_types")  # fmt: skip
    change: dict[str, Any] = {name: _but(getattr(metadata, name), region) for name in lists}
    ours = msgspec.structs.asdict(metadata.kvconn) if metadata.kvconn is not None else {}
    more = {f"kvconn.{name}": _but(value, region) for name, value in ours.items() if isinstance(value, list)}
    return edit(frame, change | more)


def _but(values: Any, index: int) -> Any:
    return None if values is None else values[:index] + values[index + 1 :]


def read(frame: bytes) -> AgentMetadata:
    payload = msgspec.msgpack.decode(frame, type=HandshakePayload)
    return msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)


class Pair:
    """P and D of a shape, and what P's ranks answer, for the test to change."""

    def __init__(self, shape: Shape) -> None:
        self.fleet = Fleet()
        self.p, self.d = self.fleet.engines(shape)
        (self.answers,) = self.fleet.directory.values()
        self.honest = dict(self.answers)
        self._n = 0

    def load(self) -> str:
        """One request; why it failed, or "" when its bytes are right."""
        self._n += 1
        id = f"r{self._n}"
        self.d.load(
            id, self.p.prefill(id, THEIRS[: 64 // self.p.block_tokens], self._n), OURS[: 64 // self.d.block_tokens]
        )
        for turn in range(80):
            if id in self.d.received:
                break
            self._step()
            self.fleet.clock.advance(0.1 if turn < 20 else 2.0)  # what ERR says of a peer that lives is in quarantine
        assert id in self.d.received, self.d.workers
        if id in self.d.failed:
            return self.d.reasons[id]
        assert self.d.holds(OURS[: 64 // self.d.block_tokens], self._n), "wrong bytes"
        return ""

    def _step(self) -> None:
        for side in (self.p, self.d):
            side.step()
        self.fleet.net.run()

    def close(self) -> None:
        """Whatever came of it, nothing is held, and an honest peer is read again."""
        self.answers.update(self.honest)
        for worker in self.d.workers:
            half: Any = worker
            half.worker._contacts._peers.clear()
        assert self.load() == ""
        for _ in range(3):
            self.fleet.clock.advance(31.0)
            self._step()
        assert self.p.aggregator.pending() == self.d.aggregator.pending() == []
        for side in self.fleet.sides:
            side.close()


def said(name: str, change: dict[str, Any], hide: int | None = None) -> list[str]:
    """What a load of this peer, whose last rank says this, fails with; the log's lines about it."""
    pair = Pair(SHAPES[name])
    with listening() as told:
        last = max(pair.answers)
        frame = pair.answers[last]
        pair.answers[last] = without(frame, hide) if hide is not None else edit(frame, change)
        why = pair.load()
        lines = [line for line in told.take() if "load of" in line]
        pair.close()
    assert len(set(lines)) == len(lines) <= len(pair.d.ranks), lines  # once for each rank of ours that reads there
    return [why, *lines]


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("dcp 2 to 1", {"engine_id": "another"}, "the engine there is now another"),
        ("dcp 2 to 1", {"seal_key": b"k" * 32}, "another seal key"),
        ("dcp 2 to 1", {"kvconn": None}, "fences"),
        ("dcp 2 to 1", {"block_size": 8}, "tokens of a block"),
        ("dcp 2 to 1", {"kvconn.interleave": 4}, "dcp interleave"),
        ("tp 2 to 1", {"kvconn.tp": 4}, "tp size"),
        ("tp 2 to 1", {"kvconn.pp": 2}, "pp size"),
        ("tp 2 to 1", {"kvconn.dtype": "bfloat16"}, "kv dtype"),
        ("tp 2 to 1", {"num_blocks": 31}, "blocks"),
        ("tp 2 to 1", {"kvconn.fence_slots": 31}, "fence slots"),
        ("tp 2 to 1", {"block_lens": [2048, 1024]}, "layer layers.1"),
        ("tp 2 to 1", {"block_strides": [2048, 4096]}, "layer layers.1"),
        ("tp 2 to 1", {"region_group_ids": [0, 1]}, "layer layers.1"),
        ("tp 2 to 1", {"kvconn.cells": [Cells(2, 16, 64, 64, 128)] * 2}, "layer layers.0"),
        ("tokens first to heads first, tp 2 to 1", {"kvconn.cells": None}, "layer layers.0"),
        ("pp 2 tp 2 to 1", {"region_names": ["layers.0.kv"]}, "layer layers."),
    ],
)
def test_a_rank_that_contradicts_the_others_is_refused_by_the_name_of_the_field(
    name: str, change: dict[str, Any], field: str
) -> None:
    why, *lines = said(name, change)
    assert field in why and "peer P@" in why, why
    assert len(lines) == 1 and field in lines[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_rank_that_hides_a_layer_is_found(name: str) -> None:
    """Also under DCP, where another rank has the layer, but not those tokens."""
    why, *_ = said(name, {}, hide=0)
    assert ("layer layers." in why and "in no stage" in why) or "impossible: 0 regions" in why, why


@pytest.mark.parametrize("odd", [(0, 0), (0, 1)])
def test_of_a_stock_peer_one_rank_that_lands_in_order_beside_one_that_must_be_put_in_order_is_found(
    odd: tuple[int, int],
) -> None:
    """It says no more of its ranks than a layout's name; to put the one in order would undo the other."""
    pair = Pair(SHAPES["tp 2 to 1"])
    with listening() as told:
        for rank, frame in pair.honest.items():
            pair.answers[rank] = edit(frame, {"kvconn": None, "kv_cache_layout": "LBNHC" if rank == odd else "LBHNC"})
        why = pair.load()
        assert "layout of layers.0.kv: ours one, theirs several" in why, why
        assert len([line for line in told.take() if "load of" in line]) == 1
        pair.answers[odd] = edit(pair.honest[odd], {"kvconn": None, "kv_cache_layout": "LBHNC"})
        pair.d.workers[0].worker._contacts._peers.clear()  # type: ignore[attr-defined]
        assert pair.load() == ""
        pair.close()


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 64, 2047, 2048, 4096, 1 << 40])
TEXTS = st.sampled_from(["", "P", "another", "layers.0.kv", "layers.1.kv", "DRAM", "VRAM", "uint8", "LBNHC", "LBHNC"])
CELLS = st.builds(Cells, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)


def changes(metadata: AgentMetadata) -> st.SearchStrategy[dict[str, Any]]:
    """One field of it otherwise."""
    n = len(metadata.block_lens)
    numbers = ("num_blocks", "block_size", "physical_blocks_per_logical_kv_block", "dcp_size", "pcp_size", "device_id")
    ours = ("kvconn.fence_slots", "kvconn.fence_address", "kvconn.tp", "kvconn.pp", "kvconn.interleave")
    lists = ("block_lens", "block_strides", "region_num_blocks", "region_group_ids")
    one = [st.tuples(st.just(name), NUMBERS) for name in (*numbers, *ours)]
    one += [st.tuples(st.just(name), st.lists(NUMBERS, min_size=n, max_size=n)) for name in lists]
    one += [
        st.tuples(st.just(name), st.lists(TEXTS, min_size=n, max_size=n))
        for name in ("region_names", "region_mem_types")
    ]
    one += [st.tuples(st.just(name), TEXTS) for name in ("engine_id", "kv_cache_layout", "kvconn.dtype")]
    one += [
        st.tuples(st.just("kvconn.cells"), st.none() | st.lists(st.none() | CELLS, min_size=n, max_size=n)),
        st.tuples(st.just("seal_key"), st.sampled_from([b"", b"k" * 16, b"k" * 32])),
        st.tuples(st.just("kvconn"), st.none()),
    ]
    return st.lists(st.one_of(one), min_size=1, max_size=2).map(dict)


@pytest.mark.parametrize("name", SHAPES)
@FUZZ
@given(data=st.data())
def test_whatever_one_rank_says_bytes_are_right_or_refused(name: str, data: st.DataObject) -> None:
    pair = Pair(SHAPES[name])
    with listening():
        rank = data.draw(st.sampled_from(sorted(pair.answers)))
        frame = pair.answers[rank]
        change = data.draw(changes(read(frame)))
        names = change.get("region_names")
        if names is not None and sorted(names) == sorted(read(frame).region_names or ()):
            change = {}  # that is a lie about addresses
        if "kvconn" in change:
            change = {"kvconn": None}
        pair.answers[rank] = edit(frame, change)
        pair.load()
        pair.close()
