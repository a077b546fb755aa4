"""Data-parallel replicas: engines of their own, ids with ``_dp{n}``, ports from a base on. One producer for several
readers, several producers for each reader, several readers of one request."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.ports import free_ports
from tests.engine.driving import unique_tokens
from tests.engine.pairs import CONTENT, SECONDS, Starter, ends, prefilled, starting
from tests.engine.threads import Threaded
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER

MODEL = msgspec.structs.replace(CONTENT, kv="gqa", n_kv_heads=4)
N_NEW = 4


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


def base_port() -> int:
    """One that is free, and the next too."""
    found = sorted(free_ports(800))
    return next(port for port, after in pairwise(found) if after == port + 1)


def replicas(start: Starter, name: str, transfer: dict[str, Any], base: int | None = None) -> list[EngineProcess]:
    """Two engines, as data parallelism starts them."""
    return [
        start(
            f"{name}{n}",
            transfer=transfer | {"engine_id": f"{name}_dp{n}"},
            model=MODEL,
            port=base + n if base else None,
        )
        for n in range(2)
    ]


def alone(length: int) -> tuple[int, ...]:
    return Threaded(MODEL).generate({"a": length}, N_NEW)["a"]


def prompt(length: int) -> tuple[int, ...]:
    return unique_tokens("a", length)


def empty(*engines: EngineProcess) -> None:
    for engine in engines:
        assert engine.drain(SECONDS), engine.stats()
        assert engine.stats().connector.get("nixl_num_kv_expired_reqs", 0) == 0


def test_every_reader_reads_every_producer_and_nobody_takes_one_replica_for_another(start: Starter) -> None:
    producers = replicas(start, "P", NIXL_PRODUCER, base_port())
    readers = replicas(start, "D", NIXL_CONSUMER)
    for number, (p, d) in enumerate((p, d) for p in producers for d in readers):
        length, id = 21 + number, f"r{number}"
        params = prefilled(p, id, prompt(length))
        assert (params["remote_engine_id"], params["remote_port"]) == (f"P_dp{number // 2}", p.config.port)
        d.submit(EngineRequest(id, prompt(length), N_NEW, params))
        assert ends(d, id)[id].tokens == alone(length)
    assert producers[1].config.port == producers[0].config.port + 1
    empty(*producers, *readers)
    for d in readers:
        assert d.stats().connector["nixl_num_transfers"] == 2


def test_readers_of_several_ranks_and_of_one_share_a_request_and_the_last_frees_it(start: Starter) -> None:
    p = start("P", transfer=NIXL_PRODUCER, parallel=ParallelConfig(tp=2), model=MODEL)
    readers = [start(f"D{tp}", transfer=NIXL_CONSUMER, parallel=ParallelConfig(tp=tp), model=MODEL) for tp in (1, 4)]
    p.submit(EngineRequest("a", prompt(30), 1, {"do_remote_decode": True, "kvconn": {"readers": 2}}))
    params = ends(p, "a")["a"].kv_transfer_params
    for n, d in enumerate(readers):
        d.submit(EngineRequest("a", prompt(30), N_NEW, params))
        assert ends(d, "a")["a"].tokens == alone(30)
        assert n == 1 or not p.drain(0.2), "the other one has not read"
    empty(p, *readers)


def test_where_a_reader_never_comes_the_lease_frees(start: Starter) -> None:
    p = start("P", transfer=NIXL_PRODUCER | {"kv_connector_extra_config": {"kv_lease_duration": 10}}, model=MODEL)
    d = start("D", transfer=NIXL_CONSUMER, model=MODEL)
    p.submit(EngineRequest("a", prompt(30), 1, {"do_remote_decode": True, "kvconn": {"readers": 2}}))
    d.submit(EngineRequest("a", prompt(30), N_NEW, ends(p, "a")["a"].kv_transfer_params))
    assert ends(d, "a")["a"].tokens == alone(30)
    assert p.drain(SECONDS), p.stats()
    assert p.stats().connector["nixl_num_kv_expired_reqs"] == 1
    empty(d)
