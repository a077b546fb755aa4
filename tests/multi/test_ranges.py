"""Ranges and handshakes with real NIXL halves below a MultiConnector: who reads what, who listens where."""

from __future__ import annotations

from typing import Any

import pytest

from kvconn.base import KVConnector
from kvconn.errors import ConfigError
from kvconn.multi.connector import MultiConnector
from tests.multi.fakes import FakeChild, fake, holding
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, Side, multi, wait_until

BEHIND_A_CACHE = {
    "beside": multi(fake(match=32, asynchronous=True), NIXL_CONSUMER, role="kv_consumer"),
    "behind a synchronous one": multi(fake(match=32, asynchronous=False), NIXL_CONSUMER, role="kv_consumer"),
    "nested": multi(fake(match=32), multi(fake(), NIXL_CONSUMER, role="kv_consumer"), role="kv_consumer"),
}


@pytest.mark.parametrize("shape", BEHIND_A_CACHE)
@pytest.mark.parametrize("hits", [0, 1])
def test_nixl_reads_what_lies_behind_another_childs_range_and_nothing_else(shape: str, hits: int) -> None:
    p, d = Side("P", NIXL_PRODUCER), Side("D", BEHIND_A_CACHE[shape])
    try:
        params = p.prefill("a", [3, 4, 9, 5, 6], seed=7)
        blocks = [11, 12, 1, 2, 8]
        d.load("a", params, blocks, hits)
        cache = d.workers[0].children[0]  # type: ignore[attr-defined]
        assert isinstance(cache, FakeChild)
        if shape != "behind a synchronous one":
            cache.say(received="a")

        def both() -> bool:
            d.step()
            p.step()
            return bool(d.received and p.sent)

        wait_until(both, what=f"p={p.scheduler!r} d={d.scheduler!r}")
        assert (d.received, d.failed, p.sent) == (["a"], [], ["a"])
        first = hits + 2  # in blocks: the local hit and the cache's range
        assert d.holds(blocks[first:], seed=7, start=first)
        assert not any(cache[blocks[:first]].any() for cache in d.caches[0].values())
    finally:
        d.close()
        p.close()


@pytest.mark.parametrize("shape", ["beside", "nested"])
def test_two_children_on_one_side_channel_are_refused_with_both_names(shape: str) -> None:
    second = NIXL_PRODUCER if shape == "beside" else multi(NIXL_PRODUCER)
    built: list[KVConnector] = []

    def make(*args: Any) -> MultiConnector:
        built.append(MultiConnector(*args))
        return built[-1]  # type: ignore[return-value]

    name = "NixlConnector[1]" if shape == "beside" else "MultiConnector"
    other = "NixlConnector[0]" if shape == "beside" else "NixlConnector"
    try:
        with pytest.raises(ConfigError) as caught:
            Side("P", multi(NIXL_PRODUCER, second, holding()), make=make)
    finally:
        for connector in built:
            connector.shutdown()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{name} (beside {other}, which publish on the same address): ")
    assert "side channel: cannot listen on 127.0.0.1:" in problem
