"""vLLM's connector interface, release by release, as data; and whether a class fits one of them.

Rules
1. The data is extracted from vLLM's wheels by ``tools/connector_interface.py`` and checked in (``<version>.json``);
   nobody edits it. Reading it takes no vLLM.
2. :func:`fits` asks what an engine of that version would run into: a method it calls that is not there or is still
   abstract, a call that would not bind. Names of parameters count only where vLLM passes them by name.
3. What a class inherits from vLLM's own base class comes from whatever vLLM is installed, so it fits by definition.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, Literal

import msgspec

__all__ = [
    "BASE",
    "HYBRID",
    "VERSIONS",
    "Call",
    "Class",
    "Field",
    "Interface",
    "Method",
    "Parameter",
    "Shape",
    "describe",
    "fits",
    "load",
    "stock",
]

#: the releases that are described.
VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
#: the class that every connector derives from, and the one that a connector with several cache groups adds.
BASE, HYBRID = "KVConnectorBase_V1", "SupportsHMA"

ParameterKind = Literal["positional_only", "positional", "args", "keyword", "kwargs"]
MethodKind = Literal["method", "classmethod", "staticmethod", "property", "attribute"]


class Parameter(msgspec.Struct, frozen=True, omit_defaults=True):
    """``default`` is its source text, None where there is none. Self and cls are not listed."""

    name: str
    kind: ParameterKind = "positional"
    default: str | None = None
    annotation: str | None = None

    @property
    def required(self) -> bool:
        return self.default is None and self.kind in ("positional_only", "positional", "keyword")


class Method(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: MethodKind = "method"
    abstract: bool = False
    parameters: tuple[Parameter, ...] = ()


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    """A dataclass's field, or a public attribute that ``__init__`` annotates."""

    name: str
    annotation: str
    default: str | None = None


class Class(msgspec.Struct, frozen=True, omit_defaults=True):
    module: str
    bases: tuple[str, ...] = ()
    methods: dict[str, Method] = {}
    fields: tuple[Field, ...] = ()


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """One way in which vLLM calls a method: how many arguments by position, which by name."""

    method: str
    positional: int
    keywords: tuple[str, ...] = ()


class Interface(msgspec.Struct, frozen=True):
    """One release. ``classes``: the interface and what crosses it; ``connectors``: vLLM's own implementations."""

    version: str
    nixl_connector_version: int
    classes: dict[str, Class]
    connectors: dict[str, Class]
    calls: tuple[Call, ...]


class Shape(msgspec.Struct, frozen=True):
    """A connector class as a caller sees it: where each of its methods comes from, and how it is called."""

    name: str
    ancestors: frozenset[str]
    methods: Mapping[str, tuple[str, Method]]


@functools.cache
def load(version: str) -> Interface:
    """The checked-in description of that release. ValueError for one that is not among VERSIONS."""
    if version not in VERSIONS:
        raise ValueError(
            f"vLLM {version}: expected one of {', '.join(VERSIONS)}; tools/connector_interface.py adds one"
        )
    text = (files(__name__) / f"{version}.json").read_bytes()
    return msgspec.json.decode(text, type=Interface)


# --- two ways to a shape ------------------------------------------------------------------------------------------


def describe(cls: type) -> Shape:
    """Of a live class."""
    methods: dict[str, tuple[str, Method]] = {}
    for owner in cls.__mro__[:-1]:  # object has nothing that is asked for
        for name, value in vars(owner).items():
            if name not in methods:
                methods[name] = (owner.__name__, _live_method(value))
    return Shape(cls.__name__, frozenset(base.__name__ for base in cls.__mro__), methods)


def _live_method(value: Any) -> Method:
    abstract = bool(getattr(value, "__isabstractmethod__", False))
    if isinstance(value, property | functools.cached_property):
        return Method("property", abstract)
    if isinstance(value, classmethod | staticmethod):
        kind: MethodKind = "classmethod" if isinstance(value, classmethod) else "staticmethod"
        return Method(kind, abstract, _live_parameters(value.__func__, bound=kind == "classmethod"))
    if inspect.isfunction(value):
        return Method("method", abstract, _live_parameters(value, bound=True))
    if callable(value) and not isinstance(value, type):  # an object with __call__ does not become a bound method
        return Method("staticmethod", abstract, _live_parameters(value, bound=False))
    return Method("attribute")


_KINDS: dict[Any, ParameterKind] = {
    inspect.Parameter.POSITIONAL_ONLY: "positional_only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.VAR_POSITIONAL: "args",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_KEYWORD: "kwargs",
}


def _live_parameters(function: Any, *, bound: bool) -> tuple[Parameter, ...]:
    parameters = [
        Parameter(p.name, _KINDS[p.kind], None if p.default is p.empty else repr(p.default))
        for p in inspect.signature(function).parameters.values()
    ]
    takes_self = bound and parameters and parameters[0].kind in ("positional_only", "positional")
    return tuple(parameters[1:] if takes_self else parameters)


def stock(version: str, name: str) -> Shape:
    """Of one of vLLM's own connectors, out of the data. KeyError when that release has no such connector."""
    interface = load(version)
    known = {**interface.classes, **interface.connectors}
    line = list(_line(known, name))
    methods: dict[str, tuple[str, Method]] = {}
    for owner in line:
        for key, method in known[owner].methods.items():
            methods.setdefault(key, (owner, method))
    return Shape(name, frozenset(line), methods)


def _line(known: Mapping[str, Class], name: str) -> Iterator[str]:
    yield name
    for base in known[name].bases:
        if base in known:
            yield from _line(known, base)


# --- fitting ------------------------------------------------------------------------------------------------------


def fits(connector: type | Shape, version: str) -> list[str]:
    """What an engine of that release would run into with this connector class; [] when it fits."""
    interface = load(version)
    shape = connector if isinstance(connector, Shape) else describe(connector)
    wanted = dict(interface.classes[BASE].methods)
    if HYBRID in shape.ancestors:
        wanted |= interface.classes[HYBRID].methods
    found = []
    for name, method in wanted.items():
        if name.startswith("_") and name != "__init__":
            continue
        found += [f"{shape.name}.{name}: {problem}" for problem in _problems(shape, name, method, interface.calls)]
    return found


def _problems(shape: Shape, name: str, wanted: Method, calls: tuple[Call, ...]) -> Iterator[str]:
    owner, mine = shape.methods.get(name, ("", None))
    inherited = BASE in shape.ancestors and owner in ("", BASE, HYBRID)
    if mine is None or (inherited and wanted.abstract):
        if wanted.abstract or not inherited:
            yield f"missing; expected {_words(name, wanted)}"
        return
    if inherited:
        return
    if mine.abstract:
        yield f"still abstract; expected {_words(name, wanted)}"
    elif wanted.kind == "property":
        if mine.kind not in ("property", "attribute"):
            yield f"expected a property, which is read and not called, got a {mine.kind}"
    elif mine.kind in ("property", "attribute") or (wanted.kind == "classmethod" and mine.kind == "method"):
        yield f"expected a {wanted.kind}, got a {mine.kind}"
    else:
        yield from _unbound(name, wanted, mine, calls)


def _unbound(name: str, wanted: Method, mine: Method, calls: tuple[Call, ...]) -> Iterator[str]:
    signature = _signature(mine)
    for call in _calls(name, wanted, calls):
        try:
            signature.bind(*range(call.positional), **dict.fromkeys(call.keywords))
        except TypeError as error:
            arguments = [f"{call.positional} by position", *(f"{k}=" for k in call.keywords)]
            yield f"a call with {', '.join(arguments)} does not bind ({error}); expected {_words(name, wanted)}"


def _calls(name: str, wanted: Method, calls: tuple[Call, ...]) -> list[Call]:
    """The fewest and the most arguments that the interface promises, and every way in which vLLM really calls it."""
    by_position = [p for p in wanted.parameters if p.kind in ("positional_only", "positional")]
    required = tuple(p.name for p in wanted.parameters if p.kind == "keyword" and p.required)
    named = tuple(p.name for p in wanted.parameters if p.kind == "keyword")
    any_name = ("a_keyword_of_tomorrow",) if any(p.kind == "kwargs" for p in wanted.parameters) else ()
    promised = [
        Call(name, sum(p.required for p in by_position), required),
        Call(name, len(by_position), (*named, *any_name)),
    ]
    if name == "__init__":  # vLLM looks for the parameter of this name in connectors that are not its own
        promised.append(Call(name, 2, ("kv_cache_config",)))
    return list(dict.fromkeys([*promised, *(call for call in calls if call.method == name)]))


_INSPECT = {kind: value for value, kind in _KINDS.items()}


def _signature(method: Method) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                p.name, _INSPECT[p.kind], default=inspect.Parameter.empty if p.default is None else p.default
            )
            for p in method.parameters
        ]
    )


def _words(name: str, method: Method) -> str:
    if method.kind == "property":
        return f"property {name}"
    return f"{'' if method.kind == 'method' else method.kind + ' '}{name}{_signature(method)}"
