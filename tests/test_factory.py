"""Names to connector classes: lazily, and every problem says which key named the thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvconn.base import KVConnector
from kvconn.config import KVTransferConfig
from kvconn.errors import ConfigError
from kvconn.factory import CONNECTORS, get_connector_class


class Ours(KVConnector):
    """A connector that an operator loads by module path."""

    def build_connector_meta(self, step: object) -> object:  # type: ignore[override]
        raise NotImplementedError

    def get_transfer_results(self, finished_req_ids: set[str]) -> object:  # type: ignore[override]
        raise NotImplementedError


def find(name: str, module: str | None = None) -> type[KVConnector]:
    return get_connector_class(KVTransferConfig(name, "kv_both", kv_connector_module_path=module))


def refusal(name: str, module: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        find(name, module)
    return str(caught.value)


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "MultiConnector", "OffloadingConnector"])
def test_our_connectors_are_found_by_their_public_names(name: str) -> None:
    cls = find(name)
    assert issubclass(cls, KVConnector)
    assert cls.__name__ == CONNECTORS[name][1]


def test_a_module_path_names_any_connector_even_one_called_like_ours() -> None:
    assert find("Ours", __name__) is Ours


def test_an_unknown_name_lists_the_known_ones_and_the_one_that_was_meant() -> None:
    message = refusal("NixlConector")
    assert "kv_transfer_config.kv_connector: 'NixlConector' is none of NixlConnector, " in message
    assert "did you mean 'NixlConnector'?" in message
    assert "did you mean" not in refusal("qqq")


def test_a_module_that_is_not_there_is_named() -> None:
    assert "kv_connector_module_path: cannot import 'no.such.module'" in refusal("X", "no.such.module")


@pytest.mark.parametrize("module", ["", ".relative", "..", "kvconn.", "a b"])
def test_a_module_path_that_is_none_is_named(module: str) -> None:
    assert f"kv_connector_module_path: cannot import {module!r}" in refusal("X", module)


@pytest.mark.parametrize(
    ("source", "why"),
    [("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError"), ("import no_such_thing", "no_such_thing")],
)
def test_a_module_that_fails_while_it_is_imported_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    name = f"broken_connector_{why.lower()}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal("X", name)
    assert f"cannot import '{name}'" in message
    assert why in message


@pytest.mark.parametrize("name", ["sys", "NoSuchClass", "KVTransferConfig", "__name__"])
def test_what_is_no_connector_class_is_refused(name: str) -> None:
    assert f"{__name__}.{name} is not a KVConnector class" in refusal(name, __name__)


def test_the_path_of_the_key_is_the_callers() -> None:
    with pytest.raises(ConfigError, match=r"connectors\[2\]\.kv_connector: 'x' is none of"):
        get_connector_class(KVTransferConfig("x", "kv_both"), path="connectors[2]")


def test_importing_the_factory_imports_no_connector_and_nothing_heavy() -> None:
    code = (
        "import sys, kvconn, kvconn.factory, kvconn.aggregator\n"
        "heavy = {'torch', 'nixl', 'zmq', 'vllm', 'numpy'} & set(sys.modules)\n"
        "own = [m for m in sys.modules if m.startswith(('kvconn.nixl', 'kvconn.multi', 'kvconn.offload'))]\n"
        "assert not heavy and not own, (heavy, own)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
