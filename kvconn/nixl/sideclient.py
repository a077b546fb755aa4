"""The handshake channel, client's side: one client per worker.

Rules
1. The client asks all peers at once from one thread; a peer that does not answer costs its own deadline only, and so
   does a name that nobody resolves (C7). It connects to addresses only, and only to those in ``kvconn.allow``.
2. A name's addresses are tried together, the first few of them, on one socket and within one deadline. The request goes
   to the first that gets through its handshake, and again, to them in turn, after one hung up, and every few seconds:
   what is sent to a connection that ends goes to nobody, and nothing says so. Asking twice does no harm.
3. Results cross to the step thread in a queue; sockets never leave their thread.
4. With a fleet key it speaks CURVE and nothing else: there is no way down. Of several keys the next is tried where one
   does not fit, in turns until the deadline: a fleet that changes its key is of two minds for a while.
5. A connection that ends is given up, and made anew after a rest: libzmq would not always do so (:class:`Turns`).
6. Deadlines are of time in which this thread could run: that our process stood still is no peer's fault.
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
from kvconn.nixl.curve import CONNECTIONS, FAILURES, Curve, Turns, noted, refusal
from kvconn.nixl.names import LookUp, Names, endpoint, look_up, plain_name
from kvconn.nixl.wire import MAX_FRAME, encode_request, parse_timestamp
from kvconn.params import PeerKey
from kvconn.transport import blame
from kvconn.trust import Trust, numeric

__all__ = ["HandshakeClient", "HandshakeResult"]

#: peers asked at once; each is three sockets (its monitor is two), and requests name as many peers as they like
MAX_PENDING = 128
#: milliseconds between two tries to connect grow to this
_RECONNECT_MS = 1000
#: seconds after which an unanswered request is sent again, at first, and how often they double: whoever is slow because
#: many ask is not asked more for it
_AGAIN = 1.0
_DOUBLINGS = 2
#: bytes of one answer, with CURVE's; and milliseconds between two looks at how many have come
MAX_ANSWER = MAX_FRAME + ROOM
_WEIGH_MS = 100
#: milliseconds between two looks at whose turn it is, where somebody's is about to be
_REST_MS = 10
#: what is asked of a socket whose request is to be sent
_WHEN_IT_CAN = zmq.POLLIN | zmq.POLLOUT
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
    #: set when it is begun
    deadline: float = 0.0
    #: when it was last sent, and how often
    sent: float = 0.0
    times: int = 0
    #: where to, once that is known
    addresses: list[str] = field(default_factory=list)
    hint: str = ""
    #: how many addresses are tried, and those of them that will not have us
    tried: int = 0
    final: set[bytes] = field(default_factory=set)


class _Line:
    """One peer being asked: a socket, and a monitor that says why it cannot be."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ask: _Ask) -> None:
        self.ask = ask
        #: descriptors of its connections, and where they lead
        self.open: dict[int, bytes] = {}
        #: the keys; by endpoint: which one's turn it is there
        self._curves: Sequence[Curve] = ()
        self._turns: dict[str, Turns] = {}
        self.socket = context.socket(zmq.DEALER)
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
            self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            self.socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an address that may never be there
            self.monitor = self.socket.get_monitor_socket(FAILURES | CONNECTIONS)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def connect(self, addresses: Sequence[str], curves: Sequence[Curve], now: float) -> None:
        """With the first key, where there are keys. Raises ZMQError."""
        self._curves = curves
        self._turns = {endpoint(address, self.ask.key[2]): Turns(len(curves)) for address in addresses}
        self.ask.tried = len(self._turns)
        for where in self._turns:
            self._connect(where, now)

    def _connect(self, where: str, now: float) -> bool:
        """If it is time. Raises ZMQError."""
        turn = self._turns[where].begins(now)
        if turn is None:
            return False
        if self._curves:
            self._curves[turn].ask(self.socket)
        self.socket.setsockopt(zmq.IPV6, int("[" in where))
        self.socket.connect(where)
        return True

    def ended(self, where: bytes, now: float) -> None:
        """A connection there, in its handshake or after: if it is the one of now, the next one's turn comes."""
        turns = self._turns.get(where.decode())
        if turns is not None and turns.failed(now):
            self.open = {fd: to for fd, to in self.open.items() if to != where}
            with contextlib.suppress(zmq.ZMQError):
                self.socket.disconnect(where.decode())

    def take_turns(self, now: float) -> bool:
        """Connect where it is time to; True: somewhere it was."""
        any_begun = False
        for where, turns in self._turns.items():
            try:
                any_begun |= self._connect(where, now)
            except zmq.ZMQError:
                turns.failed(now)
        return any_begun

    @property
    def resting(self) -> bool:
        """Somewhere a turn is about to begin."""
        return any(turns.resting for turns in self._turns.values())

    def send(self) -> bool:
        """To whoever is there by now; False: nobody."""
        try:
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
                    if line.take_turns(self._clock()):
                        poller.modify(line.socket, _WHEN_IT_CAN)
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
            line.connect(addresses, self._curves, self._clock())
        except zmq.ZMQError as err:
            line.close()
            self._fail(ask, f"cannot connect: {err}")
            return
        self._pending += 1
        self._lines[line.socket] = self._lines[line.monitor] = line
        poller.register(line.socket, _WHEN_IT_CAN)
        poller.register(line.monitor, zmq.POLLIN)

    def _send(self, poller: zmq.Poller, line: _Line) -> None:
        ask = line.ask
        ask.sent = self._clock()
        if line.send():
            ask.times += 1
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
            line.open[told.came] = told.where
        elif told.went is not None and line.open.pop(told.went, None) is not None:
            line.ended(told.where, self._clock())
            if ask.times:
                ask.hint = f"the connection ended without an answer of at most {MAX_FRAME} bytes"
        found = refusal(message, bool(self._curves))
        if found is None:
            return
        ask.hint = found.why
        if found.final:
            ask.final.add(found.where)
        else:
            line.ended(found.where, self._clock())
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
                if found is not None and found.received > MAX_ANSWER * max(1, line.ask.times):
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
        for line in set(self._lines.values()):
            if line.ask.times and now - line.ask.sent >= _AGAIN * 2 ** min(line.ask.times - 1, _DOUBLINGS):
                poller.modify(line.socket, _WHEN_IT_CAN)
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
