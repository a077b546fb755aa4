"""KV-cache connectors for disaggregated LLM serving.

A prefill engine computes a prompt's KV blocks, a decode engine reads them over NIXL, and the prefill engine frees them
when nobody needs them any more: every worker reports each delayed release exactly once, and completion is counted by
identity (docs/design.md, C1 to C13).

The names below are fetched when first used. ``import kvconn`` loads no other module of this package and nothing that
is not in the standard library, so that an engine may import it in processes that never move a byte.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconn.aggregator import KVOutputAggregator
    from kvconn.base import (
        ConnectorMetadata,
        ConnectorRole,
        Fact,
        FinishReason,
        GroupView,
        HandshakeMetadata,
        KVBlocks,
        KVCacheView,
        KVConnector,
        KVConnectorOutput,
        LayerView,
        RequestView,
        StepRequest,
        StepView,
        TransferResults,
        WorkerFacts,
    )
    from kvconn.config import (
        ConnectorConfig,
        KVTransferConfig,
        ModelView,
        ParallelConfig,
        parse_extra,
        parse_kv_transfer_config,
    )
    from kvconn.errors import (
        ConfigError,
        ContractError,
        EngineDeadError,
        KvconnError,
        PeerError,
        RequestError,
        TransportError,
    )
    from kvconn.factory import get_connector_class
    from kvconn.geometry import RankRole
    from kvconn.ledger import CompletionGate, CompletionLedger
    from kvconn.multi.connector import MultiConnector
    from kvconn.nixl.connector import NixlConnector
    from kvconn.offload.connector import OffloadingConnector

__version__ = "0.1.0.dev0"

__all__ = [
    "CompletionGate",
    "CompletionLedger",
    "ConfigError",
    "ConnectorConfig",
    "ConnectorMetadata",
    "ConnectorRole",
    "ContractError",
    "EngineDeadError",
    "Fact",
    "FinishReason",
    "GroupView",
    "HandshakeMetadata",
    "KVBlocks",
    "KVCacheView",
    "KVConnector",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "KVTransferConfig",
    "KvconnError",
    "LayerView",
    "ModelView",
    "MultiConnector",
    "NixlConnector",
    "OffloadingConnector",
    "ParallelConfig",
    "PeerError",
    "RankRole",
    "RequestError",
    "RequestView",
    "StepRequest",
    "StepView",
    "TransferResults",
    "TransportError",
    "WorkerFacts",
    "__version__",
    "get_connector_class",
    "parse_extra",
    "parse_kv_transfer_config",
]

#: public name -> the module it lives in.
_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        "kvconn.aggregator": ("KVOutputAggregator",),
        "kvconn.base": (
            "ConnectorMetadata",
            "ConnectorRole",
            "Fact",
            "FinishReason",
            "GroupView",
            "HandshakeMetadata",
            "KVBlocks",
            "KVCacheView",
            "KVConnector",
            "KVConnectorOutput",
            "LayerView",
            "RequestView",
            "StepRequest",
            "StepView",
            "TransferResults",
            "WorkerFacts",
        ),
        "kvconn.config": (
            "ConnectorConfig",
            "KVTransferConfig",
            "ModelView",
            "ParallelConfig",
            "parse_extra",
            "parse_kv_transfer_config",
        ),
        "kvconn.errors": (
            "ConfigError",
            "ContractError",
            "EngineDeadError",
            "KvconnError",
            "PeerError",
            "RequestError",
            "TransportError",
        ),
        "kvconn.factory": ("get_connector_class",),
        "kvconn.geometry": ("RankRole",),
        "kvconn.ledger": (
            "CompletionGate",
            "CompletionLedger",
        ),
        "kvconn.multi.connector": ("MultiConnector",),
        "kvconn.nixl.connector": ("NixlConnector",),
        "kvconn.offload.connector": ("OffloadingConnector",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
