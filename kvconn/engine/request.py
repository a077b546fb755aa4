"""A request's life in the reference engine, and what crosses the engine's edge.

Rules
1. A status changes in :mod:`kvconn.engine.scheduler` only.
2. What a driver sends and gets is a frozen Struct; times are ``time.perf_counter`` seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvconn.base import BlockIds, FinishReason, RequestView
from kvconn.engine.blocks import block_hashes

__all__ = ["EngineRequest", "Finished", "FirstToken", "Request", "Status"]


class EngineRequest(msgspec.Struct, frozen=True):
    """What a driver submits."""

    id: str
    prompt_tokens: Sequence[int]
    max_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """A request has its first token."""

    id: str
    t: float


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A request ended. ``error`` says why when ``reason`` is ERROR."""

    id: str
    tokens: tuple[int, ...]
    reason: FinishReason
    t: float
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None


class Status(enum.Enum):
    """WAITING -> (PARKED -> WAITING)* -> RUNNING -> FINISHED; preemption goes back to WAITING."""

    WAITING = "waiting"
    PARKED = "parked for remote KV"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One request. ``n_computed`` tokens of it have KV in ``tables``, one per cache group."""

    def __init__(self, submitted: EngineRequest, block_size: int, n_groups: int = 1) -> None:
        self.id = submitted.id
        self.max_tokens = submitted.max_tokens
        self.params = submitted.kv_transfer_params
        self.tokens: list[int] = list(submitted.prompt_tokens)
        self.n_prompt = len(self.tokens)
        self.n_computed = 0
        #: block ids (:mod:`kvconn.engine.tables`)
        self.tables: list[list[int]] = [[] for _ in range(n_groups)]
        self.status = Status.WAITING
        self.n_cached = 0
        #: tokens of this admission that the connector fills
        self.n_external = 0
        self._block_size = block_size
        self._hashes: list[bytes] = []

    @property
    def blocks(self) -> list[int]:
        """Its blocks in the full group."""
        return self.tables[0]

    def block_ids(self) -> BlockIds:
        """The tables as they are now."""
        return tuple(map(tuple, self.tables))

    @property
    def n_total(self) -> int:
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    def hashes(self) -> list[bytes]:
        """Content hashes of the full blocks of all tokens so far."""
        if (len(self._hashes) + 1) * self._block_size <= len(self.tokens):
            self._hashes = block_hashes(self.tokens, self._block_size, self._hashes)
        return self._hashes

    def view(self) -> RequestView:
        """What a connector may see."""
        return RequestView(
            self.id, self.n_prompt, self.n_total, self.params, lambda: tuple(self.tokens), lambda: tuple(self.hashes())
        )

    def __repr__(self) -> str:
        return f"Request({self.id} {self.status.value} computed={self.n_computed}/{self.n_total})"
