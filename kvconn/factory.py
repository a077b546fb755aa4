"""``kv_connector`` and ``kv_connector_module_path`` to a class, imported when asked.

Rules
1. This module knows names as strings only; naming a connector imports it, importing this module imports nothing.
2. Every problem is a ConfigError that says which key named the thing and what is known.
"""

from __future__ import annotations

import difflib
import importlib

from kvconn.base import KVConnector
from kvconn.config import KVTransferConfig
from kvconn.errors import ConfigError

__all__ = ["CONNECTORS", "get_connector_class"]

#: the library's own connectors by public name.
CONNECTORS: dict[str, tuple[str, str]] = {
    "NixlConnector": ("kvconn.nixl.connector", "NixlConnector"),
    "NixlPullConnector": ("kvconn.nixl.connector", "NixlConnector"),
    "MultiConnector": ("kvconn.multi.connector", "MultiConnector"),
    "OffloadingConnector": ("kvconn.offload.connector", "OffloadingConnector"),
}


def get_connector_class(config: KVTransferConfig, path: str = "kv_transfer_config") -> type[KVConnector]:
    """The class a ``kv_transfer_config`` names. Raises ConfigError."""
    name, module = config.kv_connector, config.kv_connector_module_path
    if module is None:
        if name not in CONNECTORS:
            close = difflib.get_close_matches(name, CONNECTORS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(f"{path}.kv_connector: {name!r} is none of {', '.join(CONNECTORS)}{hint}")
        module, name = CONNECTORS[name]
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as err:  # somebody else's module may raise anything while it is imported
        why = str(err) if isinstance(err, ImportError) else f"{type(err).__name__}: {err}"
        raise ConfigError(f"{path}.kv_connector_module_path: cannot import {module!r}: {why}") from err
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ConfigError(f"{path}.kv_connector: {module}.{name} is not a KVConnector class")
    return found
