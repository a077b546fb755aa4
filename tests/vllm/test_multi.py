"""Real engines below both MultiConnectors, beside both kinds of offloading: read, stored, freed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import Fleet
from tests.vllm.engines import PRODUCER, Engine, ours
from tests.vllm.prompts import prompt

HOLD = {"cpu_bytes_to_use": 64 << 20, "kvconn": {"hold": True}}
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": "kvconn.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": HOLD,
}


@pytest.mark.parametrize("module", ["kvconn.vllm", None], ids=["our Multi", "stock Multi"])
def test_a_producer_that_also_stores_frees_what_was_read(
    module: str | None, own_fleet: Fleet, consumer: Engine, alone: Engine
) -> None:
    transfer: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [ours("kv_producer"), OFFLOAD]},
    }
    if module is not None:
        transfer["kv_connector_module_path"] = module
    p = own_fleet.engine("stores", transfer).ready()
    for k in range(4):
        tokens = prompt(150 + 40 * k, 9000 + k)
        first = p.one(tokens, 1, params=PRODUCER)
        answer = consumer.ready().one(tokens, 4, params=first["params"])
        assert answer["tokens"] == alone.ready().one(tokens, 4)["tokens"]
        assert p.idle()["free"] == p.state()["total"] - 1
    stored = [name for name, value in p.metrics().items() if "offload" in name and value]
    assert not p.state()["owed"], stored
