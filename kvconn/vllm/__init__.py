"""Connectors for vLLM, under vLLM's public names: ``"kv_connector_module_path": "kvconn.vllm"``.

Rules
1. Only this package imports vllm, and only when one of its names is asked for: importing ``kvconn.vllm`` loads nothing.
2. Adapters translate and delegate; what is decided is decided in ``kvconn.nixl``, ``kvconn.multi``, ``kvconn.offload``.
3. vLLM gates features on the configured name ``NixlConnector``, and finds a child's metrics by the ``__name__`` of its
   class in a registry. So the exported names are vLLM's; the classes are called ``Kvconn...`` and registered so.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconn.vllm.multi import KvconnMultiConnector, MultiConnector
    from kvconn.vllm.nixl import KvconnNixlConnector, NixlConnector, NixlPullConnector
    from kvconn.vllm.offload import KvconnOffloadingConnector, OffloadingConnector

__all__ = [
    "KvconnMultiConnector",
    "KvconnNixlConnector",
    "KvconnOffloadingConnector",
    "MultiConnector",
    "NixlConnector",
    "NixlPullConnector",
    "OffloadingConnector",
    "register",
]

#: name -> (module, attribute)
_EXPORTS: dict[str, tuple[str, str]] = {
    "KvconnMultiConnector": ("kvconn.vllm.multi", "KvconnMultiConnector"),
    "KvconnNixlConnector": ("kvconn.vllm.nixl", "KvconnNixlConnector"),
    "KvconnOffloadingConnector": ("kvconn.vllm.offload", "KvconnOffloadingConnector"),
    "MultiConnector": ("kvconn.vllm.multi", "KvconnMultiConnector"),
    "NixlConnector": ("kvconn.vllm.nixl", "KvconnNixlConnector"),
    "NixlPullConnector": ("kvconn.vllm.nixl", "KvconnNixlConnector"),
    "OffloadingConnector": ("kvconn.vllm.offload", "KvconnOffloadingConnector"),
}
#: vLLM's names that we do not have, and why.
_ABSENT: dict[str, str] = {
    "NixlPushConnector": "this version reads (pull) and does not write (push); use NixlConnector on both sides",
}


def register() -> None:
    """Make our classes known to vLLM's factory. The ``vllm.general_plugins`` entry point; may be called again."""
    from kvconn.vllm.registry import register_all

    register_all()


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        from kvconn.errors import ConfigError  # not an AttributeError: vLLM would hide what it says

        raise ConfigError(f"kv_transfer_config.kv_connector: {name}: {_ABSENT[name]}")
    where = _EXPORTS.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    value = getattr(importlib.import_module(where[0]), where[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
