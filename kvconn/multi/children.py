"""Children of a MultiConnector, from its configuration.

Rules
1. Problems of all children are collected before one ConfigError is raised, each with the path of its own key.
2. A child inherits the engine id and the load failure policy. It may have an engine id, a module path and settings of
   its own; it may repeat the policy, not contradict it; its role may be ``kv_both`` anywhere, else it may not be the
   opposite of its MultiConnector's.
3. A child that narrows the finished count is refused by name, unless the ``kvconn`` object beside its ``kv_connector``
   has a quorum, of at most as many ranks as there are (C2). The child itself never sees that object.
4. Children that were built are shut down when a sibling could not be.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvconn.base import ConnectorRole, KVCacheView, KVConnector
from kvconn.config import ChildConfig, ConnectorConfig, KVTransferConfig, MultiSettings, parse_child, parse_extra
from kvconn.errors import ConfigError
from kvconn.factory import get_connector_class

__all__ = ["Children", "GetClass", "MakeChild", "build_children", "make_child"]

log = logging.getLogger("kvconn.multi")

ROOT = "kv_transfer_config"
OPPOSITE = {"kv_producer": "kv_consumer", "kv_consumer": "kv_producer"}
GetClass = Callable[[KVTransferConfig, str], type[KVConnector]]
MakeChild = Callable[[type[KVConnector], ConnectorConfig, ConnectorRole, KVCacheView], KVConnector]


@dataclass(frozen=True)
class Children:
    """Display names by index, the children in order, and the quorums of those that have one."""

    names: dict[int, str]
    connectors: list[KVConnector]
    quorum: dict[int, int]


@dataclass(frozen=True)
class _Plan:
    """A child whose entry is in order."""

    path: str
    entry: ChildConfig
    cls: type[KVConnector]


def make_child(
    cls: type[KVConnector], config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView
) -> KVConnector:
    """One child, with the constructor every connector has."""
    return cls(config, role, kv_cache)  # type: ignore[call-arg]  # base.KVConnector documents it


def build_children(
    config: ConnectorConfig,
    role: ConnectorRole,
    kv_cache: KVCacheView,
    make: MakeChild,
    get_class: GetClass = get_connector_class,
) -> Children:
    """Every child that the configuration names; ``get_class`` finds its class. Raises ConfigError."""
    settings = parse_extra(MultiSettings, config.kv_transfer)
    where = f"{ROOT}.kv_connector_extra_config.connectors"
    if not settings.connectors:
        raise ConfigError(f"{where}: expected at least one connector, got none")
    problems: list[str] = []
    plans = [_plan(config, raw, f"{where}[{i}]", problems, get_class) for i, raw in enumerate(settings.connectors)]
    children: list[KVConnector] = []
    try:
        for plan in plans:
            if plan is not None:
                children += _build(config, role, kv_cache, make, plan, problems)
        if problems:
            raise ConfigError(problems)
    except BaseException:
        _shut(children)
        raise
    entries = [plan.entry for plan in plans if plan is not None]
    quorum = {index: entry.kvconn.quorum for index, entry in enumerate(entries) if entry.kvconn.quorum is not None}
    return Children(_names([entry.kv_connector for entry in entries]), children, quorum)


def _plan(
    config: ConnectorConfig, raw: Mapping[str, Any], path: str, problems: list[str], get_class: GetClass
) -> _Plan | None:
    """The entry, checked; None when it has problems, which are added."""
    policy = config.kv_transfer.kv_load_failure_policy
    found: list[str] = []
    plan: _Plan | None = None
    try:
        entry = parse_child({"kv_load_failure_policy": policy, **raw}, path)
    except ConfigError as err:
        problems += [*err.problems, *_unknown(raw, path, get_class)]
        return None
    if entry.kv_load_failure_policy != policy:
        found.append(
            f"{path}.kv_load_failure_policy: expected the engine's one policy, {policy!r}, "
            f"got {entry.kv_load_failure_policy!r}"
        )
    ours = config.kv_transfer.kv_role
    if entry.kv_role == OPPOSITE.get(ours):
        found.append(
            f"{path}.kv_role: expected {ours} or kv_both, as the MultiConnector is {ours}, got {entry.kv_role}"
        )
    quorum, world = entry.kvconn.quorum, config.parallel.world
    if quorum is not None and quorum > world:
        found.append(f"{path}.kvconn.quorum: expected 1..{world}, the engine's workers, got {quorum}")
    try:
        plan = _Plan(path, entry, get_class(entry.kv_transfer, path))
    except ConfigError as err:
        found += err.problems
    problems += found
    return None if found else plan


def _unknown(raw: Mapping[str, Any], path: str, get_class: GetClass) -> Sequence[str]:
    """What is wrong with the name of a child whose other keys are wrong already."""
    name, module = raw.get("kv_connector"), raw.get("kv_connector_module_path")
    if not isinstance(name, str) or not isinstance(module, str | None):
        return ()
    try:
        get_class(KVTransferConfig(name, "kv_both", kv_connector_module_path=module), path)
    except ConfigError as err:
        return err.problems
    return ()


def _build(
    config: ConnectorConfig,
    role: ConnectorRole,
    kv_cache: KVCacheView,
    make: MakeChild,
    plan: _Plan,
    problems: list[str],
) -> list[KVConnector]:
    """The child in a list; nothing when it has problems, which are added."""
    entry, path = plan.entry, plan.path
    own = msgspec.structs.replace(config, kv_transfer=entry.kv_transfer, engine_id=entry.engine_id or config.engine_id)
    try:
        child = make(plan.cls, own, role, kv_cache)
    except ConfigError as err:
        problems += [_rooted(problem, path) for problem in err.problems]
        return []
    count = child.get_finished_count() if role is ConnectorRole.SCHEDULER else None
    if count is not None and entry.kvconn.quorum is None:
        problems.append(
            f"{path}.kv_connector: {entry.kv_connector}.get_finished_count(): expected None (each of the "
            f"{config.parallel.world} workers reports), got {count}; if its silent ranks really serve nobody, "
            f'say how many report, beside kv_connector: "kvconn": {{"quorum": n}}'
        )
    return [child]


def _shut(children: Iterable[KVConnector]) -> None:
    for child in children:
        try:
            child.shutdown()
        except Exception:  # the others must be reached, and the reason why they go is what is raised
            log.exception("%s: shutdown failed", type(child).__name__)


def _rooted(problem: str, path: str) -> str:
    """A child's own problem, which names its keys from its own root, with the path from ours."""
    return path + problem[len(ROOT) :] if problem.startswith(ROOT) else f"{path}: {problem}"


def _names(connectors: Sequence[str]) -> dict[int, str]:
    repeated = {name for name, count in Counter(connectors).items() if count > 1}
    return {i: f"{name}[{i}]" if name in repeated else name for i, name in enumerate(connectors)}
