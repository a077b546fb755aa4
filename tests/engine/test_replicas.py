"""Replicated PCP: whatever a step mixes, every rank's cache holds the same bytes and every rank has the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.engine.model import Transformer, page_aligned
from kvconn.engine.request import EngineRequest, Finished
from kvconn.engine.scheduler import Scheduler
from tests.engine.driving import unique_tokens

SECONDS = 20.0


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Table:
    """Where ranks that are threads exchange tensors. A rank that does not come breaks the others' wait."""

    def __init__(self, world: int) -> None:
        self.given: list[torch.Tensor] = [torch.empty(0)] * world
        self.barrier = threading.Barrier(world, timeout=SECONDS)

    def exchange(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = own.clone()
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class Seat:
    """One rank's collectives."""

    def __init__(self, table: Table, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._table = table

    def gather_rows(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        parts = self._table.exchange(self.rank, rows)
        assert [len(part) for part in parts] == list(counts)
        return torch.cat(parts)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._table.exchange(self.rank, values)).sum(dim=0)


class Replicas:
    """``world`` ranks of one transformer, a thread each, under one scheduler."""

    def __init__(self, world: int, **sizes: int) -> None:
        sizes = {"num_blocks": 64, "block_size": 8, "max_num_batched_tokens": 16} | sizes
        self.config = EngineConfig(name="R", model=ModelSpec(), **sizes)  # type: ignore[arg-type]
        table = Table(world)
        self.models = [Transformer(self.config, Seat(table, rank, world)) for rank in range(world)]
        self.scheduler = Scheduler(self.config, None, lambda direction, id, now: None, "fail")
        self.mixed = 0

    def generate(self, lengths: dict[str, int], max_tokens: int) -> dict[str, tuple[int, ...]]:
        for id, n in lengths.items():
            self.scheduler.add(EngineRequest(id, unique_tokens(id, n), max_tokens), 0.0)
        done: dict[str, tuple[int, ...]] = {}
        with ThreadPoolExecutor(len(self.models)) as threads:
            for _ in range(300):
                if len(done) == len(lengths):
                    return done
                step = self.scheduler.schedule(0.0)
                self.mixed += len({s.decode for s in step.requests}) == 2
                running = [threads.submit(model.forward, step.requests, ignore, ignore) for model in self.models]
                answers = [one.result(SECONDS) for one in running]
                assert all(answer == answers[0] for answer in answers)
                events = self.scheduler.update(step, answers[0], None, 0.0)
                done |= {event.id: event.tokens for event in events if isinstance(event, Finished)}
        raise AssertionError("not done in 300 steps")


def ignore(layer: int) -> None:
    """No connector listens."""


LENGTHS = {"a": 1, "b": 20, "c": 37, "d": 54, "e": 71}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_steps_that_mix_decode_and_prefill_leave_the_same_bytes_on_every_rank(world: int) -> None:
    replicas = Replicas(world)
    tokens = replicas.generate(LENGTHS, 12)
    assert replicas.mixed > 5, "this test is about mixed steps"
    first, *others = [torch.stack(model.caches) for model in replicas.models]
    for rank, other in enumerate(others, 1):
        assert torch.equal(first.view(torch.int64), other.view(torch.int64)), f"rank {rank} differs from rank 0"
    assert tokens == Replicas(1).generate(LENGTHS, 12)


@pytest.mark.parametrize("make", [lambda: page_aligned(3, 5, 7), lambda: page_aligned(1), lambda: page_aligned(64, 64)])
def test_caches_start_on_a_page_and_are_zero(make: Callable[[], torch.Tensor]) -> None:
    cache = make()
    assert cache.data_ptr() % 4096 == 0 and cache.is_contiguous() and not cache.any()
