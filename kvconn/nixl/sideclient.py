"""The handshake channel, client's side: one client per worker.

Rules
1. The client asks all peers at once from one thread; a peer that does not answer costs its own deadline only, and so
   does a name that nobody resolves (C7). It connects to addresses only, and only to those in ``kvconn.allow``.
2. A name's addresses are tried together, the first few of them, on one socket and within one deadline. The request goes
   to the first that gets through its handshake; if that one hangs up unheard, to whoever else is there, and to whoever
   comes after (:class:`Hearers`).
3. Results cross to the step thread in a queue; sockets never leave their thread.
4. With a fleet key it speaks CURVE and nothing else: there is no way down. Of several keys the next is tried where one
   does not fit, in turns until the deadline: a fleet that changes its key is of two minds for a while.
5. Deadlines are of time in which this thread could run: that our process stood still is no peer's fault.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import zmq

from kvconn.config import LIMITS
from kvconn.nixl.connections import ROOM, seen
from kvconn.nixl.curve import CONNECTIONS, FAILURES, THROUGH, Curve, Turns, noted, refusal
from kvconn.nixl.names import LookUp, Names, endpoint, look_up, plain_name
from kvconn.nixl.wire import MAX_FRAME, encode_request, parse_timestamp
from kvconn.params import PeerKey
from kvconn.transport import blame
from kvconn.trust import Trust, numeric

__all__ = ["HandshakeClient", "HandshakeResult", "Hearers"]

#: peers asked at once; each is three sockets (its monitor is two), and requests name as many peers as they like
MAX_PENDING = 128
#: milliseconds between two tries to connect grow to this
_RECONNECT_MS = 1000
#: bytes of one, with CURVE's; and milliseconds between two looks at how many have come
MAX_ANSWER = MAX_FRAME + ROOM
_WEIGH_MS = 100
#: milliseconds between two looks at whose turn it is, where somebody's is about to be
_REST_MS = 10
#: seconds by which a round may be late; when it is later than that, this process stood still
_LATE = 0.5
#: addresses of one name that are tried
MAX_TRIED = 8


@dataclass(frozen=True)
class HandshakeResult:
    """A peer's answer, or why there is none. ``ask``: the number that :meth:`HandshakeClient.start` gave."""

    key: PeerKey
    payload: bytes | None
    why: str = ""
    #: their perf_counter minus ours, in seconds, when both are known.
    clock_offset: float | None = None
    ask: int = 0


@dataclass
class _Ask:
    number: int
    key: PeerKey
    pp: int
    tp: int
    #: set when it is begun, and when it is sent
    deadline: float = 0.0
    sent: float = 0.0
    #: where to, once that is known
    addresses: list[str] = field(default_factory=list)
    hint: str = ""
    #: how many addresses are tried, and those of them that will not have us
    tried: int = 0
    final: set[bytes] = field(default_factory=set)


class Hearers:
    """Who is there to hear one request, as its socket's monitor tells it; when to send it again, and how often. Pure.

    ZMQ says that a connection went before its socket knows: what is sent in between goes to nobody, and nothing says
    so. Therefore a hang-up is answered twice, at once for the sake of others that are there, and once more when
    somebody gets through after it. A socket sends to its connections in turn: as many times as there are connections,
    the one that went included, leaves out none.
    """

    def __init__(self) -> None:
        self._there: set[bytes] = set()
        self._hung_up = False

    @property
    def times(self) -> int:
        """To send it, for somebody to hear it."""
        return len(self._there) + 1 if self._hung_up else 1

    def through(self, where: bytes) -> bool:
        """A connection to that endpoint got through its handshake; True: send it again."""
        self._there.add(where)
        return self._hung_up

    def went(self, where: bytes) -> bool:
        """One ended. True: it may have been the one that was asked; send it again."""
        if where not in self._there:
            return False
        self._there.discard(where)
        self._hung_up = True
        return True


class _Line:
    """One peer being asked: a socket, and a monitor that says why it cannot be."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ask: _Ask) -> None:
        self.ask = ask
        #: descriptors of its connections
        self.open: set[int] = set()
        self.hearers = Hearers()
        #: by endpoint: whose turn it is there
        self._turns: dict[str, Turns] = {}
        self.socket = context.socket(zmq.DEALER)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an address that may never be there
            self.monitor = self.socket.get_monitor_socket(FAILURES | THROUGH | CONNECTIONS)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def connect(self, addresses: Sequence[str], curves: Sequence[Curve]) -> None:
        """With the first key, where there are keys. Raises ZMQError."""
        self.ask.tried = len(addresses)
        for address in addresses:
            where = endpoint(address, self.ask.key[2])
            if curves:
                turns = self._turns[where] = Turns(curves)
                self._connect(where, turns.begins(0.0))
            else:
                self._connect(where, None)

    def _connect(self, where: str, curve: Curve | None) -> None:
        if curve is not None:
            curve.ask(self.socket)
        self.socket.setsockopt(zmq.IPV6, int("[" in where))
        self.socket.connect(where)

    def failed(self, where: bytes, now: float) -> None:
        """A connection there did not get through its handshake: if it is the one of now, another key's turn comes."""
        turns = self._turns.get(where.decode())
        if turns is not None and turns.failed(now):
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(where.decode())

    def take_turns(self, now: float) -> None:
        """Connect with the keys whose turn it is."""
        for where, turns in self._turns.items():
            curve = turns.begins(now)
            if curve is None:
                continue
            try:
                self._connect(where, curve)
            except zmq.ZMQError:
                turns.failed(now)

    @property
    def resting(self) -> bool:
        """Somewhere a turn is about to begin."""
        return any(turns.resting for turns in self._turns.values())

    def send(self) -> bool:
        """To whoever is there by now; False: nobody."""
        try:
            for _ in range(self.hearers.times):
                self.socket.send_multipart([b"", encode_request(self.ask.pp, self.ask.tp)], zmq.NOBLOCK)
        except zmq.ZMQError:  # gone again; the monitor says why
            return False
        return True

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


class _Bell:
    """Wakes the client's thread, from any thread, also after the end."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def ring(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def heard(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class HandshakeClient:
    """Asks peers for their metadata in the background. ``start`` and ``results`` are called by the step thread.

    Raises TransportError where the system gives no thread or descriptor for it.
    """

    def __init__(
        self,
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
        trust: Trust | None = None,
        look_up: LookUp = look_up,
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._trust = trust or Trust()
        self._curves = [Curve.of(key) for key in self._trust.key.accepted] if self._trust.key is not None else []
        self._numbers = itertools.count(1)
        self._asks: deque[_Ask] = deque()
        self._results: deque[HandshakeResult] = deque()
        self._lines: dict[int | zmq.Socket[bytes], _Line] = {}
        self._pending = 0
        #: when deadlines were last judged
        self._judged = clock()
        #: asks whose name is being looked up, and look-ups that ended
        self._naming: dict[str, list[_Ask]] = {}
        self._named: deque[tuple[str, list[str], str]] = deque()
        self._names = Names(self._name_found, look_up)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvconn-handshakes", daemon=True)
        with contextlib.ExitStack() as undo:
            undo.callback(self._context.term)
            try:
                self._bell = _Bell()
                undo.callback(self._bell.close)
                self._thread.start()
            except (OSError, RuntimeError) as err:
                raise blame.without("the side channel's client", err) from err
            undo.pop_all()

    def start(self, key: PeerKey, pp: int = 0, tp: int = 0) -> int:
        """Ask the peer at ``key`` for the payload of its (pp, tp) worker; the number that its one result will have."""
        ask = _Ask(next(self._numbers), key, pp, tp)
        if len(self._asks) >= LIMITS.peers_max:
            self._fail(ask, f"{LIMITS.peers_max} handshakes wait already")
            return ask.number
        self._asks.append(ask)
        self._bell.ring()
        return ask.number

    def results(self) -> list[HandshakeResult]:
        """Answers and failures since the last call."""
        out: list[HandshakeResult] = []
        while self._results:
            out.append(self._results.popleft())
        return out

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                wait = self._wait_ms()
                for source, events in poller.poll(wait):
                    line = self._lines.get(source)
                    if line is None:  # the bell, or a line that this round has ended
                        self._bell.heard()
                    elif source is not line.socket:
                        self._told(poller, line)
                    elif events & zmq.POLLIN:
                        self._receive(poller, line)
                    else:
                        self._send(poller, line)
                self._weigh(poller)
                self._expire(poller, wait / 1000)
                for line in set(self._lines.values()):
                    line.take_turns(self._clock())
                while self._named:
                    self._take_names(*self._named.popleft())
                while self._asks and self._pending < MAX_PENDING:
                    self._begin(poller, self._asks.popleft())
        finally:  # an open socket would hang close()
            for line in set(self._lines.values()):
                line.close()

    def _wait_ms(self) -> int:
        first = min((ask.deadline for ask in self._under_way()), default=None)
        if first is None:
            return 1000
        longest = _WEIGH_MS if self._lines else 1000
        if any(line.resting for line in self._lines.values()):
            longest = _REST_MS
        return max(1, min(longest, int((first - self._clock()) * 1000) + 1))

    def _under_way(self) -> Iterator[_Ask]:
        yield from (line.ask for line in set(self._lines.values()))
        for asks in self._naming.values():
            yield from asks

    def _fail(self, ask: _Ask, why: str) -> None:
        self._results.append(HandshakeResult(ask.key, None, why, ask=ask.number))

    def _begin(self, poller: zmq.Poller, ask: _Ask) -> None:
        """Where is it, and may it be there? Then ask, or look its name up first."""
        ask.deadline = ask.deadline or self._clock() + self._timeout
        host = ask.key[1]
        if not ask.addresses and numeric(host) is None:
            self._look_up(ask, host)
            return
        known = [where for text in ask.addresses or [host] if (where := numeric(text)) is not None]
        allowed = [where for where in known if self._trust.allows(where)]
        if allowed:
            self._ask(poller, ask, [str(one) for one in allowed[:MAX_TRIED]])
        else:
            self._fail(ask, f"{' and '.join(map(str, known[:4]))} is not in kvconn.allow")

    def _look_up(self, ask: _Ask, name: str) -> None:
        if not plain_name(name):
            self._fail(ask, f"cannot connect: not a host name or address: {name!r}")
        elif name in self._naming and len(self._naming[name]) < LIMITS.names_max:
            self._naming[name].append(ask)
        elif name not in self._naming and self._names.ask(name):
            self._naming[name] = [ask]
        else:
            self._fail(ask, f"too many names are being looked up to look up {name!r} as well, or no thread is left")

    def _name_found(self, name: str, addresses: list[str], why: str) -> None:
        """On a thread of ``Names``."""
        self._named.append((name, addresses, why))
        self._bell.ring()

    def _take_names(self, name: str, addresses: list[str], why: str) -> None:
        for ask in self._naming.pop(name, ()):
            ask.addresses = addresses
            if addresses:
                self._asks.appendleft(ask)
            else:
                self._fail(ask, f"cannot connect: the name {name!r} leads to no address: {why}")

    def _ask(self, poller: zmq.Poller, ask: _Ask, addresses: Sequence[str]) -> None:
        try:
            line = _Line(self._context, ask)
        except zmq.ZMQError as err:
            self._fail(ask, f"no socket: {err}")
            return
        try:
            line.connect(addresses, self._curves)
        except zmq.ZMQError as err:
            line.close()
            self._fail(ask, f"cannot connect: {err}")
            return
        self._pending += 1
        self._lines[line.socket] = self._lines[line.monitor] = line
        poller.register(line.socket, zmq.POLLIN | zmq.POLLOUT)
        poller.register(line.monitor, zmq.POLLIN)

    def _send(self, poller: zmq.Poller, line: _Line) -> None:
        line.ask.sent = self._clock()
        if line.send():
            poller.modify(line.socket, zmq.POLLIN)

    def _receive(self, poller: zmq.Poller, line: _Line) -> None:
        try:
            frames = line.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._finish(poller, line)
        ask, now = line.ask, self._clock()
        if len(frames) != 3 or frames[0] != b"":
            self._fail(ask, f"expected 3 frames, got {len(frames)}")
            return
        theirs = parse_timestamp(frames[2])
        offset = None if theirs is None else theirs - (ask.sent + now) / 2
        self._results.append(HandshakeResult(ask.key, frames[1], "", offset, ask.number))

    def _told(self, poller: zmq.Poller, line: _Line) -> None:
        """What its monitor says: connections that came and went, or why there is none."""
        ask = line.ask
        try:
            message = line.monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        told = noted(message)
        if told.came is not None:
            line.open.add(told.came)
        elif told.went is not None:
            line.open.discard(told.went)
        hearers = line.hearers
        if (told.through and hearers.through(told.where)) or (told.went is not None and hearers.went(told.where)):
            poller.modify(line.socket, zmq.POLLIN | zmq.POLLOUT)
        found = refusal(message, bool(self._curves))
        if found is None:
            return
        ask.hint = found.why
        if found.final:
            ask.final.add(found.where)
        else:
            line.failed(found.where, self._clock())
        if len(ask.final) >= ask.tried:
            self._finish(poller, line)
            self._fail(ask, found.why)

    def _weigh(self, poller: zmq.Poller) -> None:
        """An answer of more bytes than any is: ZMQ bounds its frames, and not how many there are."""
        for line in set(self._lines.values()):
            for fd in line.open:
                try:
                    found = seen(fd, line.ask.key[2], theirs=True)
                except OSError:  # no descriptor left to look with: at the next look
                    continue
                if found is not None and found.received > MAX_ANSWER:
                    self._finish(poller, line)
                    self._fail(
                        line.ask, f"an answer of {found.received} bytes and no end, at most {MAX_ANSWER} are read"
                    )
                    break

    def _expire(self, poller: zmq.Poller, waited: float) -> None:
        """Who has not answered in time. ``waited``: so long this round had nothing to do, at most."""
        now = self._clock()
        late, self._judged = now - self._judged - waited, now
        if late > _LATE:
            for ask in self._under_way():
                ask.deadline += late
        for line in {line for line in self._lines.values() if line.ask.deadline <= now}:
            self._finish(poller, line)
            hint = f"; {line.ask.hint}" if line.ask.hint else ""
            many = f" from any of {line.ask.tried} addresses" if line.ask.tried > 1 else ""
            self._fail(line.ask, f"no answer within {self._timeout:g} s{many}{hint}")
        for name, asks in self._naming.items():  # the name stays until its look-up ends: it is asked for once
            for ask in [ask for ask in asks if ask.deadline <= now]:
                asks.remove(ask)
                self._fail(ask, f"the name {name!r} was not resolved within {self._timeout:g} s")

    def _finish(self, poller: zmq.Poller, line: _Line) -> None:
        for source in (line.socket, line.monitor):
            poller.unregister(source)
            del self._lines[source]
        line.close()
        self._pending -= 1

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread, close every socket. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._names.close()
        self._bell.ring()
        self._thread.join(LIMITS.end_thread)
        if not self._thread.is_alive():
            self._bell.close()
            self._context.term()

    def __repr__(self) -> str:
        state = "closed" if self._stop.is_set() else "running"
        return f"HandshakeClient({state} pending={self._pending} naming={len(self._naming)})"
