"""Layers that see a window: their blocks go when no token to come can see them, and nothing behind it is read."""

from __future__ import annotations

import msgspec
import pytest

from kvconn.base import NO_BLOCK, GroupView
from kvconn.engine.config import EngineConfig, ModelSpec, cache_groups, check
from kvconn.engine.content import ContentAddressed
from kvconn.engine.request import EngineRequest, Request
from kvconn.engine.tables import Tables, present
from kvconn.errors import ConfigError, RequestError
from kvconn.nixl.blocks import blocks_held, blocks_to_fill
from kvconn.nixl.pairing import pair_units
from kvconn.nixl.plan import Lane, Memory, Slots
from tests.engine.driving import Bench, ScriptedConnector, unique_tokens
from tests.engine.test_model import Run, asks
from tests.engine.threads import ignore
from tests.engine.wrong import first_wrong

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ModelSpec(n_layers=2, d_model=32, n_heads=2, d_ff=64)
WINDOW = msgspec.structs.replace(SMALL, window=8)
CONTENT = msgspec.structs.replace(WINDOW, mode="content-addressed")
MODELS = pytest.mark.parametrize("model", [WINDOW, CONTENT], ids=["transformer", "content-addressed"])
_ = NO_BLOCK


def request(n: int, id: str = "a") -> Request:
    return Request(EngineRequest(id, unique_tokens(id, n), 1), 4, 2)


def tables(num_blocks: int = 16) -> Tables:
    """Blocks of 4 tokens, a full group and one of a window of 8."""
    return Tables(num_blocks, 4, cache_groups(WINDOW))


class TestTables:
    def grown(self, pools: Tables, one: Request, n_computed: int, n_tokens: int) -> None:
        assert pools.grow(one, n_tokens) is not None
        one.n_computed = n_computed

    def test_blocks_behind_the_window_are_given_back_when_the_next_token_cannot_see_them(self) -> None:
        pools, one = tables(), request(40)
        self.grown(pools, one, 10, 10)
        assert pools.grow(one, 11) == ((), ()) and one.tables[1] == [0, 1, 2], "10 sees 3 to 10"
        one.n_computed = 11
        assert pools.grow(one, 13) == ((3,), (3,))
        assert one.tables == [[0, 1, 2, 3], [_, 1, 2, 3]], "11 sees 4 to 11"
        one.n_computed = 15
        assert pools.grow(one, 16) == ((), ())
        assert one.tables[1] == [_, _, 2, 3], "15 sees 8 to 15"
        assert [group.pool.num_used for group in pools.groups] == [4, 2]
        pools.give_back(one)
        assert pools.num_used == 0 and one.tables == [[], []]

    def test_a_hit_needs_the_window_before_it_and_no_more(self) -> None:
        pools, one = tables(), request(24)
        self.grown(pools, one, 24, 24)
        pools.cache(one, 0, 6)
        pools.give_back(one)
        assert pools.hits(request(24)) == [[0, 1, 2, 3, 4], [_, _, _, 3, 4]], "20 sees 13 to 20"

    def test_a_hit_is_shortened_to_where_the_window_is_whole(self) -> None:
        pools, one = tables(), request(24)
        self.grown(pools, one, 24, 24)
        pools.cache(one, 0, 6)
        pools.give_back(one)
        window = pools.groups[1].pool
        window.take([0, 1, 2, 5])
        window.allocate(12)  # what blocks 3 and 4 held is forgotten
        window.give_back([0, 1, 2, 5])
        assert pools.hits(request(24)) == [[0, 1, 2], [_, 1, 2]], "12 sees 5 to 12"

    def test_of_a_load_only_the_window_gets_blocks(self) -> None:
        pools, one = tables(), request(30)
        assert pools.admit(one, [[], []], 30)
        assert one.tables == [list(range(8)), [_] * 5 + [0, 1, 2]], "29 is computed again and sees 22 to 29"

    def test_a_load_behind_a_hit_keeps_of_the_hit_what_is_seen(self) -> None:
        pools, one, other = tables(), request(12), request(40)
        self.grown(pools, one, 12, 12)
        pools.cache(one, 0, 3)
        pools.give_back(one)
        hits = pools.hits(other)
        assert hits == [[0, 1, 2], [_, 1, 2]]
        assert pools.admit(other, hits, 16)
        assert other.tables == [[0, 1, 2, 3], [_, _, 2, 3]], "16 sees 9 to 16"
        assert pools.groups[1].pool.num_used == 2

    def test_all_groups_or_none(self) -> None:
        pools, one, other = tables(6), request(16, "a"), request(16, "b")
        assert pools.admit(one, [[], []], 16)
        assert not pools.admit(other, [[], []], 12) and other.tables == [[], []]
        assert pools.admit(other, [[], []], 8)
        assert pools.grow(other, 12) is None and [len(table) for table in other.tables] == [2, 2]
        assert [group.pool.num_used for group in pools.groups] == [6, 4]

    def test_repr_names_the_pools(self) -> None:
        assert repr(tables()) == "BlockPool(used=0/16 cached=0) BlockPool(used=0/16 cached=0)"


class TestLoads:
    """What a load of one prompt filled is found again by others that begin as it does."""

    @pytest.mark.parametrize(("p_size", "d_size"), [(4, 4), (16, 4), (16, 8), (12, 4), (4, 8), (4, 16), (6, 4)])
    @pytest.mark.parametrize("window", [5, 8, 32])
    def test_nothing_is_found_again_that_was_not_read(self, window: int, p_size: int, d_size: int) -> None:
        groups = cache_groups(msgspec.structs.replace(WINDOW, window=window))
        lane = Lane(
            1, 0, "window", window, Slots(d_size), Slots(p_size), 64, 2, 1, d_size, 1, p_size, 1, Memory(), Memory()
        )
        fits = p_size % d_size == 0
        refused = hits = 0
        for n in range(1, 100):
            prompt = unique_tokens("a", n)
            p, d = Tables(64, p_size, groups), Tables(64, d_size, groups)
            ours, theirs = (Request(EngineRequest("a", prompt, 1), size, 2) for size in (d_size, p_size))
            self.computed(p, theirs, n)
            assert d.admit(ours, [[], []], n)
            table = list(ours.tables[1])
            local = ((), blocks_to_fill(groups[1], table, 0, n, d_size))
            try:
                at, _ = pair_units(lane, local, (blocks_held(groups[1], theirs.tables[1], n, p_size),), 0, n, n)
            except RequestError:
                refused += 1
                continue
            filled = {table.index(start // d_size) * d_size + start % d_size + i for start in at * 2 for i in range(2)}
            d.cache(ours, 0, n // d_size)
            d.give_back(ours)
            for shorter in range(1, n):
                found = len(d.hits(Request(EngineRequest("b", (*prompt[:shorter], 7), 1), d_size, 2))[0]) * d_size
                hits += found > 0
                assert filled.issuperset(range(max(0, found - window + 1), found)), (n, shorter, found)
        assert bool(refused) is not fits and (hits or not fits)

    def computed(self, pools: Tables, one: Request, n: int) -> None:
        """In steps of a few tokens, so that blocks are given back."""
        while one.n_computed < n:
            end = min(n, one.n_computed + 5)
            assert pools.grow(one, end) is not None
            one.n_computed = end


class TestModels:
    @MODELS
    @pytest.mark.parametrize("budget", [1, 3, 22])
    def test_chunks_prefix_hits_and_block_sizes_give_the_same_tokens(self, model: ModelSpec, budget: int) -> None:
        prompt = unique_tokens("a", 41)
        expected = Run(model).generate(asks("a", prompt))["a"]
        for size in (1, 3, 16, 32):
            run = Run(model, max_num_batched_tokens=budget, block_size=size, num_blocks=64)
            assert run.generate(asks("first", prompt))["first"] == expected
            assert run.generate(asks("a", prompt))["a"] == expected
            assert run.scheduler.prefix_hit_tokens == 40 // size * size
            assert run.scheduler.tables.num_used == 0

    @MODELS
    def test_a_window_as_long_as_everything_is_none_and_a_shorter_one_is_not(self, model: ModelSpec) -> None:
        prompt = unique_tokens("a", 20)
        told = [
            Run(msgspec.structs.replace(model, window=window)).generate(asks("a", prompt))["a"]
            for window in (0, 26, 25, 8)
        ]
        assert told[0] == told[1] == told[2] and told[2] != told[3]

    @pytest.mark.parametrize(("position", "seen"), [(0, False), (5, False), (6, True), (13, True)])
    def test_what_lies_behind_the_window_is_not_read(self, position: int, seen: bool) -> None:
        run = Run(CONTENT)
        run.scheduler.add(asks("a", unique_tokens("a", 13)), 0.0)
        first = run.scheduler.schedule(0.0)
        run.scheduler.update(first, run.model.forward(first.requests, ignore, ignore), None, 0.0)
        (last,) = run.scheduler.schedule(0.0).requests
        assert isinstance(run.model, ContentAddressed) and (last.start, last.n) == (13, 1)
        good = run.model.forward([last], ignore, ignore)["a"]
        tokens = run.scheduler.requests["a"].tokens
        assert first_wrong(run.model, last, tokens) is None
        table = first.requests[0].tables[1] + last.tables[1][4:]
        run.model.caches[1][table[position // 4], 0, position % 4, 1] = 3.5
        if position != 13:
            assert (run.model.forward([last], ignore, ignore)["a"] != good) is seen
        assert (first_wrong(run.model, last, tokens) is not None) is seen


class TestConnectors:
    def test_a_connector_is_told_tables_of_both_groups_with_holes(self) -> None:
        connector = ScriptedConnector({"a": [(20, True)]}, holds={"a": None})
        bench = Bench(connector, model=WINDOW, num_blocks=16, block_size=4)
        bench.add("a", 21)
        bench.step()
        ((_name, _id, blocks, n),) = connector.named("allocated")
        assert (blocks.ids, blocks.hashed, n) == (((0, 1, 2, 3, 4), (_, _, _, 0, 1)), (0, 0), 20), "20 sees 13 to 20"
        bench.step(received=["a"])
        assert bench.step() == {"a": (20, 1)}
        ((_name, _id, held, _reason),) = connector.named("finished")
        assert held == ((0, 1, 2, 3, 4, 5), (_, _, _, 0, 1, 2))
        assert bench.used == 9
        bench.step(sent=["a"])
        assert bench.used == 0

    def test_groups_are_named_by_layer(self) -> None:
        assert cache_groups(msgspec.structs.replace(WINDOW, n_layers=3)) == (
            GroupView("full", ("layers.0.kv", "layers.2.kv")),
            GroupView("window", ("layers.1.kv",), 8),
        )


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (msgspec.structs.replace(WINDOW, window=-1), "model.window: expected at least 0, got -1"),
        (
            msgspec.structs.replace(WINDOW, n_layers=1),
            "model.n_layers: expected a layer of each of the 2 kinds, got window 8 and state 0 with 1",
        ),
    ],
)
def test_a_window_that_cannot_be_is_refused(model: ModelSpec, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(EngineConfig(name="E", model=model))
    assert list(refused.value.problems) == [f"engine E: {problem}"]


def test_present_leaves_holes_out() -> None:
    assert present([_, 3, _, 1]) == [3, 1]
