"""The handshake channel without sockets: a dictionary, read when a client asks, answered at a later look."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvconn.nixl.sideclient import HandshakeResult
from kvconn.params import PeerKey

#: (host, port) -> payload by (pp, tp)
Directory = dict[tuple[str, int], dict[tuple[int, int], bytes]]


@contextmanager
def simulated(world: Any, client: Callable[[Any, float], Client] | None = None) -> Iterator[None]:
    """Halves that are made in here use this channel. ``world`` has a ``directory``, a ``clock`` and says whether it is
    ``mute``."""
    make = client or Client
    with (
        patch("kvconn.nixl.contacts.HandshakeClient", lambda timeout, **_: make(world, timeout)),
        patch("kvconn.nixl.scheduler.HandshakeServer", lambda *a: Server(world.directory, *a[:3])),
    ):
        yield


class Server:
    """Publishes payloads in a dictionary."""

    refused = 0

    def __init__(self, directory: Directory, host: str, port: int, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._directory, self._place = directory, (host, port)
        self.replace(payloads)

    def replace(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        self._directory[self._place] = dict(payloads)

    def close(self) -> None:
        """The next engine at this place has published itself already."""


class Client:
    """Answers at a later look, out of the dictionary as it was when it asked. While ``mute``, not at all."""

    def __init__(self, world: Any, timeout: float) -> None:
        self._world, self._timeout = world, timeout
        self._asked: deque[tuple[float, HandshakeResult]] = deque()
        self._silent: set[int] = set()
        self._numbers = itertools.count(1)

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> int:
        found = self._world.directory.get((key.host, key.port), {}).get((pp, tp))
        result = HandshakeResult(key, found, "" if found is not None else "cannot connect", ask=next(self._numbers))
        self._asked.append((self._world.clock() + self._timeout, result))
        return result.ask

    def silence(self) -> None:
        """Who was asked last never answers."""
        deadline, result = self._asked.pop()
        self._asked.append((deadline, replace(result, payload=None, why="no answer in time")))
        self._silent.add(result.ask)

    def results(self) -> list[HandshakeResult]:
        out: list[HandshakeResult] = []
        now, mute = self._world.clock(), self._world.mute
        for deadline, result in list(self._asked):
            if (mute or result.ask in self._silent) and now < deadline:
                continue
            self._silent.discard(result.ask)
            out.append(replace(result, payload=None, why="no answer in time") if mute else result)
            self._asked.remove((deadline, result))
        return out

    def close(self) -> None:
        pass
