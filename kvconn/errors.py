"""Errors say whose fault it is, what was expected, what came, and what to do.

Rules
1. The type says whose fault: ``ConfigError`` (the operator), ``RequestError`` (a client's parameters),
   ``PeerError`` (the other engine), ``TransportError`` (the wire below us), ``ContractError`` (a connector
   broke the completion contract), ``EngineDeadError`` (a worker process of ours is gone).
2. Nothing that came from outside may raise anything else past the module that parsed it (C9).
3. Foreign exceptions (msgspec, zmq, nixl) are mapped where they are caught, never passed on.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ConfigError",
    "ContractError",
    "EngineDeadError",
    "KvconnError",
    "PeerError",
    "RequestError",
    "TransportError",
]


class KvconnError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(KvconnError):
    """The operator's configuration cannot work.

    ``problems`` lists every problem found, each with the path of its key, so that one start shows them all.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        head = "configuration error" if len(self.problems) == 1 else f"{len(self.problems)} configuration errors"
        super().__init__(f"{head}: " + "; ".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)


class RequestError(KvconnError):
    """A client's ``kv_transfer_params`` are wrong. Fails that request and nothing else.

    ``field`` is the path of the offending key.
    """

    def __init__(self, field: str, expected: str, got: object) -> None:
        self.field = field
        super().__init__(f"{field}: expected {expected}, got {_short(got)}")


class PeerError(KvconnError):
    """Another engine answered wrongly, late or not at all. ``peer`` and ``stage`` say who and where."""

    def __init__(self, peer: str, stage: str, what: str) -> None:
        self.peer = peer
        self.stage = stage
        super().__init__(f"peer {peer}, {stage}: {what[:2000]}")  # a peer's own words may be in it, of any length


class TransportError(KvconnError):
    """The transport below us refused an operation.

    ``handle``: what may be under way all the same (F4); the memory it names is not quiet until the handle is.
    """

    def __init__(self, what: str, handle: int | None = None) -> None:
        self.handle = handle
        super().__init__(what)


class ContractError(KvconnError):
    """A connector broke the completion contract (docs/design.md, C1 to C13)."""


class EngineDeadError(KvconnError):
    """A process of our own engine is gone or silent past its deadline."""


def _short(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a client's object may have any repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
