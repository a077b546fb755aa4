"""A NIXL agent whose reads never end and move no bytes: what is left is the connector's own work.

It stands where both connectors make their agent, below ours (``NixlTransport``) and below stock's alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

__all__ = ["StillAgent", "still_agents"]


class _Native:
    """What our transport sees die when it closes."""


class _Handle:
    def release(self) -> None:
        pass


class StillAgent:
    """The part of ``nixl._api.nixl_agent`` that ours and stock call. Notifications arrive, reads do not."""

    by_name: ClassVar[dict[str, StillAgent]] = {}
    newest: ClassVar[StillAgent]
    #: reads posted by all of them
    posted = 0

    def __init__(self, name: str, config: Any = None) -> None:
        self.name = name
        self.backends = {"UCX": 1}
        self.agent: _Native | None = _Native()
        self.notifications: dict[str, list[bytes]] = {}
        StillAgent.by_name[name] = StillAgent.newest = self

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def check_remote_metadata(self, name: str, *_: Any) -> bool:
        return True

    def register_memory(self, descs: Any, *_: Any, **__: Any) -> Any:
        return descs

    def get_reg_descs(self, descs: Any, *_: Any) -> Any:
        return descs

    get_xfer_descs = get_reg_descs

    def initialize_xfer(self, *_: Any, **__: Any) -> _Handle:
        return _Handle()

    def prep_xfer_dlist(self, *_: Any, **__: Any) -> _Handle:
        return _Handle()

    make_prepped_xfer = prep_xfer_dlist

    def transfer(self, handle: _Handle, *_: Any) -> str:
        StillAgent.posted += 1
        return "PROC"

    def check_xfer_state(self, handle: _Handle) -> str:
        return "PROC"

    def get_new_notifs(self, *_: Any) -> dict[str, list[bytes]]:
        news, self.notifications = self.notifications, {}
        return news

    def send_notif(self, agent_name: Any, notif_msg: bytes = b"", *_: Any) -> None:
        name = agent_name.decode() if isinstance(agent_name, bytes) else agent_name
        StillAgent.by_name[name].notifications.setdefault(self.name, []).append(notif_msg)

    def release_xfer_handle(self, *_: Any) -> None:
        pass

    release_dlist_handle = remove_remote_agent = deregister_memory = release_xfer_handle


@contextmanager
def still_agents() -> Iterator[None]:
    """Agents made in here are still ones."""
    import nixl._api
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    with patch.object(nixl._api, "nixl_agent", StillAgent), patch.object(base_worker, "NixlWrapper", StillAgent):
        yield
