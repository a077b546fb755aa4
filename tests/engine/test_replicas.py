"""Replicated PCP: whatever a step mixes, every rank's cache holds the same bytes and every rank has the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvconn.config import ParallelConfig
from kvconn.engine.config import ModelSpec
from kvconn.engine.model import page_aligned
from tests.engine.threads import Threaded

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = {"a": 1, "b": 20, "c": 37, "d": 54, "e": 71}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_steps_that_mix_decode_and_prefill_leave_the_same_bytes_on_every_rank(world: int) -> None:
    replicas = Threaded(ModelSpec(), ParallelConfig(pcp=world))
    tokens = replicas.generate(LENGTHS, 12)
    assert replicas.mixed > 5, "this test is about mixed steps"
    first, *others = [torch.stack(model.caches) for model in replicas.models]
    for rank, other in enumerate(others, 1):
        assert torch.equal(first.view(torch.int64), other.view(torch.int64)), f"rank {rank} differs from rank 0"
    assert tokens == Threaded(ModelSpec()).generate(LENGTHS, 12)


@pytest.mark.parametrize("make", [lambda: page_aligned(3, 5, 7), lambda: page_aligned(1), lambda: page_aligned(64, 64)])
def test_caches_start_on_a_page_and_are_zero(make: Callable[[], torch.Tensor]) -> None:
    cache = make()
    assert cache.data_ptr() % 4096 == 0 and cache.is_contiguous() and not cache.any()
