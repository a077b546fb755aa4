"""The side channel in the installed vLLM's own words, so that ours and stock understand each other.

Rules
1. The metadata is an object of the installed vLLM's class, so its fields are that version's; the compatibility hash is
   that version's function. What we add beside them is ignored by a stock peer.
2. The factors in words are ours; they name what differs and are never hashed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NIXL_CONNECTOR_VERSION,
    NixlAgentMetadata,
    compute_nixl_compatibility_hash,
)

from kvconn.config import ConnectorConfig
from kvconn.errors import PeerError
from kvconn.nixl.wire import WIRE_VERSION, AgentMetadata, HandshakePayload, KvconnHandshake, WireCodec

__all__ = ["VllmCodec"]

#: attention backends whose blocks are not made of tokens
LAID_OUT_BY_BLOCK = frozenset({"CPU_ATTN"})


class VllmCodec(WireCodec):
    """The codec of one engine. What it needs of the model's layers is there once they are loaded."""

    def __init__(self, vllm_config: Any) -> None:
        self._vllm = vllm_config
        self._hash: str | None = None

    @property
    def _backend(self) -> str:
        return str(get_current_attn_backends(self._vllm)[0].get_name())

    def factors(self, config: ConnectorConfig) -> dict[str, str]:
        model, cache = self._vllm.model_config, self._vllm.cache_config
        return {
            "vllm version": str(vllm.__version__),
            "nixl connector version": str(NIXL_CONNECTOR_VERSION),
            "kvconn wire version": str(WIRE_VERSION),
            "model": str(model.model),
            "dtype": str(model.dtype),
            "kv heads": str(model.get_total_num_kv_heads()),
            "head size": str(model.get_head_size()),
            "layers": str(model.get_total_num_hidden_layers()),
            "attention backend": self._backend,
            "kv cache dtype": str(cache.cache_dtype),
            "hybrid kv cache manager": str(not self._vllm.scheduler_config.disable_hybrid_kv_cache_manager),
            "speculative decoding": str(getattr(self._vllm.speculative_config, "method", None)),
            "transfer mode": "pull",
        }

    def compatibility_hash(self, factors: Mapping[str, str]) -> str:
        """vLLM's own."""
        if self._hash is None:
            self._hash = str(compute_nixl_compatibility_hash(self._vllm, self._backend, transfer_mode="pull"))
        return self._hash

    def decode_metadata(self, payload: HandshakePayload, peer: str) -> AgentMetadata:
        """Raises PeerError also for blocks of another size where the kernel lays their keys out by the block: there no
        run of tokens is a run of bytes, and what is read as one is wrong."""
        metadata = super().decode_metadata(payload, peer)
        ours = self._vllm.cache_config.block_size
        if self._backend in LAID_OUT_BY_BLOCK and metadata.block_size != ours:
            raise PeerError(
                peer,
                "plan",
                f"block size: ours {ours}, theirs {metadata.block_size} (the {self._backend} kernel lays keys out by "
                "the block; give both engines one --block-size)",
            )
        return metadata

    def encode_payload(self, config: ConnectorConfig, metadata: AgentMetadata) -> bytes:
        ours = msgspec.structs.asdict(metadata)
        layout = self._vllm.cache_config.get_resolved_kv_cache_layout().name
        ours.update(attn_backend_name=self._backend, kv_cache_layout=layout)
        known = {field.name for field in dataclasses.fields(NixlAgentMetadata)}
        theirs = NixlAgentMetadata(**{name: value for name, value in ours.items() if name in known})
        agent = {**msgspec.to_builtins(theirs, builtin_types=(bytes,)), "kvconn": metadata.kvconn}
        factors = self.factors(config)
        return msgspec.msgpack.encode(
            HandshakePayload(
                self.compatibility_hash(factors), msgspec.msgpack.encode(agent), KvconnHandshake(factors=factors)
            )
        )
