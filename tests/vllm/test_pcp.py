"""A real producer with prefill context parallelism 2: every request is freed when it was read.

Only rank 0 is read, and vLLM counts reports from both. Stock forgets rank 1's, so that nothing is ever freed; the test
of that documents the fault that this library exists for, and fails when vLLM has repaired it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import pcp
from tests.vllm.conftest import PATIENT, Fleet
from tests.vllm.engines import PRODUCER, ROOT, Engine, EngineError, ours, stock
from tests.vllm.prompts import prompt

N = 3
#: on a loaded machine an interpreted forward takes long; who waits for it is not what these tests ask
LONG_LEASE = {"kv_connector_extra_config": {"kv_lease_duration": 120}}
SIBLING = {
    "kv_connector": "HoldingSibling",
    "kv_connector_module_path": "tests.vllm.siblings",
    "kv_role": "kv_producer",
}
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": "kvconn.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}


@pytest.fixture(scope="module")
def hack(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return pcp.environment(tmp_path_factory.mktemp("triton"), ROOT)


@pytest.fixture(scope="module")
def reader(fleet: Fleet, hack: dict[str, str]) -> Iterator[Engine]:
    """One consumer for all of them, of ours."""
    engine = fleet.engine(
        "pcp-D",
        ours("kv_consumer", kv_connector_extra_config=PATIENT),
        "mla",
        env=hack,
        **pcp.ARGUMENTS,
    )
    yield engine
    engine.close()


def multi(*children: dict[str, Any], module: str | None = None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    return config if module is None else {**config, "kv_connector_module_path": module}


def read_all(p: Engine, d: Engine, tokens: list[list[int]], patience: float = 60) -> list[dict[str, Any]]:
    """Every prompt prefilled by ``p`` and read by ``d``; what ``p`` holds ``patience`` seconds after each, or at 0."""
    states = []
    for one in tokens:
        first = p.one(one, 1, params=PRODUCER, timeout=180)
        answer = d.one(one, 4, params=first["params"], timeout=180)
        assert answer["tokens"][:1] == first["tokens"], d.tail()
        try:
            states.append(p.idle(timeout=patience))
        except EngineError:
            states.append(p.state())
    return states


PRODUCERS = {
    "alone": ours("kv_producer", **LONG_LEASE),
    "below stock MultiConnector, beside one that holds": multi(ours("kv_producer", **LONG_LEASE), SIBLING),
    "below our MultiConnector, beside one that holds": multi(
        ours("kv_producer", **LONG_LEASE), SIBLING, module="kvconn.vllm"
    ),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_ours_frees_each_request_when_it_was_read(
    name: str, own_fleet: Fleet, reader: Engine, hack: dict[str, str]
) -> None:
    p = own_fleet.engine("pcp-P", PRODUCERS[name], "mla", env=hack, prefill_context_parallel_size=2, **pcp.ARGUMENTS)
    p.ready(), reader.ready()
    total = p.state()["free"]
    for state in read_all(p, reader, [prompt(100, 3000 + k) for k in range(N)]):
        assert not state["requests"]
        assert state["free"] == total
    assert reader.metrics()["vllm:nixl_bytes_transferred_sum"] > 0


def test_offloading_fills_the_caches_of_both_ranks(own_fleet: Fleet, reader: Engine, hack: dict[str, str]) -> None:
    """Each rank attends to the whole context out of its own cache; what is loaded is read by the consumer again."""
    p = own_fleet.engine(
        "pcp-O",
        multi(ours("kv_producer", **LONG_LEASE), OFFLOAD, module="kvconn.vllm"),
        "mla",
        env=hack,
        prefill_context_parallel_size=2,
        **pcp.ARGUMENTS,
    )
    p.ready(), reader.ready()
    total = p.state()["free"]
    tokens = prompt(100, 3500)
    answers = []
    for _ in range(2):
        first = p.one(tokens, 1, params=PRODUCER, timeout=180)
        answers.append(reader.one(tokens, 4, params=first["params"], timeout=180)["tokens"])
        assert answers[-1][:1] == first["tokens"]
        assert p.idle(timeout=60)["free"] == total
        for engine in (p, reader):
            assert engine.ask("reset")
    assert answers[0] == answers[1]
    assert p.metrics()["vllm:kv_offload_load_blocks_total"] == 2 * (len(tokens) // pcp.BLOCK)


def test_stock_never_frees(own_fleet: Fleet, reader: Engine, hack: dict[str, str]) -> None:
    p = own_fleet.engine(
        "pcp-S", stock("kv_producer", **LONG_LEASE), "mla", env=hack, prefill_context_parallel_size=2, **pcp.ARGUMENTS
    )
    p.ready(), reader.ready()
    states = read_all(p, reader, [prompt(100, 4000 + k) for k in range(2)], patience=4)
    assert [len(state["requests"]) for state in states] == [1, 2]
    assert states[1]["free"] < states[0]["free"]


def test_stock_with_the_hotfix_frees(own_fleet: Fleet, reader: Engine, hack: dict[str, str]) -> None:
    p = own_fleet.engine(
        "pcp-H",
        stock("kv_producer", **LONG_LEASE),
        "mla",
        env={**hack, "KVCONN_VLLM_HOTFIX": "1"},
        prefill_context_parallel_size=2,
        **pcp.ARGUMENTS,
    )
    p.ready(), reader.ready()
    states = read_all(p, reader, [prompt(100, 4500 + k) for k in range(2)])
    assert [state["requests"] for state in states] == [[], []]


def test_replicated_pcp_only_produces(own_fleet: Fleet, hack: dict[str, str], tmp_path: Path) -> None:
    p = own_fleet.engine("pcp-both", ours("kv_both"), "mla", env=hack, prefill_context_parallel_size=2, **pcp.ARGUMENTS)
    with pytest.raises(EngineError):
        p.ready()
    assert "with replicated PCP 2 only kv_producer works, got kv_both" in p.said()
