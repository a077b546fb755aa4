"""Names of peers to addresses, on threads of their own: a name that nobody answers delays other names, never addresses.

Rules
1. Asking never waits. What is looked up at once is bounded in number and threads; more is refused at once, and so is
   everything while there is no thread and none can be started.
2. The system's resolver has no deadline. Who asks has one; an answer after it is thrown away, and a thread that hangs
   is left behind at the end (a daemon).
3. Only host names in ASCII and addresses come in: ZMQ's endpoints have a grammar (``tcp://source;destination``), and
   what goes to ZMQ is an address that came out of here.
"""

from __future__ import annotations

import contextlib
import queue
import re
import socket
import threading
from collections.abc import Callable

from kvconn.config import LIMITS

__all__ = ["Names", "endpoint", "look_up", "plain_name"]

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?")
#: addresses of one name that are looked at
MAX_ADDRESSES = 64
LookUp = Callable[[str], list[str]]


def plain_name(host: str) -> bool:
    """A host name, and no grammar of anybody's."""
    return _NAME.fullmatch(host) is not None


def endpoint(address: str, port: int) -> str:
    """ZMQ's name of a numeric address."""
    address = address.strip("[]")
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def look_up(name: str) -> list[str]:
    """Its addresses, IPv4 first. Raises OSError."""
    try:
        rows = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError as err:  # a label that IDNA cannot encode
        raise OSError(str(err)) from None
    found = (str(row[4][0]) for row in sorted(rows, key=lambda row: row[0] != socket.AF_INET))
    return list(dict.fromkeys(found))[:MAX_ADDRESSES]


class Names:
    """``answer(name, addresses, why)`` is called on a thread of this object; no addresses when there are none."""

    def __init__(
        self,
        answer: Callable[[str, list[str], str], None],
        look_up: LookUp = look_up,
        threads: int = LIMITS.name_threads,
        waiting: int = LIMITS.names_max,
    ) -> None:
        self._answer = answer
        self._look_up = look_up
        self._most = threads
        self._queue: queue.Queue[str | None] = queue.Queue(waiting)
        self._threads: list[threading.Thread] = []
        self._closed = False

    def ask(self, name: str) -> bool:
        """Look it up. False when too many names wait, or no thread can be started."""
        if len(self._threads) < self._most:
            self._add_thread()
        if not self._threads:
            return False
        try:
            self._queue.put_nowait(name)
        except queue.Full:
            return False
        return True

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="kvconn-names", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (name := self._queue.get()) is not None and not self._closed:
            try:
                addresses, why = self._look_up(name), ""
            except OSError as err:
                addresses, why = [], str(err)
            if not self._closed:
                self._answer(name, addresses, why)

    def close(self) -> None:
        """Look nothing up any more; threads end when their look-up does. Idempotent."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put_nowait(None)

    def __repr__(self) -> str:
        return f"Names(waiting={self._queue.qsize()} threads={len(self._threads)})"
