"""A network inside one process, deterministic and as unkind as the real one. For tests and simulations.

Rules (F1 to F9 are docs/design.md, section 2)
1. Nothing moves but in :meth:`LoopbackNet.step`: one part of one read, one notification, or the news that a connection
   was lost. Which one, the schedule says: seeded, or the caller's. All calls come from one thread.
2. A read is cut into parts that land one at a time, at real addresses of this process. Forgetting a handle or a peer
   stops none of them (F1); only a death does: of the reader's agent, of the peer, of the connection.
3. An error is not the end of a read (F4): a part may fail, or a post raise, while the other parts still land. DONE is
   said only when every part has landed.
4. A death shows only when its news is stepped: reads of that connection are ERR then, and ``peer_gone`` is true.
5. An agent of progress ``poll`` sends, serves and receives nothing unless it polled since its last event (F2).
6. Notifications are lost, repeated, late and out of order as the fates say; a dead agent's may still arrive.
7. Refusals are those of the NIXL transport, so that what it forbids fails here too. A remote place that nobody
   registered fails its part when that is stepped; a local one is refused at once.
Not modelled: F6 (a peer that UCX aborts), F8 (a copy inside the post), F9; VRAM.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from kvconn.errors import TransportError
from kvconn.transport import blame
from kvconn.transport.base import Descs, HandleState, MemoryRegion, MemType, Progress, Transport

__all__ = ["Fate", "LoopbackNet", "LoopbackTransport"]

#: what becomes of one notification: after how many seconds each copy of it may arrive. Empty: lost.
Fate = tuple[float, ...]
ARRIVES: Final[Fate] = (0.0,)
WORD: Final = 8
_MAGIC: Final = "kvconn-loopback"


class _Blob(msgspec.Struct, frozen=True, array_like=True):
    magic: str
    name: str
    regions: tuple[tuple[int, int], ...]


class _Link:
    """One agent's connection to one peer, from ``add_peer`` on."""

    __slots__ = ("blob", "lost", "peer", "reader", "severed")

    def __init__(self, reader: LoopbackTransport, peer: str, blob: bytes) -> None:
        self.reader = reader
        self.peer = peer
        self.blob = blob
        #: nothing lands on it any more; and its reader knows.
        self.severed = False
        self.lost = False


class _Read:
    __slots__ = ("handle", "left", "link", "nbytes", "reason", "state")

    def __init__(self, handle: int, link: _Link, nbytes: int) -> None:
        self.handle = handle
        self.link = link
        self.nbytes = nbytes
        self.left = 0
        self.state = HandleState.PENDING
        self.reason = ""

    def fail(self, reason: str) -> None:
        if self.state is HandleState.PENDING:
            self.state, self.reason = HandleState.ERR, reason


class _Flight(ABC):
    """Something on its way."""

    @abstractmethod
    def ready(self, net: LoopbackNet) -> bool:
        """Whether it may arrive now."""

    @abstractmethod
    def arrive(self, net: LoopbackNet) -> None:
        """It does."""


class _Part(_Flight):
    """A piece of a read, in one go."""

    def __init__(self, read: _Read, local: int, remote: int, length: int) -> None:
        self.read = read
        self.local = local
        self.remote = remote
        self.length = length

    def ready(self, net: LoopbackNet) -> bool:
        link = self.read.link
        return net.moves(link.reader.name) and net.moves(link.peer)

    def arrive(self, net: LoopbackNet) -> None:
        link = self.read.link
        net.spend(link.reader.name, link.peer)
        self.read.left -= 1
        if not net.registered(link.peer, self.remote, self.length):
            self.read.fail(f"{link.peer} has registered no memory at {self.remote:#x}, {self.length} bytes")
            return
        ctypes.memmove(self.local, self.remote, self.length)
        if self.read.left == 0 and self.read.state is HandleState.PENDING:
            self.read.state = HandleState.DONE

    def __repr__(self) -> str:
        return f"part of read {self.read.handle}, {self.length} bytes"


class _Message(_Flight):
    """A notification, in one go."""

    def __init__(self, sender: str, to: str, data: bytes, due: float) -> None:
        self.sender = sender
        self.to = to
        self.data = data
        self.due = due

    def ready(self, net: LoopbackNet) -> bool:
        return net.clock() >= self.due and net.moves(self.to)

    def arrive(self, net: LoopbackNet) -> None:
        net.spend(self.to)
        net.agents[self.to].receive(self.sender, self.data)

    def __repr__(self) -> str:
        return f"notification {self.data!r} for {self.to}"


class _Loss(_Flight):
    """The news that a connection was lost. By then nothing is under way on it."""

    def __init__(self, link: _Link) -> None:
        self.link = link

    def ready(self, net: LoopbackNet) -> bool:
        return net.moves(self.link.reader.name)

    def arrive(self, net: LoopbackNet) -> None:
        net.spend(self.link.reader.name)
        self.link.lost = True
        self.link.reader.lost(self.link)

    def __repr__(self) -> str:
        return f"news for {self.link.reader.name} that {self.link.peer} is lost"


class LoopbackNet:
    """Agents of one process and what is on its way between them.

    ``seed`` draws the cuts, the fates and, without a ``schedule``, the order; ``schedule(n)`` picks one of ``n`` that
    may arrive. Each part of a read is cut into at most ``cuts`` pieces, an 8-byte one into two halves with probability
    ``torn``. ``loss``, ``duplication`` and ``delay`` (at most so many seconds of ``clock``) are the odds of fates.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        schedule: Callable[[int], int] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        cuts: int = 3,
        torn: float = 0.5,
        loss: float = 0.0,
        duplication: float = 0.0,
        delay: float = 0.0,
    ) -> None:
        self.clock = clock
        self.agents: dict[str, LoopbackTransport] = {}
        #: what the next notifications come to, before the odds are asked.
        self.fates: deque[Fate] = deque()
        self._random = random.Random(seed)
        self._schedule = schedule or random.Random(seed + 1).randrange
        self._cuts, self._torn = cuts, torn
        self._loss, self._duplication, self._delay = loss, duplication, delay
        self._flights: list[_Flight] = []
        self._stopped: set[str] = set()
        self._to_raise: dict[str, int] = {}
        self._made = 0
        self._handles = 0

    def transport(self, name: str | None = None, *, progress: Progress = "pump") -> LoopbackTransport:
        """A new agent; usable as ``make_transport``."""
        self._made += 1
        agent = LoopbackTransport(self, name or f"agent-{self._made}", progress)
        if agent.name in self.agents:
            raise TransportError(f"transport: an agent {agent.name} is here already")
        self.agents[agent.name] = agent
        return agent

    # -- movement

    def arrivals(self) -> list[str]:
        """What may arrive now, in the order that a choice counts in."""
        return [repr(flight) for flight in self._flights if flight.ready(self)]

    def step(self, choice: int | None = None) -> bool:
        """One thing arrives; ``choice`` (modulo how many may) instead of the schedule's. False: nothing may."""
        ready = [flight for flight in self._flights if flight.ready(self)]
        if not ready:
            return False
        index = self._schedule(len(ready)) if choice is None else choice
        flight = ready[index % len(ready)]
        self._flights.remove(flight)
        flight.arrive(self)
        return True

    def run(self, limit: int | None = None) -> int:
        """Step until nothing may arrive, or ``limit`` times; return how often."""
        count = 0
        while (limit is None or count < limit) and self.step():
            count += 1
        return count

    def may_write(self, address: int, length: int) -> list[int]:
        """Handles, released ones too, of which something may still be written there, if only when a peer continues."""
        hit = {
            f.read.handle
            for f in self._flights
            if isinstance(f, _Part) and f.local < address + length and address < f.local + f.length
        }
        return sorted(hit)

    def reading(self, agent: str, address: int, length: int) -> list[int]:
        """Handles, released ones too, that still have something to read there in the memory of ``agent``."""
        hit = {
            f.read.handle
            for f in self._flights
            if isinstance(f, _Part)
            and f.read.link.peer == agent
            and f.remote < address + length
            and address < f.remote + f.length
        }
        return sorted(hit)

    def writes(self, agent: str) -> list[tuple[int, int]]:
        """Every (address, length) in the memory of ``agent`` that something under way will be written to."""
        parts = (f for f in self._flights if isinstance(f, _Part) and f.read.link.reader.name == agent)
        return [(part.local, part.length) for part in parts]

    # -- faults

    def stop(self, agent: str) -> None:
        """SIGSTOP: what is read from it, by it or sent to it waits."""
        self._stopped.add(agent)

    def cont(self, agent: str) -> None:
        """SIGCONT."""
        self._stopped.discard(agent)

    def heal(self) -> None:
        """Everybody continues, and no ordered fault waits. What is lost stays lost."""
        self._stopped.clear()
        self._to_raise.clear()
        self.fates.clear()

    def kill(self, agent: str) -> None:
        """SIGKILL: nothing read from it or by it lands any more. Its readers hear of it when that news arrives."""
        dead = self.agents.pop(agent, None)
        if dead is None:
            return
        self._flights = [f for f in self._flights if not self._concerns(f, agent)]
        for one in self.agents.values():
            one.bereave(agent)

    def cut(self, reader: str, peer: str) -> None:
        """The connection fails and both live on: nothing lands on it any more, and its reader hears of that."""
        link = self.agents[reader].link(peer)
        if link is not None:
            self.sever(link)

    def fail_part(self, handle: int) -> bool:
        """One part of this read fails: it is ERR, its other parts still land (F4). False: none is under way."""
        part = next((f for f in self._flights if isinstance(f, _Part) and f.read.handle == handle), None)
        if part is None:
            return False
        self._flights.remove(part)
        part.read.left -= 1
        part.read.fail("a part of it failed")
        return True

    def raise_on_post(self, agent: str, parts: int = 1) -> None:
        """The next post of this agent raises when it has posted ``parts`` parts (F4); with 0 nothing was posted."""
        self._to_raise[agent] = parts

    def under_way(self) -> list[int]:
        """Handles, released ones too, that have parts under way."""
        return sorted({f.read.handle for f in self._flights if isinstance(f, _Part)})

    # -- for the agents

    def moves(self, agent: str) -> bool:
        """Alive, not stopped, and progressed by somebody."""
        one = self.agents.get(agent)
        return one is not None and agent not in self._stopped and one.progresses

    def spend(self, *agents: str) -> None:
        """These have progressed by one event."""
        for agent in agents:
            self.agents[agent].polled = False

    def registered(self, agent: str, address: int, length: int) -> bool:
        """Whether a live agent has that memory registered."""
        one = self.agents.get(agent)
        return one is not None and one.owns(address, length)

    def send(self, sender: str, to: str, data: bytes) -> None:
        """A notification goes out to its fate."""
        fate = self.fates.popleft() if self.fates else self._fate()
        if to in self.agents:
            self._flights += [_Message(sender, to, data, self.clock() + late) for late in fate]

    def _fate(self) -> Fate:
        if not (self._loss or self._duplication or self._delay):
            return ARRIVES
        if self._random.random() < self._loss:
            return ()
        copies = 2 if self._random.random() < self._duplication else 1
        return tuple(self._random.random() * self._delay for _ in range(copies))

    def post(self, link: _Link, local: Descs, remote: Descs) -> _Read:
        """Parts go on their way. Raises TransportError where that was ordered."""
        raising = self._to_raise.pop(link.reader.name, None)
        what = f"read of {len(local)} parts from {link.peer}"
        if raising == 0:
            raise TransportError(f"{what}: the post failed, as ordered")
        self._handles += 1
        read = _Read(self._handles, link, int(local[:, 1].sum()))
        parts: list[_Flight] = []
        for (ours, length), (theirs, _) in zip(local.tolist(), remote.tolist(), strict=True):
            for offset, size in self._pieces(length):
                parts.append(_Part(read, ours + offset, theirs + offset, size))
        if raising is not None:
            parts = parts[:raising]
            read.fail("the post failed, as ordered")
        read.left = len(parts)
        if link.peer in self.agents and not link.severed:
            self._flights += parts
        else:
            self.sever(link)
        return read

    def sever(self, link: _Link) -> None:
        """Nothing lands on this connection any more; its reader is to hear of it."""
        link.severed = True
        self._flights = [f for f in self._flights if not (isinstance(f, _Part) and f.read.link is link)]
        if not any(isinstance(f, _Loss) and f.link is link for f in self._flights):
            self._flights.append(_Loss(link))

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        """(offset, length) of the pieces of one part."""
        if length == WORD:
            inner = [WORD // 2] if self._random.random() < self._torn else []
        else:
            count = min(self._random.randrange(self._cuts), length - 1)
            inner = sorted(self._random.sample(range(1, length), count))
        edges = [0, *inner, length]
        return [(a, b - a) for a, b in itertools.pairwise(edges)]

    def _concerns(self, flight: _Flight, agent: str) -> bool:
        if isinstance(flight, _Part):
            return agent in (flight.read.link.reader.name, flight.read.link.peer)
        if isinstance(flight, _Message):
            return flight.to == agent
        return isinstance(flight, _Loss) and flight.link.reader.name == agent

    def __repr__(self) -> str:
        ready = sum(1 for f in self._flights if f.ready(self))
        return (
            f"<LoopbackNet agents={len(self.agents)} stopped={len(self._stopped)} "
            f"under way={len(self._flights)} of which {ready} may arrive>"
        )


class LoopbackTransport(Transport):
    """An agent on a :class:`LoopbackNet`, which makes it."""

    def __init__(self, net: LoopbackNet, name: str, progress: Progress) -> None:
        self.name = name
        self.progress: Progress = progress
        #: progress ``poll``: called since its last event.
        self.polled = False
        self._net = net
        self._regions: list[tuple[int, int]] = []
        self._links: dict[str, _Link] = {}
        self._reads: dict[int, _Read] = {}
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"progress={self.progress}"
        return (
            f"<LoopbackTransport {self.name} {state} regions={len(self._regions)} peers={len(self._links)} "
            f"reads={len(self._reads)} held notifications={len(self._inbox)} queued>"
        )

    # -- memory and peers

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._open("register")
        for region in regions:
            if region.address <= 0 or region.length <= 0 or region.mem_type != "DRAM":
                raise TransportError(f"register: expected DRAM at a positive address, got {region}; a fault of ours")
            self._regions.append((region.address, region.length))

    def metadata(self) -> bytes:
        self._open("metadata")
        return msgspec.msgpack.encode(_Blob(_MAGIC, self.name, tuple(self._regions)))

    def add_peer(self, blob: bytes) -> str:
        self._open("add_peer")
        try:
            told = msgspec.msgpack.decode(blob, type=_Blob)
        except (msgspec.MsgspecError, TypeError) as err:
            raise TransportError(f"add_peer: not a loopback agent's metadata: {err}") from None
        if told.magic != _MAGIC or not told.name or told.name == self.name:
            raise TransportError("add_peer: not another loopback agent's metadata")
        known = self._links.get(told.name)
        if known is not None and known.blob != blob:
            raise TransportError(f"add_peer {told.name}: this peer is known by another blob. Remove it first")
        self._links.setdefault(told.name, _Link(self, told.name, blob))
        return told.name

    def remove_peer(self, peer: str) -> None:
        self._open("remove_peer")
        if peer not in self._links:
            raise blame.unknown_peer("remove_peer", peer)
        held = [h for h, r in self._reads.items() if r.link.peer == peer and r.state is not HandleState.DONE]
        if held:
            raise TransportError(
                f"remove_peer {peer}: {len(held)} of our reads from it are not known to be quiet (handles "
                f"{blame.some(held)}); removing it would not stop them. A fault of ours: drain the peer first"
            )
        del self._links[peer]

    def peer_gone(self, peer: str) -> bool:
        self.polled = True
        link = self._links.get(peer)
        return link is not None and link.lost

    # -- reads

    def post_read(
        self,
        peer: str,
        local: Descs,
        remote: Descs,
        *,
        local_mem: MemType = "DRAM",
        remote_mem: MemType = "DRAM",
        local_device: int = 0,
        remote_device: int = 0,
    ) -> int:
        self._open("post_read")
        link = self._links.get(peer)
        if link is None:
            raise blame.unknown_peer("post_read", peer)
        if "VRAM" in (local_mem, remote_mem):
            raise TransportError("post_read: there is no VRAM on the loopback")
        self._check(local, remote)
        read = self._net.post(link, local, remote)
        self._reads[read.handle] = read
        if read.state is HandleState.ERR:
            raise TransportError(f"{peer}: {read.reason}. Parts of it may be under way (F4).", handle=read.handle)
        return read.handle

    def _check(self, local: Descs, remote: Descs) -> None:
        for side, descs in (("local", local), ("remote", remote)):
            if descs.ndim != 2 or descs.shape[1] != 2 or not len(descs) or descs.dtype != np.int64:
                raise TransportError(
                    f"post_read: expected {side} as a non-empty int64 array of shape (n, 2), got {descs.dtype} of "
                    f"shape {descs.shape}; a fault of ours"
                )
            if descs.min() <= 0:
                raise TransportError(f"post_read: a {side} address or length of {int(descs.min())}; a fault of ours")
        if len(local) != len(remote) or (local[:, 1] != remote[:, 1]).any():
            raise TransportError("post_read: the local parts do not pair with the remote ones; a fault of ours")
        for address, length in local.tolist():
            if not self.owns(address, length):
                raise TransportError(f"post_read: {length} bytes at {address:#x} are not registered; a fault of ours")

    def poll(self, handle: int) -> HandleState:
        self.polled = True
        return self._known(handle, "poll").state

    def reason(self, handle: int) -> str:
        return self._known(handle, "reason").reason

    def release(self, handle: int) -> None:
        read = self._known(handle, "release")
        if read.state is HandleState.PENDING:
            raise TransportError(
                f"release of handle {handle}: {read.nbytes} bytes from {read.link.peer} are still on their way and "
                "releasing would not stop them (C6). A fault of ours: poll it until it is quiet"
            )
        del self._reads[handle]

    # -- notifications

    def notify(self, peer: str, message: bytes) -> None:
        self._open("notify")
        link = self._links.get(peer)
        if link is None:
            raise blame.unknown_peer("notify", peer)
        if link.lost:
            raise TransportError(f"notify {peer}: the connection to the peer failed")
        if peer not in self._net.agents:
            self._net.sever(link)  # sent into the void, and found out later
        self._net.send(self.name, peer, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        self.polled = True
        got = list(self._inbox)
        self._inbox.clear()
        return got

    # -- the end

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._net.kill(self.name)
        for read in self._reads.values():
            read.fail("our agent was destroyed")
        self._regions.clear()
        self._links.clear()

    def _open(self, what: str) -> None:
        if self._closed or self._net.agents.get(self.name) is not self:
            raise TransportError(f"{what}: transport {self.name} is closed; make a new one")

    def _known(self, handle: int, what: str) -> _Read:
        read = self._reads.get(handle)
        if read is None:
            raise TransportError(f"{what}: handle {handle} was never posted or is released already; a fault of ours")
        return read

    # -- for the net

    @property
    def progresses(self) -> bool:
        return self.progress != "poll" or self.polled

    def owns(self, address: int, length: int) -> bool:
        return any(base <= address and address + length <= base + size for base, size in self._regions)

    def link(self, peer: str) -> _Link | None:
        return self._links.get(peer)

    def receive(self, sender: str, data: bytes) -> None:
        self._inbox.append((sender, data))

    def bereave(self, peer: str) -> None:
        """That peer died; we hear of it if we have a read from it, else when we want something of it."""
        link = self._links.get(peer)
        if link is not None and any(r.link is link and r.state is not HandleState.DONE for r in self._reads.values()):
            self._net.sever(link)

    def lost(self, link: _Link) -> None:
        """The news of :meth:`LoopbackNet.sever` came in."""
        for read in self._reads.values():
            if read.link is link:
                read.fail(f"the connection to {link.peer} was lost")
