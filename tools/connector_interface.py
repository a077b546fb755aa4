"""Write down vLLM's connector interface as it stands in a wheel: ``connector_interface.py WHEEL... [--out DIR]``.

Reads the sources inside the wheel with :mod:`ast`; nothing is imported or installed, so a wheel for any platform will
do. ``pip download --no-deps vllm==0.33.0`` gets one. The result is ``<version>.json`` in ``kvconn/vllm/interface``; a
new version goes into ``VERSIONS`` there.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvconn.vllm import interface
from kvconn.vllm.interface import Call, Class, Field, Interface, Method, MethodKind, Parameter, ParameterKind

_V1 = "vllm/distributed/kv_transfer/kv_connector/v1"
NIXL_METADATA = f"{_V1}/nixl/metadata.py"

#: the interface, and the classes whose objects cross it or the wire.
CLASSES: dict[str, tuple[str, ...]] = {
    f"{_V1}/base.py": (
        interface.BASE, interface.HYBRID, "KVConnectorRole", "KVConnectorMetadata", "KVConnectorHandshakeMetadata",
        "KVConnectorWorkerMetadata", "KVConnectorTransferResults",
    ),
    f"{_V1}/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "vllm/distributed/kv_events.py": ("KVConnectorKVEvents",),
    "vllm/v1/outputs.py": ("KVConnectorOutput",),
    "vllm/config/kv_transfer.py": ("KVTransferConfig",),
    "vllm/distributed/kv_transfer/kv_connector/utils.py": ("KVOutputAggregator",),
    NIXL_METADATA: (
        "NixlAgentMetadata", "NixlHandshakePayload", "RemoteMeta", "ReqMeta", "HeartbeatInfo", "NixlConnectorMetadata",
    ),
}  # fmt: skip

#: vLLM's own implementations of it: what fits if anything does.
CONNECTORS: dict[str, tuple[str, ...]] = {
    f"{_V1}/nixl/connector.py": ("NixlBaseConnector", "NixlPullConnector", "NixlPushConnector"),
    f"{_V1}/multi_connector.py": ("MultiConnector",),
    f"{_V1}/offloading_connector.py": ("OffloadingConnector",),
    f"{_V1}/example_connector.py": ("ExampleConnector",),
}

#: where vLLM calls a connector. Its own connectors call their halves by the same names, so they are left out.
CALLERS = re.compile(r"vllm/(v1|model_executor/layers/attention)/.*\.py|vllm/distributed/kv_transfer/[^/]*\.py")
#: what a connector is called there; halves, tiers and managers have methods of the same names.
RECEIVER = re.compile(r"(.*\.)?(kv_)?connector|.*kv_transfer_group(\(\))?|.*connector_cls")


class WheelError(Exception):
    """This file is no wheel of vLLM as we know it."""


class Source:
    """The Python files of one wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self.names = sorted(name for name in self._zip.namelist() if name.endswith(".py"))

    def tree(self, name: str) -> ast.Module:
        try:
            return ast.parse(self._zip.read(name))
        except KeyError:
            raise WheelError(f"no {name} in it") from None

    def version(self) -> str:
        for name in self._zip.namelist():
            if re.fullmatch(r"vllm[\w]*-[^/]+\.dist-info/METADATA", name):
                found = re.search(r"^Version: ([0-9.]+)", self._zip.read(name).decode(), re.MULTILINE)
                if found:
                    return found[1]
        raise WheelError("no version in its metadata")


def extract(path: Path) -> Interface:
    """Everything we write down of the wheel at ``path``. WheelError says what is not there."""
    source = Source(path)
    classes = dict(_classes(source, CLASSES))
    return Interface(
        source.version(), _nixl_version(source.tree(NIXL_METADATA)), classes, dict(_classes(source, CONNECTORS)),
        tuple(_calls(source, set(classes[interface.BASE].methods) | set(classes[interface.HYBRID].methods))),
    )  # fmt: skip


def _classes(source: Source, wanted: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Class]]:
    for file, names in wanted.items():
        here = {node.name: node for node in source.tree(file).body if isinstance(node, ast.ClassDef)}
        for name in names:
            if name not in here:
                raise WheelError(f"no class {name} in {file}")
            yield name, _class(here[name], file)


def _class(node: ast.ClassDef, file: str) -> Class:
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    for function in functions:
        if function.name == "__init__":
            fields += [item for item in ast.walk(function) if isinstance(item, ast.AnnAssign)]
    return Class(
        file.removesuffix(".py").replace("/", "."),
        tuple(_text(base).rsplit(".", 1)[-1] for base in node.bases),
        {f.name: _method(f) for f in functions if f.name == "__init__" or not f.name.startswith("_")},
        tuple(_field(item) for item in fields if not _target(item).startswith("_")),
    )


def _target(item: ast.AnnAssign) -> str:
    """``x`` of ``x: int`` and of ``self.x: int``."""
    return item.target.attr if isinstance(item.target, ast.Attribute) else _text(item.target)


def _field(item: ast.AnnAssign) -> Field:
    return Field(_target(item), _text(item.annotation), _text(item.value) if item.value else None)


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Method:
    marks = {_text(mark).rsplit(".", 1)[-1] for mark in node.decorator_list}
    kinds: list[MethodKind] = [kind for kind in ("property", "classmethod", "staticmethod") if kind in marks]
    kind: MethodKind = "property" if "cached_property" in marks else (kinds or ["method"])[0]
    parameters = tuple(_parameters(node.args))
    return Method(
        kind, "abstractmethod" in marks, () if kind == "property" else parameters[0 if kind == "staticmethod" else 1 :]
    )


def _parameters(args: ast.arguments) -> Iterator[Parameter]:
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for index, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        yield _parameter(arg, "positional_only" if index < len(args.posonlyargs) else "positional", default)
    if args.vararg:
        yield _parameter(args.vararg, "args", None)
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _parameter(arg, "keyword", default)
    if args.kwarg:
        yield _parameter(args.kwarg, "kwargs", None)


def _parameter(arg: ast.arg, kind: ParameterKind, default: ast.expr | None) -> Parameter:
    return Parameter(arg.arg, kind, _text(default) if default else None, _text(arg.annotation) or None)


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes reads the same
        return node.value
    return "" if node is None else ast.unparse(node)


def _calls(source: Source, methods: set[str]) -> list[Call]:
    """How vLLM calls the interface's methods. A call with ``*`` or ``**`` tells nothing and is left out."""
    found = set()
    for name in source.names:
        if not CALLERS.fullmatch(name):
            continue
        for node in ast.walk(source.tree(name)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in methods
                and RECEIVER.fullmatch(ast.unparse(node.func.value))
                and not any(isinstance(arg, ast.Starred) for arg in node.args)
                and all(keyword.arg for keyword in node.keywords)
            ):
                keywords = tuple(sorted(keyword.arg or "" for keyword in node.keywords))
                found.add((node.func.attr, len(node.args), keywords))
    return [Call(*one) for one in sorted(found)]


def _nixl_version(tree: ast.Module) -> int:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if _text(target) == "NIXL_CONNECTOR_VERSION" and isinstance(node.value, ast.Constant):
                return int(str(node.value.value))
    raise WheelError(f"no NIXL_CONNECTOR_VERSION in {NIXL_METADATA}")


def write(found: Interface) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write down vLLM's connector interface out of its wheels.")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--out", type=Path, default=Path(interface.__file__).parent)
    given = parser.parse_args(arguments)
    for wheel in given.wheels:
        try:
            found = extract(wheel)
        except (OSError, SyntaxError, WheelError, zipfile.BadZipFile) as error:
            print(f"{wheel}: {error}", file=sys.stderr)
            return 1
        path = given.out / f"{found.version}.json"
        path.write_bytes(write(found))
        print(f"{path.name}: {len(found.classes)} classes, {len(found.calls)} ways of calling")
    return 0


if __name__ == "__main__":
    sys.exit(main())
