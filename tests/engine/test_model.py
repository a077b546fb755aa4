"""The two models: how a prompt is cut and cached does not matter, and no wrong byte of KV stays unseen."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.config import ParallelConfig
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.content import ContentAddressed, prefix_hashes
from kvconn.engine.model import Model, Transformer, make_model
from kvconn.engine.portion import split
from kvconn.engine.ranks import Ranks
from kvconn.engine.request import EngineRequest, Finished
from kvconn.engine.scheduler import Scheduled, Scheduler
from tests.engine.driving import unique_tokens
from tests.engine.threads import ignore, ranks_of
from tests.engine.wrong import first_wrong

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = ModelSpec(n_layers=2, d_model=32, n_heads=2, d_ff=64)
GROUPED = ModelSpec(n_layers=2, d_model=32, n_heads=4, d_ff=64, kv="gqa", n_kv_heads=2)
CONTENT = ModelSpec(mode="content-addressed", n_layers=2)
CONTENT_HEADS = ModelSpec(mode="content-addressed", n_layers=2, kv="gqa", n_kv_heads=4)


def solo() -> Ranks:
    """An engine of one rank."""
    return ranks_of(ParallelConfig())[0]


MODELS = {
    "transformer": SMALL,
    "transformer-gqa": GROUPED,
    "content-addressed": CONTENT,
    "content-addressed-gqa": CONTENT_HEADS,
}


class Run:
    """One engine's scheduler and model in this process, without a connector."""

    def __init__(self, model: ModelSpec, **sizes: int) -> None:
        sizes = {"num_blocks": 32, "block_size": 4, "max_num_batched_tokens": 64} | sizes
        self.config = EngineConfig(name="run", model=model, **sizes)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, None, lambda direction, id, now: None, "fail")
        self.model: Model = make_model(self.config, solo())
        self.steps = 0
        #: block tables at the end of each request
        self.tables: dict[str, list[int]] = {}
        self.preempted: list[str] = []

    def generate(self, *requests: EngineRequest) -> dict[str, tuple[int, ...]]:
        """Tokens of every request; all are queued at once."""
        for request in requests:
            self.scheduler.add(request, 0.0)
        done: dict[str, tuple[int, ...]] = {}
        for _ in range(500):
            if len(done) == len(requests):
                return done
            step = self.scheduler.schedule(0.0)
            self.steps += 1
            self.preempted += step.view.preempted
            self.tables |= {s.id: list(s.blocks) for s in step.requests}
            tokens = self.model.forward(step.requests, ignore, ignore)
            events = self.scheduler.update(step, tokens, None, 0.0)
            done |= {event.id: event.tokens for event in events if isinstance(event, Finished)}
        raise AssertionError("not done in 500 steps")

    def kv(self, id: str, n_tokens: int) -> torch.Tensor:
        """The KV of a request's first tokens, ``[layers, tokens, heads, channels]``."""
        layers = [cache[self.tables[id]].transpose(1, 2).flatten(0, 1)[:n_tokens] for cache in self.model.caches]
        return torch.stack(layers).clone()

    def assert_same_kv(self, other: Run, id: str, n_tokens: int) -> None:
        """Up to rounding; content-addressed KV, which is no number, bit for bit."""
        ours, theirs = self.kv(id, n_tokens), other.kv(id, n_tokens)
        if self.config.model.mode == "content-addressed":
            assert torch.equal(ours.view(torch.int64), theirs.view(torch.int64))
        else:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def asks(id: str, prompt: Iterable[int], max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(id, tuple(prompt), max_tokens)


PROMPTS = {"a": unique_tokens("a", 23), "b": unique_tokens("b", 9), "c": unique_tokens("c", 31)}


@pytest.fixture(scope="module", params=list(MODELS.values()), ids=list(MODELS))
def model(request: pytest.FixtureRequest) -> ModelSpec:
    spec: ModelSpec = request.param
    return spec


class TestHowItIsComputedDoesNotMatter:
    @pytest.mark.parametrize("budget", [1, 3, 8, 22])
    def test_chunks_give_the_same_tokens_and_kv(self, model: ModelSpec, budget: int) -> None:
        whole, cut = Run(model), Run(model, max_num_batched_tokens=budget)
        request = asks("a", PROMPTS["a"])
        assert whole.generate(request) == cut.generate(request)
        assert cut.steps > whole.steps
        whole.assert_same_kv(cut, "a", 28)

    def test_company_gives_the_same_tokens_and_kv(self, model: ModelSpec) -> None:
        together = Run(model, max_num_batched_tokens=16)
        tokens = together.generate(*(asks(id, prompt) for id, prompt in PROMPTS.items()))
        for id, prompt in PROMPTS.items():
            alone = Run(model)
            assert alone.generate(asks(id, prompt))[id] == tokens[id]
            n = len(prompt) + 5
            alone.assert_same_kv(together, id, n)

    def test_a_prefix_hit_equals_computing_it_again(self, model: ModelSpec) -> None:
        cached, fresh = Run(model), Run(model)
        prompt = PROMPTS["a"]
        cached.generate(asks("first", prompt))
        longer = asks("second", [*prompt, 5, 6, 7])
        assert cached.generate(longer) == fresh.generate(longer)
        assert cached.scheduler.prefix_hit_tokens == 20 and fresh.scheduler.prefix_hit_tokens == 0
        cached.assert_same_kv(fresh, "second", 31)

    def test_preemption_gives_the_same_tokens(self, model: ModelSpec) -> None:
        tight = Run(model, num_blocks=9)
        requests = [asks("a", PROMPTS["a"][:12], 12), asks("b", PROMPTS["b"], 12)]
        tokens = tight.generate(*requests)
        for request in requests:
            assert Run(model).generate(request)[request.id] == tokens[request.id]
        assert tight.preempted

    def test_the_same_seed_is_the_same_model_and_another_one_is_not(self, model: ModelSpec) -> None:
        runs = [Run(model), Run(model), Run(msgspec.structs.replace(model, seed=1))]
        tokens = [run.generate(asks("a", PROMPTS["a"]))["a"] for run in runs]
        assert tokens[0] == tokens[1]
        if model.mode == "transformer":
            assert tokens[0] != tokens[2]

    def test_layer_hooks_are_called_around_every_layer(self, model: ModelSpec) -> None:
        run = Run(model)
        run.scheduler.add(asks("a", [1, 2, 3]), 0.0)
        calls: list[tuple[str, int]] = []
        batch = run.scheduler.schedule(0.0).requests
        run.model.forward(batch, lambda i: calls.append(("before", i)), lambda i: calls.append(("after", i)))
        assert calls == [("before", 0), ("after", 0), ("before", 1), ("after", 1)]


class TestTransformer:
    def test_the_margin_is_that_of_the_closest_choice(self) -> None:
        run = Run(SMALL)
        assert run.model.min_margin == math.inf
        run.generate(asks("a", PROMPTS["a"], 1))
        first = run.model.min_margin
        run.generate(asks("b", PROMPTS["b"], 8))
        assert 0 < run.model.min_margin <= first < math.inf

    def test_the_default_model_stays_above_its_margin_floor_here(self) -> None:
        run = Run(ModelSpec())
        run.generate(*(asks(id, prompt) for id, prompt in PROMPTS.items()))
        assert run.model.min_margin > ModelSpec().margin_floor

    def test_positions_matter(self) -> None:
        tokens = [Run(SMALL).generate(asks("a", prompt))["a"] for prompt in ([3, 4, 5, 6], [4, 3, 5, 6])]
        assert tokens[0] != tokens[1]

    def test_kv_of_a_position_depends_on_all_tokens_before_it(self) -> None:
        one, two = Run(SMALL), Run(SMALL)
        one.generate(asks("a", [1, 2, 3, 4], 1))
        two.generate(asks("a", [9, 2, 3, 4], 1))
        difference = (one.kv("a", 4) - two.kv("a", 4)).abs().amax(dim=(-2, -1))
        assert torch.equal(difference[0, 1:], torch.zeros(3, dtype=torch.float64)), "the first layer sees no context"
        assert (difference[1] > 1e-6).all()


class TestContentAddressed:
    """Every byte of KV that is read is in the token."""

    @pytest.fixture
    def decoding(self) -> tuple[ContentAddressed, Scheduled, list[int]]:
        """A request of 14 tokens, computed but for its last; ``forward`` of the batch computes that."""
        config = EngineConfig(name="content", model=CONTENT, num_blocks=12, block_size=4)
        model = ContentAddressed(config, solo())
        tokens = list(unique_tokens("a", 14))
        blocks = (7, 2, 9, 4)
        prefill = Scheduled("a", 0, 13, 0, tuple(tokens[:13]), (blocks,), sample=False, decode=False)
        model.forward([prefill], ignore, ignore)
        return model, Scheduled("a", 13, 1, 13, (tokens[13],), (blocks,), sample=True, decode=True), tokens

    def read(self, model: ContentAddressed, last: Scheduled) -> int:
        return model.forward([last], ignore, ignore)["a"]

    def test_intact_kv_is_not_wrong_and_gives_the_same_token_again(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]]
    ) -> None:
        model, last, tokens = decoding
        assert self.read(model, last) == self.read(model, last)
        assert first_wrong(model, last, tokens) is None

    @pytest.mark.parametrize(("layer", "position", "byte"), [(0, 0, 0), (0, 12, 511), (1, 5, 300), (1, 8, 7)])
    def test_a_flipped_bit_changes_the_token_and_is_named(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]], layer: int, position: int, byte: int
    ) -> None:
        model, last, tokens = decoding
        good = self.read(model, last)
        block = last.blocks[position // 4]
        model.caches[layer][block, 0, position % 4].view(torch.uint8)[byte] ^= 1
        assert self.read(model, last) != good
        assert first_wrong(model, last, tokens) == (layer, block, position)

    def test_a_swapped_block_changes_the_token_and_is_named(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]]
    ) -> None:
        model, last, tokens = decoding
        good = self.read(model, last)
        model.caches[1][[2, 9]] = model.caches[1][[9, 2]]
        assert self.read(model, last) != good
        assert first_wrong(model, last, tokens) == (1, 2, 4)

    def test_two_rows_swapped_in_a_block_change_the_token(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]]
    ) -> None:
        model, last, tokens = decoding
        good = self.read(model, last)
        model.caches[0][9, 0, [1, 2]] = model.caches[0][9, 0, [2, 1]]
        assert self.read(model, last) != good
        assert first_wrong(model, last, tokens) == (0, 9, 9)

    def test_layers_swapped_change_the_token(self, decoding: tuple[ContentAddressed, Scheduled, list[int]]) -> None:
        model, last, tokens = decoding
        good = self.read(model, last)
        model.caches[0][7], model.caches[1][7] = model.caches[1][7].clone(), model.caches[0][7].clone()
        assert self.read(model, last) != good
        assert first_wrong(model, last, tokens) == (0, 7, 0)

    def test_a_stale_block_changes_the_token_and_is_named(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]]
    ) -> None:
        """Right bytes of another prompt, at the right place."""
        model, last, tokens = decoding
        good = self.read(model, last)
        other = Scheduled("b", 0, 12, 0, unique_tokens("b", 12), ((0, 1, 3),), sample=False, decode=False)
        model.forward([other], ignore, ignore)
        for cache in model.caches:
            cache[9] = cache[3]
        assert self.read(model, last) != good
        assert first_wrong(model, last, tokens) == (0, 9, 8)

    def test_heads_swapped_change_the_token_and_are_named(self) -> None:
        model = ContentAddressed(EngineConfig(name="content", model=CONTENT_HEADS, num_blocks=4, block_size=4), solo())
        prefill = Scheduled("a", 0, 3, 0, (5, 6, 7), ((2,),), sample=False, decode=False)
        model.forward([prefill], ignore, ignore)
        last = Scheduled("a", 3, 1, 3, (8,), ((2,),), sample=True, decode=True)
        good = self.read(model, last)
        model.caches[1][2, [0, 3]] = model.caches[1][2, [3, 0]]
        assert self.read(model, last) != good
        assert first_wrong(model, last, [5, 6, 7, 8]) == (1, 2, 0)

    def test_an_untouched_block_is_named(self, decoding: tuple[ContentAddressed, Scheduled, list[int]]) -> None:
        model, last, tokens = decoding
        self.read(model, last)
        model.caches[1][2] = 0.0
        assert first_wrong(model, last, tokens) == (1, 2, 4)

    def test_what_lies_behind_the_context_is_not_read(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]]
    ) -> None:
        model, last, _ = decoding
        good = self.read(model, last)
        model.caches[0][4, 0, 2:] = 1.5
        model.caches[0][5] = 1.5
        assert self.read(model, last) == good

    def test_forgetting_an_ended_request_leaves_nothing(
        self, decoding: tuple[ContentAddressed, Scheduled, list[int]]
    ) -> None:
        model, _, _ = decoding
        model.forget(["a", "unknown"])
        assert model._prefixes == {}

    def test_prefix_hashes_continue_and_depend_on_everything_before(self) -> None:
        whole = prefix_hashes([1, 2, 3])
        assert whole[1:] == prefix_hashes([2, 3], whole[0])
        assert not set(whole) & set(prefix_hashes([2, 2, 3]))


@settings(derandomize=True, deadline=None)
@given(n=st.integers(0, 10_000), parts=st.integers(1, 64))
def test_split_is_contiguous_and_near_equal(n: int, parts: int) -> None:
    sizes = split(n, parts)
    assert len(sizes) == parts and sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_make_model_makes_what_the_mode_names() -> None:
    for spec, kind in zip(MODELS.values(), (Transformer, Transformer, ContentAddressed, ContentAddressed), strict=True):
        made = make_model(EngineConfig(name="m", model=spec, num_blocks=4), solo())
        assert isinstance(made, kind)
        assert [tuple(cache.shape) for cache in made.caches] == [
            (4, spec.cache_heads, 16, spec.channels)
        ] * spec.n_layers
