"""Pipeline parallelism between real engines: layers are found by name, whichever stage has them; also under TP's other
sizes and in models with windows.

vLLM's CPU platform makes the buffers between stages while it warms a compiled model up, so these engines are not eager;
the backend ``eager`` compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.conftest import PATIENT, Fleet
from tests.vllm.engines import PRODUCER, Engine, ours
from tests.vllm.prompts import prompt
from tests.vllm.test_tp import hand_over, nothing_held

STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}


@pytest.fixture(scope="module")
def producer_of_two_stages(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.engine("pp2-P", ours("kv_producer"), **STAGES)
    yield engine.ready()
    engine.close()


@pytest.fixture(scope="module")
def consumer_of_two_stages(fleet: Fleet) -> Iterator[Engine]:
    engine = fleet.engine("pp2-D", ours("kv_consumer", kv_connector_extra_config=PATIENT), **STAGES)
    yield engine.ready()
    engine.close()


def test_two_stages_to_one(producer_of_two_stages: Engine, consumer: Engine, alone: Engine) -> None:
    hand_over(producer_of_two_stages, consumer, alone, 70_000)


def test_one_stage_to_two(producer: Engine, consumer_of_two_stages: Engine, alone: Engine) -> None:
    hand_over(producer, consumer_of_two_stages, alone, 71_000)


def test_two_stages_to_two(producer_of_two_stages: Engine, consumer_of_two_stages: Engine, alone: Engine) -> None:
    hand_over(producer_of_two_stages, consumer_of_two_stages, alone, 72_000)


def test_a_client_that_names_other_stages_is_refused(producer_of_two_stages: Engine, consumer: Engine) -> None:
    p, d = producer_of_two_stages, consumer
    tokens = prompt(100, 73_000)
    params = p.one(tokens, 1, params=PRODUCER)["params"]
    assert params["pp_size"] == 2
    assert d.one(tokens, 6, params={**params, "pp_size": 1})["reason"] == "error"
    assert "kv_transfer_params.pp_size: expected 2" in d.said()
    assert d.one(tokens, 6, params=params)["reason"] == "length"
    nothing_held(p, d)
