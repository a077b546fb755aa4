"""A real producer with PCP 2, stock connectors, and a real consumer that reads: vLLM's executor, scheduler, aggregator.

Stock stalls, which is the fault this hotfix exists for; with the hotfix each request is freed when it has been read.
What it takes to run such a producer without a GPU stands in rig.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvconn.vllm.hotfix import VARIABLE
from tests.vllm_hotfix.rig import Engine, lay_out

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own imports are not clean
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="PCP needs triton, here its interpreter"),
]

#: its end would free a request on rank 0 too
LEASE = {"kv_lease_duration": 300}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": LEASE}
HOLDER = {"kv_connector": "Holder", "kv_connector_module_path": "holder", "kv_role": "kv_producer"}
MULTI = {
    "kv_connector": "MultiConnector", "kv_role": "kv_producer",
    "kv_connector_extra_config": {"connectors": [NIXL, HOLDER]},
}  # fmt: skip
#: far below the lease
SOON = 100.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    version = import_module("vllm").__version__
    if not version.startswith("0.32."):
        pytest.skip(f"vllm {version}: the way to PCP without a GPU in rig.py is known to work with 0.32")
    path = tmp_path_factory.mktemp("pcp")
    lay_out(path)
    return path


@pytest.fixture(scope="module")
def consumer(home: Path) -> Iterator[Engine]:
    with Engine(home, "consumer", {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}) as engine:
        yield engine


def serve(producer: Engine, consumer: Engine, n: int) -> list[str]:
    """Prefill on one, decode on the other; the ids that the producer's scheduler held in between."""
    prompt = [(7 * i * i + 3 * i + n) % 500 + 3 for i in range(100)]
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = producer.ask(do="run", prompt=prompt, tokens=1, params=ask)
    decoded = consumer.ask(do="run", prompt=prompt, tokens=2, params=prefilled["params"])
    assert decoded["tokens"][0] == prefilled["tokens"][0]
    held: list[str] = prefilled["requests"]
    return held


def test_stock_never_frees_what_was_read(home: Path, consumer: Engine) -> None:
    with Engine(home, "stock", NIXL, pcp=2) as producer:
        free = producer.first["free"]
        for n in range(2):
            serve(producer, consumer, n)
        now = producer.until(lambda state: not state["requests"], 3)
        assert len(now["requests"]) == 2, "fixed in this vLLM? then the hotfix says so and this test may go"
        assert now["free"] < free
        assert "kvconn hotfix" not in producer.log.read_text()


@pytest.mark.parametrize("transfer", [NIXL, MULTI], ids=["alone", "beside a sibling that holds"])
def test_with_the_hotfix_each_is_freed_when_it_was_read(home: Path, consumer: Engine, transfer: dict[str, Any]) -> None:
    variables = {VARIABLE: "1"}
    with Engine(home, f"hotfix-{transfer['kv_connector']}", transfer, pcp=2, **variables) as producer:
        free = producer.first["free"]
        for n in range(3):
            held = serve(producer, consumer, 10 + n)
            assert len(held) == 1, "not freed before it was read"
            now = producer.until(lambda state: not state["requests"], SOON)
            assert (now["requests"], now["free"]) == ([], free)
    said = [line for line in producer.log.read_text().splitlines() if "kvconn hotfix" in line]
    assert len({line.split("pid ")[1].split(")")[0] for line in said}) == 3, "the engine's process and two workers"
    assert all("REPAIRED" in line for line in said)
