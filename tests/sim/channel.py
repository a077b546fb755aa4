"""The handshake channel without sockets: a dictionary, read when a client asks, answered at a later look."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from kvconn.nixl.peers import PeerKey
from kvconn.nixl.sidechannel import HandshakeResult

#: (host, port) -> payload
Directory = dict[tuple[str, int], bytes]


class Server:
    """Publishes payloads in a dictionary."""

    def __init__(self, directory: Directory, host: str, port: int, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._directory, self._place = directory, (host, port)
        self.replace(payloads)

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._directory[self._place] = payloads[0, 0]

    def close(self) -> None:
        """The next engine at this place has published itself already."""


class Client:
    """Answers at a later look, out of the dictionary as it was when it asked. While ``mute``, not at all."""

    def __init__(self, world: Any, timeout: float) -> None:
        self._world, self._timeout = world, timeout
        self._asked: deque[tuple[float, HandshakeResult]] = deque()

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> None:
        found = self._world.directory.get(key[1:])
        result = HandshakeResult(key, found, "" if found is not None else "cannot connect")
        self._asked.append((self._world.clock() + self._timeout, result))

    def results(self) -> list[HandshakeResult]:
        out: list[HandshakeResult] = []
        now, mute = self._world.clock(), self._world.mute
        for deadline, result in list(self._asked):
            if mute and now < deadline:
                continue
            out.append(HandshakeResult(result.key, None, "no answer in time") if mute else result)
            self._asked.remove((deadline, result))
        return out

    def close(self) -> None:
        pass
