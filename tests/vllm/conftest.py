"""Real-engine tests. Without vLLM they are all skipped, with one reason; engines are shared by session fixtures."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Engine, Server, environment, ours

#: engines of vLLM spin, and there are more of them than cores: a peer that lives may be long silent
PATIENT = {"kvconn": {"handshake": 60.0, "read": 120.0}}
#: for a peer that is known not to be there
QUICK = {"kvconn": {"handshake": 2.0}}
WHY = "vllm is not installed here; make test-vllm runs these"


if find_spec("vllm") is not None:
    with warnings.catch_warnings():  # what vLLM and PyTorch say to each other while they are imported is not ours
        warnings.simplefilter("ignore")
        importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        importlib.import_module("vllm.v1.core.sched.scheduler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason=WHY))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``models("llama")``: a directory with that tiny model, made when first asked for."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            out = tmp_path_factory.mktemp("models") / kind
            subprocess.run(
                [sys.executable, "-m", "tests.vllm.models", kind, str(out)],
                check=True,
                env=environment(1, {}),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=120,
            )
            made[kind] = out
        return made[kind]

    return model


class Fleet:
    """Starts engines and ends them all."""

    def __init__(self, logs: Path, models: Callable[[str], Path]) -> None:
        self.logs, self.models = logs, models
        self.started: list[Engine | Server] = []

    def engine(
        self, name: str, transfer: dict[str, Any] | None, model: str = "llama", made: type[Engine] = Engine, **more: Any
    ) -> Engine:
        engine = made(name, self._log(name), self.models(model), transfer, **more)
        self.started.append(engine)
        return engine

    def server(self, name: str, transfer: dict[str, Any] | None, model: str = "llama", **more: Any) -> Server:
        server = Server(name, self._log(name), self.models(model), transfer, **more)
        self.started.append(server)
        return server

    def _log(self, name: str) -> Path:
        return self.logs / f"{len(self.started)}-{name}.log"

    def close(self) -> None:
        for one in reversed(self.started):
            one.close()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]) -> Iterator[Fleet]:
    """Engines that live as long as the session."""
    fleet = Fleet(tmp_path_factory.mktemp("engines"), models)
    yield fleet
    fleet.close()


@pytest.fixture
def own_fleet(tmp_path: Path, models: Callable[[str], Path]) -> Iterator[Fleet]:
    """Engines of one test."""
    fleet = Fleet(tmp_path, models)
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def alone(fleet: Fleet) -> Engine:
    """One engine without a connector: what the tokens must be."""
    return fleet.engine("alone", None)


@pytest.fixture(scope="session")
def producer(fleet: Fleet) -> Engine:
    return fleet.engine("P", ours("kv_producer"))


@pytest.fixture(scope="session")
def consumer(fleet: Fleet) -> Engine:
    """Under the policy ``fail``."""
    return fleet.engine("D", ours("kv_consumer", kv_connector_extra_config=PATIENT))


@pytest.fixture(scope="session")
def recomputer(fleet: Fleet) -> Engine:
    """Under the policy ``recompute``."""
    return fleet.engine("R", ours("kv_consumer", kv_load_failure_policy="recompute", kv_connector_extra_config=PATIENT))
