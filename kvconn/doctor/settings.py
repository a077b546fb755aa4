"""A ``kv_transfer_config`` before an engine gets it: every problem, children of a MultiConnector included.

Rules
1. What is checked is what the connectors themselves check: the same parsers, the same Structs.
2. A module that the operator names is imported in a child: it may do anything.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import msgspec

from kvconn.config import (
    KVTransferConfig,
    MultiSettings,
    NixlSettings,
    OffloadSettings,
    parse_extra,
    parse_kv_transfer_config,
)
from kvconn.doctor.children import begin, decoded, explain, run_child, say_result
from kvconn.doctor.findings import Finding, fail, ok, warn
from kvconn.errors import ConfigError
from kvconn.factory import CONNECTORS
from kvconn.trust import load_trust

__all__ = ["ConfigFacts", "Loaded", "child", "gather", "judge"]

LIMIT: Final = 60.0
ROOT: Final = "kv_transfer_config"
SETTINGS: Final[dict[str, type[msgspec.Struct]]] = {
    "NixlConnector": NixlSettings,
    "NixlPullConnector": NixlSettings,
    "OffloadingConnector": OffloadSettings,
}
#: children of children, as deep as anybody would go.
DEEPEST: Final = 8


class Loaded(msgspec.Struct, frozen=True):
    """A class by module path. ``ours``: it is a kvconn connector, for any engine that takes those."""

    path: str
    name: str
    ours: bool = False
    trouble: str = ""


class ConfigFacts(msgspec.Struct, frozen=True):
    """``connectors`` by path; ``problems`` with the path of their key; ``keys``: fingerprints of fleet keys."""

    connectors: dict[str, str]
    roles: tuple[str, ...]
    problems: tuple[str, ...]
    loaded: tuple[Loaded, ...]
    keys: tuple[str, ...] = ()


# --- the machine --------------------------------------------------------------------------------------------------


def gather(raw: str) -> ConfigFacts:
    problems: list[str] = []
    parsed: dict[str, KVTransferConfig] = {}
    keys: dict[str, None] = {}
    _walk(raw, ROOT, problems, parsed, keys, 0)
    loaded = tuple(_load(path, config) for path, config in parsed.items() if config.kv_connector_module_path)
    return ConfigFacts(
        {path: config.kv_connector for path, config in parsed.items()},
        tuple(dict.fromkeys(config.kv_role for config in parsed.values())),
        tuple(problems),
        loaded,
        tuple(keys),
    )


def _walk(
    raw: Any, path: str, problems: list[str], parsed: dict[str, KVTransferConfig], keys: dict[str, None], depth: int
) -> None:
    try:
        config = parsed[path] = parse_kv_transfer_config(raw, path)
        if config.kv_connector_module_path is not None:
            return  # its settings are its own
        if config.kv_connector not in CONNECTORS:
            problems.append(f"{path}.kv_connector: {config.kv_connector!r} is none of {', '.join(CONNECTORS)}")
        elif config.kv_connector in SETTINGS:
            extra = parse_extra(SETTINGS[config.kv_connector], config, path)
            if isinstance(extra, NixlSettings):
                trust = load_trust(extra.kvconn, f"{path}.kv_connector_extra_config.kvconn")
                keys |= {one.fingerprint: None for one in (trust.key.accepted if trust.key is not None else ())}
        else:
            _walk_children(config, path, problems, parsed, keys, depth)
    except ConfigError as err:
        problems += err.problems


def _walk_children(
    config: KVTransferConfig,
    path: str,
    problems: list[str],
    parsed: dict[str, KVTransferConfig],
    keys: dict[str, None],
    depth: int,
) -> None:
    where = f"{path}.kv_connector_extra_config.connectors"
    children = parse_extra(MultiSettings, config, path).connectors
    if not children:
        problems.append(f"{where}: expected at least one connector, got none")
    if depth == DEEPEST:
        problems.append(f"{where}: connectors within connectors more than {DEEPEST} deep")
        return
    for index, raw in enumerate(children):
        policy = raw.get("kv_load_failure_policy", config.kv_load_failure_policy)
        if policy != config.kv_load_failure_policy:
            problems.append(
                f"{where}[{index}].kv_load_failure_policy: expected the engine's one policy, "
                f"{config.kv_load_failure_policy!r}, got {policy!r}"
            )
        _walk(raw, f"{where}[{index}]", problems, parsed, keys, depth + 1)


def _load(path: str, config: KVTransferConfig) -> Loaded:
    ending = run_child(["connector", path, config.kv_connector_module_path or "", config.kv_connector], LIMIT)
    return decoded(ending, Loaded) or Loaded(path, config.kv_connector, trouble=explain(ending))


def child(path: str, module: str, name: str) -> None:
    """In the child: import what the operator named."""
    from kvconn.base import KVConnector

    begin(f"import {module}")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        raise LookupError(f"{module} has no class {name}")
    say_result(Loaded(path, f"{module}.{name}", issubclass(found, KVConnector)))


# --- what it means ------------------------------------------------------------------------------------------------


def judge(facts: ConfigFacts) -> list[Finding]:
    found = [
        fail(problem, "The engine refuses this configuration when it starts.", "correct that key")
        for problem in facts.problems
    ]
    for one in facts.loaded:
        if one.trouble:
            found.append(
                fail(
                    f"{one.path}.kv_connector_module_path: {one.name} cannot be loaded",
                    f"The engine could not either. The child that tried: {one.trouble}",
                    "install the module where the engine runs, or correct module path and class name",
                )
            )
        elif not one.ours:
            found.append(
                warn(
                    f"{one.path}: {one.name} is no connector for kvconn's engine",
                    "Right for an engine that has an interface of its own; not checked any further.",
                    "nothing, if that engine is yours",
                )
            )
    if not facts.problems:
        names = ", ".join(facts.connectors.values())
        keys = "".join(f"; fleet key {one}" for one in facts.keys)
        found.insert(0, ok(f"kv_transfer_config: {names}; {', '.join(facts.roles)}{keys}"))
    return found
