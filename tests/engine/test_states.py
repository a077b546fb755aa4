"""Layers that keep a state: a slot per request, nothing of a beginning to be found again, and no token twice."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kvconn.base import NO_BLOCK, FinishReason, GroupView
from kvconn.engine.config import EngineConfig, ModelSpec, cache_groups
from kvconn.engine.content import ContentAddressed
from kvconn.engine.request import EngineRequest, Request
from kvconn.engine.tables import Tables
from tests.engine.driving import Bench, ScriptedConnector, unique_tokens
from tests.engine.test_model import Run, asks, solo
from tests.engine.threads import ignore
from tests.engine.wrong import first_wrong

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ModelSpec(n_layers=3, d_model=32, n_heads=2, d_ff=64, window=8, state=4)
CONTENT = msgspec.structs.replace(SMALL, mode="content-addressed")
MODELS = pytest.mark.parametrize("model", [SMALL, CONTENT], ids=["transformer", "content-addressed"])
PROMPT = unique_tokens("a", 29)
_ = NO_BLOCK


def test_layers_take_turns() -> None:
    assert cache_groups(msgspec.structs.replace(SMALL, n_layers=4)) == (
        GroupView("full", ("layers.0.kv", "layers.3.kv")),
        GroupView("window", ("layers.1.kv",), 8),
        GroupView("state", ("layers.2.kv",)),
    )


class TestTables:
    def test_a_request_has_one_slot_however_long_it_is_and_gives_it_back(self) -> None:
        pools, one = Tables(16, 4, cache_groups(SMALL)), Request(EngineRequest("a", PROMPT, 1), 4, 3)
        assert pools.grow(one, 5) == ((0, 1), (0, 1), (0,))
        one.n_computed = 20
        assert pools.grow(one, 24) is not None
        assert one.tables == [[0, 1, 2, 3, 4, 5], [_, _, 2, 3, 4, 5], [0]]
        pools.cache(one, 0, 6)
        pools.give_back(one)
        assert pools.num_used == 0

    def test_what_is_cached_of_attention_is_no_hit_where_there_is_a_state(self) -> None:
        pools, one = Tables(16, 4, cache_groups(SMALL)), Request(EngineRequest("a", PROMPT, 1), 4, 3)
        assert pools.grow(one, 28) is not None
        pools.cache(one, 0, 7)
        pools.give_back(one)
        assert pools.hits(Request(EngineRequest("b", PROMPT, 1), 4, 3)) == [[], [], []]

    def test_a_load_has_its_slot_and_without_a_free_one_nothing(self) -> None:
        pools, one, other = Tables(8, 4, cache_groups(SMALL)), *(
            Request(EngineRequest(id, PROMPT, 1), 4, 3) for id in "ab"
        )  # fmt: skip
        assert pools.admit(one, [[], [], []], 28)
        assert one.tables == [list(range(7)), [_] * 5 + [0, 1], [0]]
        pools.groups[2].pool.allocate(7)
        assert not pools.admit(other, [[], [], []], 4) and other.tables == [[], [], []]


class TestModels:
    @MODELS
    @pytest.mark.parametrize("budget", [1, 2, 7, 22])
    def test_chunks_company_and_what_ran_before_give_the_same_tokens(self, model: ModelSpec, budget: int) -> None:
        expected = Run(model).generate(asks("a", PROMPT))["a"]
        run = Run(model, max_num_batched_tokens=budget, num_blocks=48)
        told = run.generate(asks("b", unique_tokens("b", 11)), asks("a", PROMPT))
        assert told["a"] == expected == run.generate(asks("again", PROMPT))["again"]
        assert run.scheduler.prefix_hit_tokens == run.scheduler.tables.num_used == 0

    @MODELS
    def test_a_preempted_request_begins_with_a_new_state(self, model: ModelSpec) -> None:
        tight = Run(model, num_blocks=9)
        requests = [asks("a", PROMPT[:12], 12), asks("b", unique_tokens("b", 9), 12)]
        tokens = tight.generate(*requests)
        assert tight.preempted
        for request in requests:
            assert Run(model).generate(request)[request.id] == tokens[request.id]

    @MODELS
    def test_a_state_matters_and_so_does_where_it_stands(self, model: ModelSpec) -> None:
        """A token that joins twice changes what comes: the reason why a reader must begin where a state stands."""
        run = Run(model)
        run.scheduler.add(asks("a", PROMPT), 0.0)
        batch = run.scheduler.schedule(0.0).requests
        once = run.model.forward(batch, ignore, ignore)["a"]
        slot = run.model.caches[2][batch[0].tables[2][0]]
        before = slot.clone()
        (share,) = (msgspec.structs.replace(s, start=s.n - 1, n=1) for s in batch)
        run.model.forward([share], ignore, ignore)
        assert not torch.equal(slot.view(torch.int64), before.view(torch.int64))
        run.model.forward(batch, ignore, ignore)
        assert torch.equal(slot.view(torch.int64), before.view(torch.int64)), "from the beginning it is the same again"
        assert run.model.forward(batch, ignore, ignore)["a"] == once

    @pytest.mark.parametrize("number", [0, 30, 71, 103])
    def test_every_byte_of_a_state_is_in_the_token_and_in_every_later_state(self, number: int) -> None:
        config = EngineConfig(name="content", model=CONTENT, num_blocks=12, block_size=4)
        model, run = ContentAddressed(config, solo()), Run(CONTENT)
        assert model.caches[2].shape == (12, 2 * sum(CONTENT.state_sizes)) == (12, 272)
        run.scheduler.add(asks("a", PROMPT), 0.0)
        (share,) = run.scheduler.schedule(0.0).requests
        prefill = msgspec.structs.replace(share, n=28, tokens=PROMPT[:28], sample=False)
        last = msgspec.structs.replace(share, start=28, n=1)
        model.forward([prefill], ignore, ignore)
        slot = model.caches[2][share.tables[2][0]]
        kept = slot.clone()
        good = model.forward([last], ignore, ignore)["a"]
        assert first_wrong(model, last, PROMPT) is None
        slot.copy_(kept)
        slot[number : number + 1].view(torch.uint8)[3] ^= 1
        assert model.forward([last], ignore, ignore)["a"] != good
        assert first_wrong(model, last, PROMPT) == (2, share.tables[2][0], 28)


class TestReaders:
    def test_what_a_reader_gets_stands_before_the_last_token_of_the_prompt(self) -> None:
        connector = ScriptedConnector(holds={"a": {"held": True}})
        bench = Bench(connector, model=CONTENT, num_blocks=16)
        for id, prompt, params in (("a", PROMPT, {"do_remote_decode": True}), ("b", PROMPT, None)):
            bench.scheduler.add(EngineRequest(id, prompt, 3, params), 0.0)
        assert bench.step() == {"a": (0, 28), "b": (0, 29)}
        assert bench.ending("a").reason is FinishReason.LENGTH
        assert bench.ending("a").tokens == (), "one token too early to be the prompt's next"
        assert bench.ending("a").kv_transfer_params == {"held": True}

    def test_of_a_prompt_of_one_token_there_is_nothing_to_hold(self) -> None:
        seen: list[object] = []
        connector = ScriptedConnector(lambda view, local: (seen.append(view.params), (0, False))[1])  # type: ignore[arg-type]
        bench = Bench(connector, model=CONTENT)
        bench.scheduler.add(EngineRequest("a", (3,), 1, {"do_remote_decode": True}), 0.0)
        bench.step()
        assert seen == [None] and bench.ending("a").reason is FinishReason.LENGTH
