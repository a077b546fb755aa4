"""The ``kv_transfer_config`` of P and D, as an operator would write them. Strings and numbers only.

Rules
1. P is ``MultiConnector[NixlConnector, OffloadingConnector]``, D the other way round: what D has itself need not be
   read from P. With ``off`` there is no sibling, and ``hold`` has one on P alone, the composition that stalled.
2. ``tiering`` gives host memory to as many blocks as P's own pool has, so that files have something to bring.
3. ``kvconn.testing`` is named and never imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from kvconn.cli.verdict import Contract

__all__ = ["OFFLOAD_BYTES", "Offload", "decode_connectors", "loads", "offloading", "prefill_connectors"]

Offload = Literal["host", "tiering", "hold", "off"]
#: host memory of a rank, and files of a rank
OFFLOAD_BYTES = 64 << 20
FILE_BYTES = 1 << 30


def loads(offload: Offload) -> bool:
    """The sibling brings blocks back, on both engines."""
    return offload in ("host", "tiering")


def offloading(offload: Offload, host_bytes: int, root: Path | None) -> dict[str, Any] | None:
    """The sibling, or None. ``root``: a directory that exists by the time engines start, for ``tiering``."""
    settings: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    if offload == "off":
        return None
    if offload == "hold":
        settings["kvconn"] = {"hold": True}
    if offload == "tiering":
        settings["spec_name"] = "TieringOffloadingSpec"
        settings["secondary_tiers"] = [{"type": "fs", "root_dir": str(root), "max_bytes": FILE_BYTES}]
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def prefill_connectors(contract: Contract, offload: Offload, sibling: dict[str, Any] | None) -> dict[str, Any]:
    """P's."""
    nixl: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    if contract == "hidden-ranks":
        nixl |= {"kv_connector": "HiddenRanksNixlConnector", "kv_connector_module_path": "kvconn.testing.contract"}
    return _with(nixl, [nixl] if sibling is None else [nixl, sibling], offload)


def decode_connectors(offload: Offload, sibling: dict[str, Any] | None) -> dict[str, Any]:
    """D's."""
    nixl: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    return _with(nixl, [nixl] if sibling is None or not loads(offload) else [sibling, nixl], offload)


def _with(nixl: dict[str, Any], children: list[dict[str, Any]], offload: Offload) -> dict[str, Any]:
    """One child alone, or several below a MultiConnector. A block that left a tier is no reason to fail a request."""
    if len(children) == 1:
        return nixl
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": nixl["kv_role"],
        "kv_connector_extra_config": {"connectors": children},
    }
    return multi | ({"kv_load_failure_policy": "recompute"} if loads(offload) else {})
