"""An engine's ranks as threads of this process, for tests of what they compute together: no gloo, no start-up."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from kvconn.base import BlockIds
from kvconn.config import ParallelConfig
from kvconn.engine.config import EngineConfig, ModelSpec, check
from kvconn.engine.model import make_model
from kvconn.engine.portion import Portion, seen
from kvconn.engine.ranks import Group, Ranks
from kvconn.engine.request import EngineRequest, Finished
from kvconn.engine.scheduler import Scheduler
from tests.engine.driving import unique_tokens

SECONDS = 20.0
ONE_RANK = ParallelConfig()


class Table:
    """Where the members of a group exchange tensors. A member that does not come breaks the others' wait."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.given: list[torch.Tensor] = [torch.empty(0)] * len(members)
        self.barrier = threading.Barrier(len(members), timeout=SECONDS)
        self.sent: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(len(members)) for b in range(len(members))
        }

    def exchange(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = own.clone()
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


class Seat:
    """One member of a group."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank = table.members.index(rank)
        self.size = len(table.members)
        self._table = table

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        parts = self._table.exchange(self.rank, values)
        assert len({part.shape for part in parts}) == 1, "gloo wants equal shapes"
        return parts

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(values)).sum(dim=0)

    def send(self, values: torch.Tensor, to: int) -> None:
        self._table.sent[self.rank, to].put(values.clone())

    def receive(self, values: torch.Tensor, source: int) -> torch.Tensor:
        told = self._table.sent[source, self.rank].get(timeout=SECONDS)
        assert told.shape == values.shape
        return told


def ranks_of(parallel: ParallelConfig) -> list[Ranks]:
    """All ranks of an engine, at tables of this process."""
    tables: dict[tuple[int, ...], Table] = {}

    def join(rank: int, members: tuple[int, ...]) -> Group:
        return Seat(tables.setdefault(members, Table(members)), rank)

    return [Ranks(parallel, rank, partial(join, rank)) for rank in range(parallel.world)]


class Threaded:
    """One engine, its ranks threads, without a connector."""

    def __init__(self, model: ModelSpec, parallel: ParallelConfig = ONE_RANK, **sizes: int) -> None:
        sizes = {"num_blocks": 64, "block_size": 8, "max_num_batched_tokens": 16} | sizes
        self.config = EngineConfig(name="T", model=model, parallel=parallel, **sizes)  # type: ignore[arg-type]
        check(self.config)
        self.models = [make_model(self.config, ranks) for ranks in ranks_of(parallel)]
        self.scheduler = Scheduler(self.config, None, lambda direction, id, now: None, "fail")
        self.tables: dict[str, BlockIds] = {}
        #: steps with prefill and decode tokens
        self.mixed = 0

    def generate(self, lengths: dict[str, int], max_tokens: int) -> dict[str, tuple[int, ...]]:
        """Tokens of one request per length."""
        for id, n in lengths.items():
            self.scheduler.add(EngineRequest(id, unique_tokens(id, n), max_tokens), 0.0)
        done: dict[str, tuple[int, ...]] = {}
        with ThreadPoolExecutor(len(self.models)) as threads:
            for _ in range(300):
                if len(done) == len(lengths):
                    return done
                step = self.scheduler.schedule(0.0)
                self.mixed += len({s.decode for s in step.requests}) == 2
                self.tables |= {s.id: s.tables for s in step.requests}
                running = [threads.submit(model.forward, step.requests, ignore, ignore) for model in self.models]
                answers = [one.result(SECONDS) for one in running]
                sampled = answers[self.config.parallel.output_rank]
                assert all(answer in (sampled, {}) for answer in answers)
                events = self.scheduler.update(step, sampled, None, 0.0)
                done |= {event.id: event.tokens for event in events if isinstance(event, Finished)}
        raise AssertionError("not done in 300 steps")

    @property
    def min_margin(self) -> float:
        return min(model.min_margin for model in self.models)

    def kv(self, id: str, n_tokens: int) -> torch.Tensor:
        """A request's KV put together from the ranks, ``[layers, tokens, heads, channels]``; copies must be equal.

        Of a layer that sees a window only that window, of one that keeps a state nothing; the rest is zero.
        """
        spec = self.config.model
        whole = torch.zeros(spec.n_layers, n_tokens, spec.cache_heads, spec.channels, dtype=torch.float64)
        known = torch.zeros(whole.shape[:3], dtype=torch.bool)
        for rank, model in enumerate(self.models):
            portion = Portion.of(spec, self.config.parallel, rank)
            heads = torch.arange(portion.kv.first, portion.kv.first + portion.kv.count)
            for layer, (cache, group, window) in enumerate(
                zip(model.caches, portion.groups, portion.windows, strict=True), portion.first_layer
            ):
                known[layer] |= portion.keeps_state[layer - portion.first_layer]
                if portion.keeps_state[layer - portion.first_layer]:
                    continue
                start = max(0, n_tokens - window) if window is not None else 0
                blocks, here = seen(portion.tokens, self.tables[id][group], n_tokens, window, 1, self.config.block_size)
                rows = cache[blocks].transpose(1, 2).flatten(0, 1)[: len(here)][here >= start]
                place = layer, here[here >= start][:, None], heads[None, :]
                again = known[place]
                assert torch.equal(whole[place].view(torch.int64)[again], rows.view(torch.int64)[again])
                whole[place] = rows
                known[place] = True
                known[layer, :start] = True
        assert known.all(), "some KV is nowhere"
        return whole


def ignore(layer: int) -> None:
    """No connector listens."""
