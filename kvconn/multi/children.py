"""Children of a MultiConnector, from its configuration.

Rules
1. Problems of all children are collected before one ConfigError is raised, each with the path of its own key.
2. A child inherits the engine id and the load failure policy; it may repeat them, not contradict the policy.
3. A child that narrows the finished count is refused by name (C2).
4. Children that were built are shut down when a sibling could not be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvconn.base import ConnectorRole, KVCacheView, KVConnector
from kvconn.config import ConnectorConfig, MultiSettings, parse_extra, parse_kv_transfer_config
from kvconn.errors import ConfigError
from kvconn.factory import get_connector_class

__all__ = ["MakeChild", "build_children", "make_child"]

ROOT = "kv_transfer_config"
MakeChild = Callable[[type[KVConnector], ConnectorConfig, ConnectorRole, KVCacheView], KVConnector]


def make_child(
    cls: type[KVConnector], config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView
) -> KVConnector:
    """One child, with the constructor every connector has."""
    return cls(config, role, kv_cache)  # type: ignore[call-arg]  # base.KVConnector documents it


def build_children(
    config: ConnectorConfig, role: ConnectorRole, kv_cache: KVCacheView, make: MakeChild
) -> tuple[dict[int, str], list[KVConnector]]:
    """Display names by index, and the children in order. Raises ConfigError."""
    settings = parse_extra(MultiSettings, config.kv_transfer)
    where = f"{ROOT}.kv_connector_extra_config.connectors"
    if not settings.connectors:
        raise ConfigError(f"{where}: expected at least one connector, got none")
    children: list[KVConnector] = []
    problems: list[str] = []
    for index, raw in enumerate(settings.connectors):
        path = f"{where}[{index}]"
        try:
            children.append(_build(config, role, kv_cache, make, raw, path))
        except ConfigError as err:
            problems += [_rooted(problem, path) for problem in err.problems]
    if problems:
        for child in children:
            child.shutdown()
        raise ConfigError(problems)
    return _names(settings.connectors), children


def _build(
    config: ConnectorConfig,
    role: ConnectorRole,
    kv_cache: KVCacheView,
    make: MakeChild,
    raw: Mapping[str, Any],
    path: str,
) -> KVConnector:
    policy = config.kv_transfer.kv_load_failure_policy
    transfer = parse_kv_transfer_config({"kv_load_failure_policy": policy, **raw}, path)
    if transfer.kv_load_failure_policy != policy:
        raise ConfigError(
            f"{path}.kv_load_failure_policy: expected the engine's one policy, {policy!r}, "
            f"got {transfer.kv_load_failure_policy!r}"
        )
    cls = get_connector_class(transfer, path)
    engine_id = transfer.engine_id or config.engine_id
    child = make(cls, msgspec.structs.replace(config, kv_transfer=transfer, engine_id=engine_id), role, kv_cache)
    count = child.get_finished_count() if role is ConnectorRole.SCHEDULER else None
    if count is not None:
        child.shutdown()
        raise ConfigError(
            f"{path}.kv_connector: {transfer.kv_connector}.get_finished_count(): expected None (each of the "
            f"{config.parallel.world} workers reports), got {count}; such a connector can't be a child yet"
        )
    return child


def _rooted(problem: str, path: str) -> str:
    """A child's own problem, which names its keys from its own root, with the path from ours."""
    if problem.startswith(path):
        return problem
    return path + problem[len(ROOT) :] if problem.startswith(ROOT) else f"{path}: {problem}"


def _names(connectors: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    names = [str(raw["kv_connector"]) for raw in connectors]
    repeated = {name for name, count in Counter(names).items() if count > 1}
    return {i: f"{name}[{i}]" if name in repeated else name for i, name in enumerate(names)}
