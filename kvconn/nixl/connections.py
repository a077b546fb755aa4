"""Connections of the side channel, looked at from below: what ZMQ does not bound is bounded here.

ZMQ bounds how long a frame is, and neither how many frames one message has nor how many connections there are. Its
monitor names the descriptor of each connection that it accepts; the kernel knows the rest.

Rules
1. A descriptor may be another file's by the time we look. It is duplicated first, and the duplicate is used only when
   it is a connection at our port and, later, the same one (inode). So nothing that is not ours is ever shut down.
2. A connection may have sent what its good requests took, one more, and :data:`ROOM`; it is over without a good request
   for ``idle`` seconds. Of more connections than may be, in all or of one address, the longest without one is over.
3. To look takes a descriptor. While the process has none left nothing is known and nothing forgotten: who came or
   is over meanwhile is looked at, or ended, at a later sweep.
4. Who is shut down may come again; ZMQ's clients do so by themselves, an honest one within its deadline.
Time is an argument, in seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from kvconn.config import LIMITS
from kvconn.nixl.gate import neighbourhood
from kvconn.nixl.wire import MAX_REQUEST
from kvconn.trust import numeric

__all__ = ["ROOM", "Connection", "Connections", "most_connections", "seen"]

#: bytes of greetings, keys and heartbeats, and of requests that are none
ROOM: Final = 16 << 10
#: bytes of one good request with its frames, also under CURVE
REQUEST: Final = MAX_REQUEST + 256
#: ``tcpi_bytes_received`` of Linux's ``struct tcp_info``
_RECEIVED: Final = struct.Struct("=128xQ")
#: a ``struct linger``: what is closed is reset, and keeps nothing in the kernel
_AT_ONCE: Final = struct.pack("ii", 1, 0)


class Connection(msgspec.Struct, frozen=True):
    """What the kernel says of one. ``peer``: a number for its address, IPv6 by /64."""

    inode: int
    address: str
    peer: int
    received: int


def seen(fd: int, port: int, end: int | None = None, theirs: bool = False) -> Connection | None:
    """The connection at our port, or at ``theirs``, with this descriptor; None when that is something else by now.
    ``end``: it is shut down if it is the one with this inode; ZMQ sees its end and closes it. Raises OSError when that
    cannot be told now, as with no descriptor left."""
    try:
        copy = os.dup(fd)
    except OSError as err:
        if err.errno != errno.EBADF:
            raise
        return None
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    with found, contextlib.suppress(OSError, IndexError, TypeError):  # over, or of a family with other names
        now = _connection(found, port, theirs)
        if now is not None and now.inode == end:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            found.shutdown(socket.SHUT_RDWR)
        return now
    return None


def _connection(found: socket.socket, port: int, theirs: bool) -> Connection | None:
    local, remote = found.getsockname(), found.getpeername()
    address = numeric(str(remote[0]))
    if found.type is not socket.SOCK_STREAM or (remote if theirs else local)[1] != port or address is None:
        return None
    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    received = _RECEIVED.unpack(info)[0] if len(info) == _RECEIVED.size else 0
    return Connection(os.fstat(found.fileno()).st_ino, str(address), neighbourhood(address), received)


def most_connections() -> int:
    """A quarter of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LIMITS.connections_max if soft == resource.RLIM_INFINITY else max(64, min(LIMITS.connections_max, soft // 4))


class _Open:
    def __init__(self, found: Connection, now: float) -> None:
        self.inode, self.address, self.peer = found.inode, found.address, found.peer
        self.since = now
        self.allowed = ROOM + REQUEST


class Connections:
    """Those at one port. ``most`` in all, half of them of one address."""

    def __init__(
        self,
        port: int,
        most: int | None = None,
        idle: float = LIMITS.connection_idle,
        look: Callable[[int, int, int | None], Connection | None] = seen,
    ) -> None:
        self._port = port
        self._most = most or most_connections()
        self._idle = idle
        self._look = look
        #: by descriptor, the longest without a good request first
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._of_peer: Counter[int] = Counter()
        #: accepted when there was no descriptor to look with
        self._unseen: set[int] = set()
        #: we ended them and ZMQ has not closed them yet
        self._ending: set[int] = set()

    def accepted(self, fd: int, now: float) -> str:
        """A new one. Why another, or this one, had to end for it; "" when there was room."""
        self.ended(fd)
        try:
            found = self._look(fd, self._port, None)
        except OSError:
            self._unseen.add(fd)
            return ""
        if found is None:
            return ""
        self._open[fd] = _Open(found, now)
        self._of_peer[found.peer] += 1
        if self._of_peer[found.peer] > self._most // 2:
            first = next(fd for fd, one in self._open.items() if one.peer == found.peer)
            return self._over(first, f"more than {self._most // 2} connections")
        if len(self._open) > self._most:
            return self._over(next(iter(self._open)), f"more than {self._most} connections, it was silent longest")
        return ""

    def ended(self, fd: int) -> bool:
        """ZMQ closed it. True: for it was over."""
        self._forget(fd)
        over = fd in self._ending
        self._ending.discard(fd)
        return over

    def _forget(self, fd: int) -> None:
        self._unseen.discard(fd)
        one = self._open.pop(fd, None)
        if one is not None:
            self._of_peer[one.peer] -= 1
            if not self._of_peer[one.peer]:
                del self._of_peer[one.peer]

    def asked(self, fd: int, now: float) -> None:
        """A good request came over it."""
        one = self._open.get(fd)
        if one is not None:
            one.since, one.allowed = now, one.allowed + REQUEST
            self._open.move_to_end(fd)

    def sweep(self, now: float) -> list[str]:
        """End what is over; why, each."""
        out = [self.accepted(fd, now) for fd in list(self._unseen)]
        for fd, one in list(self._open.items()):
            try:
                found = self._look(fd, self._port, None)
            except OSError:
                continue
            if found is None or found.inode != one.inode:  # its end was not told
                self._forget(fd)
            elif found.received > one.allowed:
                out.append(self._over(fd, f"{found.received} bytes and no request"))
            elif now - one.since > self._idle:
                out.append(self._over(fd, f"no request for {self._idle:g} s"))
        return [why for why in out if why]

    def _over(self, fd: int, why: str) -> str:
        """Why it ended; "" when it could not be now."""
        one = self._open[fd]
        try:
            self._look(fd, self._port, one.inode)
        except OSError:
            return ""
        self._forget(fd)
        self._ending.add(fd)
        return f"{one.address}: {why}"

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Connections(open={len(self._open)} of {self._most} addresses={len(self._of_peer)})"
