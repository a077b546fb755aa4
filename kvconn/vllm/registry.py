"""Our classes in vLLM's registry, which its MultiConnector and its metrics look names up in.

Rules
1. A registered name is the class's ``__name__``; the class itself is imported when vLLM asks for it.
2. Registering again changes nothing: vLLM loads plugins in every process, and an import may have come first.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

__all__ = ["CLASSES", "register_all"]

#: ``__name__`` -> module
CLASSES: dict[str, str] = {
    "KvconnMultiConnector": "kvconn.vllm.multi",
    "KvconnNixlConnector": "kvconn.vllm.nixl",
    "KvconnOffloadingConnector": "kvconn.vllm.offload",
}


def register_all() -> None:
    """Register what is not registered yet."""
    for name, module in CLASSES.items():
        try:
            KVConnectorFactory.register_connector(name, module, name)
        except ValueError:  # it is there already
            continue
