"""Connectors with a known fault, for chaos to find. Engines name them by module path."""

from __future__ import annotations

from collections.abc import Mapping

from kvconn.base import LayerView
from kvconn.nixl.checks import Verdict
from kvconn.nixl.connector import NixlConnector


class NoFenceNixlConnector(NixlConnector):
    """Reads the fence and takes every answer for good."""

    def register_kv_caches(self, layers: Mapping[str, LayerView]) -> None:
        super().register_kv_caches(layers)
        self.worker._reader._checks.judge = lambda id, word: Verdict.HELD  # type: ignore[method-assign]
