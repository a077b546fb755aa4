"""Every table of a connector half, found by walking it, so that a new one is watched from its first day.

Rules
1. A table is any dict, list, set or deque that an object of kvconn holds, however deep. Frozen Structs are values and
   are not entered.
2. What may hold something in an idle engine stands in :data:`KEPT`, with the reason. All else is empty there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec

from kvconn.testing import LoopbackNet

#: (class, attribute) -> why it may hold something although nothing is going on
KEPT = {
    ("Numbers", "_back"): "slots and scratch words: checked to be all there, with those that cool",
    ("FenceSlots", "_cooling"): "slots of the last step",
    ("FenceSlots", "_closed"): "slots of this step",
    ("NixlWorker", "_seen"): "the newest life of each direction: two numbers",
    ("Peers", "_peers"): "known peers stay until engine_ttl; checked to be idle",
    ("LoopbackTransport", "_links"): "connections to known peers",
    ("LoopbackTransport", "_regions"): "registered memory",
    ("NixlScheduler", "_published"): "what the side channel serves, a payload per serving rank",
    ("ClaimTable", "_done"): "bounded memory of ids, for bare children",
    ("KVOutputAggregator", "_sent"): "bounded memory of ids, for bare connectors",
    ("KVOutputAggregator", "_received"): "bounded memory of ids whose words may come again",
    ("MultiConnector", "names"): "configuration",
    ("MultiConnector", "children"): "configuration",
    ("MultiConnector", "_hooked"): "configuration",
}
TABLES = (dict, list, set, deque)


def tables(root: object) -> Iterator[tuple[str, str, Any]]:
    """(path, ``Class.attribute``, table) of every table below ``root``."""
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _attributes(one):
            where = f"{path}.{name}"
            if isinstance(value, Counter):
                continue
            if isinstance(value, TABLES):
                yield where, f"{type(one).__name__}.{name}", value
                todo += [(f"{where}[{i}]", item) for i, item in enumerate(_items(value)) if _ours(item)]
            elif _ours(value):
                todo.append((where, value))


def left_over(root: object) -> list[str]:
    """One line per table below ``root`` that holds something and may not."""
    kept = {f"{cls}.{name}" for cls, name in KEPT}
    return [f"{path}: {_few(table)}" for path, name, table in tables(root) if name not in kept and _holds(table)]


def _holds(table: Any) -> bool:
    """A dict of empty tables holds nothing."""
    return bool(table) and not (
        isinstance(table, dict) and all(isinstance(v, TABLES) and not v for v in table.values())
    )


def _attributes(one: object) -> list[tuple[str, Any]]:
    names = list(getattr(one, "__dict__", ()))
    for cls in type(one).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [(name, getattr(one, name)) for name in names if hasattr(one, name)]


def _items(table: Any) -> list[object]:
    return list(table.values()) if isinstance(table, dict) else list(table)


def _ours(value: object) -> bool:
    kind = type(value)
    return kind.__module__.startswith("kvconn.") and not isinstance(value, msgspec.Struct | type | LoopbackNet)


def _few(table: Any) -> str:
    text = repr(table)
    return text if len(text) <= 200 else f"{text[:200]}..."
