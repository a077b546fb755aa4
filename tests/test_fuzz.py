"""A short run of ``python -m tests.fuzz``; that it finds what it must; and that nothing of ours unpickles a socket."""

from __future__ import annotations

import ast
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconn.nixl.connections import Connections
from tests.fuzz import parsers
from tests.fuzz.__main__ import fuzz
from tests.fuzz.mutate import mutated, mutated_bytes

PACKAGE = Path(__file__).resolve().parent.parent / "kvconn"
#: a process and the children it forked talk over pipes that nobody else can open; torch's and vLLM's own is theirs
PIPES = {"doctor/pair.py", "engine/client.py", "engine/executor.py", "engine/worker.py", "engine/words.py"}
#: modules that make objects of bytes, and calls that do so within other modules
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "eval", "exec", "Unpickler", "broadcast_object_list"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


def test_nothing_escapes_no_thread_ends_and_memory_is_flat() -> None:
    counts, wrong = fuzz(20_000, seed=7)
    assert wrong == []
    targets = {name.partition(":")[0] for name in counts if ":" in name}
    assert targets == {*(one.__name__ for one in parsers.PARSERS), "engines", "live"}
    # what is only ever refused tests the first check of a parser and no other
    assert all(counts[f"{name}: taken"] for name in targets - {"live"}), counts


@pytest.mark.parametrize(
    ("module", "name", "broken", "target"),
    [
        ("tests.fuzz.parsers", "parse_request", lambda body: (body[0], 0), "requests"),
        ("tests.fuzz.parsers", "check_signature", lambda key, ref: None, "params"),
        ("tests.fuzz.parsers", "numeric", lambda text: text, "hosts"),
        ("kvconn.nixl.wire", "MAX_FRAME", "many", "engines"),
        ("kvconn.nixl.contacts", "PeerError", KeyError, "engines"),
        ("kvconn.nixl.handshake", "missing", lambda ours, plans: 1 / 0, "ranks"),
        ("tests.fuzz.ranks", "Connections", lambda *args: Connections(1, 99, *args[2:]), "connections"),
    ],
)
def test_a_broken_guard_is_found(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, broken: Any, target: str
) -> None:
    monkeypatch.setattr(f"{module}.{name}", broken)
    _, wrong = fuzz(600, seed=7, target=target)
    assert wrong and f"--target {target} --only" in wrong[0]


def test_a_thread_that_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvconn.nixl.sideclient.parse_timestamp", lambda frame: 1 / 0)
    with pytest.raises(AssertionError, match=r"threads have ended: \['HandshakeClient"):
        fuzz(600, seed=7, target="live")


def test_a_case_is_the_same_every_time() -> None:
    for change, good in ((mutated, parsers.PARAMS), (mutated, parsers.CONFIG), (mutated_bytes, parsers.BLOB)):
        once, again = ([repr(change(random.Random(n), good)) for n in range(200)] for _ in range(2))
        assert once == again and len(set(once)) > 150


def unsafe(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
            loads = (owner, name) in {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
            found += [name] * (name in CALLS or loads)
    return found


def test_no_socket_is_unpickled() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 100
    found = {name: what for name, text in sources.items() if (what := unsafe(text))}
    assert found.keys() <= PIPES, found
    assert all(one.split(".")[0] == "multiprocessing" for what in found.values() for one in what), found


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from marshal import loads", "s.recv_pyobj()", "torch.load(f)", "eval(x)", "import dill as d",
     "from multiprocessing.connection import Client"],
)  # fmt: skip
def test_what_makes_objects_of_bytes_is_seen(source: str) -> None:
    assert unsafe(source)
