"""NIXL behind the transport interface. The only module that imports nixl, and only when the first agent is made.

Rules (F1 to F9 are docs/design.md, section 2; measured on nixl 1.5.1)
1. One lock around every call into the agent, because NIXL is told that it is used from one thread. Callers come before
   the pump (``Gate``): the pump never waits for the lock and never asks for it while a caller wants it.
2. The pump (``pump``) progresses and queues notifications. It changes no state: handles are judged in
   :meth:`NixlTransport.poll`.
3. ``DONE`` is given out only after a second look. NIXL keeps one request per post and drops the others' results, so
   that its own DONE can hide a part that failed (F7); a failed part leaves its connection failed, and posting a read of
   no bytes on that connection says so for a microsecond.
4. ``ERR`` says that a read failed, never that it stopped (F4): it stopped only if its peer's connection is lost, which
   :meth:`NixlTransport.peer_gone` answers. A final state is remembered and the agent not asked again.
5. A handle that is not final is never released and its peer never removed (C6). The one exception is
   :meth:`NixlTransport.close`, which destroys the agent, and after that nothing lands (F1).
6. What NIXL raises ends here: callers see ``TransportError``, which says whose fault it is and what to do.
7. The memory of a process on this host is read by :mod:`~kvconn.transport.near`, and is quiet at once. With ``poll``
   its first single part is NIXL's, which makes the connection that notifications need.
8. The environment that UCX reads is settled before nixl is loaded (``prepare_ucx_env``); what the user set stands.
"""

from __future__ import annotations

import importlib
import logging
import os
import uuid
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from kvconn.config import LIMITS
from kvconn.errors import TransportError
from kvconn.transport import blame
from kvconn.transport.base import Descs, HandleState, MemoryRegion, MemType, Progress, Transport
from kvconn.transport.blob import agent_of, damage
from kvconn.transport.gate import Gate
from kvconn.transport.near import Near, may_be_near, whereabouts
from kvconn.transport.pacing import Round
from kvconn.transport.parts import Spans, check, joined
from kvconn.transport.pump import Pump, event_sets
from kvconn.transport.ucx import prepare_ucx_env

__all__ = ["NixlTransport"]

log = logging.getLogger(__name__)

#: a small read over tcp takes half of it; as long as an engine sleeps after a step without tokens
PATIENCE: Final = 1e-3
#: more notifications than this are not kept: a peer must not fill our memory (C9).
MAX_NOTIFICATIONS: Final = 65536
MAX_NOTIFICATION_BYTES: Final = 64 << 20

_FINAL: Final = {"DONE": HandleState.DONE, "ERR": HandleState.ERR}


class _Peer:
    """One loaded agent."""

    __slots__ = ("blob", "lost", "near", "origin", "probe", "probed")

    def __init__(self, blob: bytes, near: Near | None) -> None:
        self.blob = blob
        #: its process, where that is read without NIXL.
        self.near = near
        #: its read of no bytes (rule 3), made at the first DONE; and that read's place on both sides, the first
        #: part's of the first read.
        self.probe: Any = None
        self.origin: tuple[Descs, MemType, Descs, MemType] | None = None
        self.probed = False  # posted at least once; NIXL takes asking before that for an error
        #: its connection was seen to have failed.
        self.lost = False


class _Read:
    """One posted read. ``native`` is None once it was given back to NIXL or its agent is gone."""

    __slots__ = ("native", "nbytes", "peer", "reason", "state")

    def __init__(self, peer: str, nbytes: int, native: Any, state: HandleState = HandleState.PENDING) -> None:
        self.peer = peer
        self.nbytes = nbytes
        self.native = native
        self.state = state
        self.reason = ""


class NixlTransport(Transport):
    """A NIXL agent of our own.

    ``progress`` says who moves bytes between calls: ``pump``, a thread of ours that sleeps when idle; ``nixl``, NIXL's,
    which never sleeps (a whole core per agent); ``poll``, nobody (F2). ``pump_interval`` is the pump's shortest sleep.
    """

    meets_slowly = True
    patience = PATIENCE

    def __init__(
        self,
        progress: Progress = "pump",
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 0,
        name: str | None = None,
        pump_interval: float = 200e-6,
        max_notifications: int = MAX_NOTIFICATIONS,
        batch: bool = True,
    ) -> None:
        prepare_ucx_env()
        self._batch = batch and "UCX" in backends and may_be_near(os.environ.get("UCX_TLS", "all"))
        self.name = name or f"{uuid.uuid4()}{whereabouts() if self._batch else ''}"
        self.progress: Progress = progress
        self.backends = tuple(backends)
        #: notifications thrown away because nobody fetched the ones before them.
        self.dropped_notifications = 0
        self._max_notifications = max_notifications
        self._gate = Gate()
        self._reads: dict[int, _Read] = {}
        self._next_handle = 1
        self._posted = 0
        self._peers: dict[str, _Peer] = {}
        self._regions: list[Any] = []
        self._memory = Spans()  # what of it is DRAM
        self._inbox: deque[tuple[str, bytes]] = deque()
        self._inbox_bytes = 0
        self._arrivals = 0  # how often some came
        self._shape: bool | None = None  # whether NIXL's blobs are of the shape that we can check
        self._pump: Pump | None = None
        self._second = ThreadPoolExecutor(1, "kvconn-near")  # its thread starts with the first large read
        known = event_sets()
        self._agent: Any = _make_agent(self.name, progress, self.backends, num_threads)
        if progress == "pump":
            try:
                self._pump = Pump(self, pump_interval, event_sets() - known)
            except (OSError, RuntimeError) as err:
                self.close()
                raise blame.without("the pump of a NIXL agent", err) from err

    def __repr__(self) -> str:
        state = "closed" if self._agent is None else f"progress={self.progress}"
        return (
            f"<NixlTransport {self.name} {state} backends={','.join(self.backends)} regions={len(self._regions)} "
            f"peers={len(self._peers)} reads={self._posted} posted of {len(self._reads)} held "
            f"notifications={len(self._inbox)} queued {self.dropped_notifications} dropped>"
        )

    # -- memory and peers

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Register local memory, one NIXL call per memory type. Raises TransportError."""
        by_type: dict[MemType, list[tuple[int, int, int]]] = {}
        for r in regions:
            if r.address <= 0 or r.length <= 0:
                raise TransportError(f"register: expected a positive address and length, got {r}; a fault of ours")
            by_type.setdefault(r.mem_type, []).append((r.address, r.length, r.device_id))
        with self._gate:
            agent = self._open("register")
            for mem_type, rows in by_type.items():
                try:
                    self._regions.append(agent.register_memory(np.array(rows, np.int64), mem_type))
                    if mem_type == "DRAM":
                        self._memory.add(np.array(rows, np.int64))
                except Exception as err:
                    total = sum(length for _, length, _ in rows)
                    raise blame.mapped(err, f"register {len(rows)} {mem_type} regions, {total} bytes") from err

    def metadata(self) -> bytes:
        """The blob another agent needs for :meth:`add_peer`. Call after :meth:`register`."""
        with self._gate:
            agent = self._open("metadata")
            try:
                return bytes(agent.get_agent_metadata())
            except Exception as err:
                raise blame.mapped(err, "metadata of our own agent") from err

    def add_peer(self, blob: bytes) -> str:
        """Load a peer's blob, return the agent name in it. Connects to nobody: a dead peer is found out by a read."""
        if not isinstance(blob, bytes) or not blob:
            raise TransportError(
                f"add_peer: expected the peer's agent metadata, got {type(blob).__name__} of length "
                f"{len(blob) if isinstance(blob, bytes) else 'unknown'}; the peer's handshake is wrong"
            )
        with self._gate:
            agent = self._open("add_peer")
            name = self._met_already(blob)
            if name is not None:
                return name
            wrong = damage(blob)
            if wrong is not None and self._shape_is_known(agent):
                raise TransportError(f"add_peer: the peer sent a damaged blob: {wrong}")
            try:
                raw: bytes = agent.add_remote_agent(blob)
                name = raw.decode()
            except Exception as err:
                raise blame.mapped(err, f"add_peer from a blob of {len(blob)} bytes") from err
            self._peers[name] = _Peer(blob, Near.meet(name) if self._batch else None)
            return name

    def _met_already(self, blob: bytes) -> str | None:
        """The peer that is known by this blob. Raises TransportError where its agent is known by another."""
        named = agent_of(blob)
        for name in self._peers if named is None else (named,):
            known = self._peers.get(name)
            if known is None:
                continue
            if known.blob == blob:
                return name
            if named is not None or _names(blob, name):
                raise TransportError(
                    f"add_peer {name}: this peer is known by another blob. Remove it first: NIXL would forget what "
                    "it knows, under whatever is posted, and for good if this blob is damaged"
                )
        return None

    def _shape_is_known(self, agent: Any) -> bool:
        """Does the NIXL that is installed write blobs as we know them? Asked once, of our own."""
        if self._shape is None:
            self._shape = damage(bytes(agent.get_agent_metadata())) is None
        return self._shape

    def remove_peer(self, peer: str) -> None:
        """Forget a peer. Refused while we hold a read from it that is not DONE: release says that it is quiet (C6)."""
        with self._gate:
            agent = self._open("remove_peer")
            if peer not in self._peers:
                raise blame.unknown_peer("remove_peer", peer)
            held = [h for h, r in self._reads.items() if r.peer == peer and r.state is not HandleState.DONE]
            if held:
                raise TransportError(
                    f"remove_peer {peer}: {len(held)} of our reads from it are not known to be quiet (handles "
                    f"{blame.some(held)}); removing it would not stop them. A fault of ours: drain the peer first"
                )
            _move_away(self._peers[peer])
            probe = self._peers.pop(peer).probe
            try:
                if probe is not None:
                    probe.release()
                agent.remove_remote_agent(peer)
            except Exception as err:
                raise blame.mapped(err, f"remove_peer {peer}") from err

    def peer_gone(self, peer: str) -> bool:
        """Whether the connection to this peer has failed, after which nothing read from it lands any more.

        Measured over tcp, peer killed, and connection cut with the peer alive (F4); over CMA nothing is under way
        between calls. A peer that is stopped, or that nothing was asked of since it died, is not known to be gone.
        """
        with self._gate:
            known = self._peers.get(peer)
            if known is None:
                return False
            try:
                self._drain()  # UCX finishes off what was under way on a failed connection
                if not known.lost:
                    self._check_connection(known)
            except Exception as err:  # noqa: BLE001 - nixl's have no common base
                self._note_loss(peer, err)
            return known.lost

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
        """Read ``remote[i]`` of ``peer`` into ``local[i]`` for every i; return a handle.

        Parts that go on where the one before ended, on both sides, become one: every part costs microseconds (F3).
        Over CMA the copying happens in here. When the error carries a handle, parts may be under way (F4).
        """
        nbytes = check(remote, local)
        with self._gate:
            agent = self._open("post_read")
            if peer not in self._peers:
                raise blame.unknown_peer("post_read", peer)
            if local_mem == remote_mem == "DRAM" and self._read_near(self._peers[peer], local, remote):
                handle, self._next_handle = self._next_handle, self._next_handle + 1
                self._reads[handle] = _Read(peer, nbytes, None, HandleState.DONE)
                return handle
            theirs, ours = joined(remote, local, remote_device, local_device)
            what = f"read of {len(ours)} parts, {nbytes} bytes from {peer}"
            try:
                native = agent.initialize_xfer(
                    "READ", agent.get_xfer_descs(ours, local_mem), agent.get_xfer_descs(theirs, remote_mem), peer
                )
            except Exception as err:  # nothing was posted
                self._note_loss(peer, err)
                raise blame.mapped(err, what) from err
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            read = self._reads[handle] = _Read(peer, nbytes, native)
            if self._peers[peer].origin is None:
                self._peers[peer].origin = ours[:1].copy(), local_mem, theirs[:1].copy(), remote_mem
            self._posted += 1
            try:
                answer = agent.transfer(native)
            except Exception as err:
                self._fail(read, f"post: {blame.text(err)}", err)
                raise blame.mapped(err, what, handle=handle) from err
            self._settle(read, answer)
            if self._pump is not None and read.state is HandleState.PENDING:
                self._pump.moved()
            return handle

    def poll(self, handle: int) -> HandleState:
        """Where this read stands. Never raises for a known handle: a transport failure is ``ERR``."""
        self.over((handle,))
        return self._reads[handle].state

    def over(self, handles: Iterable[int]) -> list[tuple[int, HandleState]]:
        """Those of these reads that are not PENDING any more: one turn at the gate, one question to NIXL for each."""
        over: list[tuple[int, HandleState]] = []
        pending = HandleState.PENDING  # looked up once: this loop is what a poll of many reads costs
        with self._gate:
            for handle in handles:
                read = self._reads.get(handle) or self._known(handle, "poll")
                if read.state is pending:
                    try:
                        answer = self._agent.check_xfer_state(read.native)
                        if answer == "PROC":
                            continue
                        self._settle(read, answer)
                    except Exception as err:  # noqa: BLE001 - nixl's have no common base
                        self._fail(read, blame.text(err), err)
                if read.state is not pending:
                    over.append((handle, read.state))
        return over

    def reason(self, handle: int) -> str:
        """Why this read is ERR, for the log; empty when it is not."""
        with self._gate:
            return self._known(handle, "reason").reason

    def release(self, handle: int) -> None:
        """Forget a quiet handle. Refused while it is PENDING: a release stops nothing (F1)."""
        with self._gate:
            read = self._known(handle, "release")
            if read.state is HandleState.PENDING:
                raise TransportError(
                    f"release of handle {handle}: {read.nbytes} bytes from {read.peer} are still on their way and "
                    "releasing would not stop them (C6). A fault of ours: poll it until it is quiet"
                )
            del self._reads[handle]
            _give_back(read)

    # -- notifications

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification. Raises TransportError. That it was sent doesn't say that it arrived."""
        with self._gate:
            agent = self._open("notify")
            if peer not in self._peers:
                raise blame.unknown_peer("notify", peer)
            try:
                agent.send_notif(peer, message)
            except Exception as err:
                raise blame.mapped(err, f"notify {peer}, {len(message)} bytes") from err

    def notifications(self) -> list[tuple[str, bytes]]:
        """Notifications since the last call, as ``(agent name of the sender, bytes)``; progresses the agent (C11)."""
        turn, lock = self._gate.turn, self._gate.agent
        turn.acquire()
        lock.acquire()
        try:
            if self._agent is not None:
                try:
                    self._drain()
                except Exception as err:  # noqa: BLE001 - nixl's have no common base
                    log.warning("%s cannot progress: %s", self.name, blame.text(err))
            if not self._inbox:
                return []
            got = list(self._inbox)
            self._inbox.clear()
            self._inbox_bytes = 0
            return got
        finally:
            lock.release()
            turn.release()

    # -- the end

    def close(self) -> None:
        """Stop the pump and destroy the agent. Idempotent. After it nothing lands in our memory (F1).

        Raises TransportError when that is not so: somebody else holds the agent, or a call into it hangs.

        A peer that has our reads still to serve over tcp may be killed by UCX when it serves them (F6).
        """
        if self._pump is not None:
            self._pump.close()
        self._second.shutdown(wait=False)  # it works for a caller in the gate alone, who waits for it
        with self._gate.within(LIMITS.end_thread):
            if self._agent is None:
                return
            for read in self._reads.values():
                if read.state is HandleState.PENDING:
                    self._fail(read, "our agent was destroyed")
                _give_back(read, forget_agent=True)
            while self._peers:
                _, peer = self._peers.popitem()
                _move_away(peer)
                if peer.probe is not None:
                    peer.probe.release()
                    peer.probe._agent = None
            self._regions.clear()
            native = weakref.ref(self._agent.agent)
            # NIXL's wrappers hold the native agent, and whoever keeps an error of ours keeps wrappers in its traceback
            self._agent.agent = None
            self._agent = None
            if native() is not None:
                raise TransportError(
                    f"close of {self.name}: somebody else holds its NIXL agent, so it lives on and reads may still "
                    "land. A fault of ours: end this process before reusing the memory"
                )

    def __del__(self) -> None:
        if getattr(self, "_agent", None) is not None:
            self.close()

    # -- for the pump

    def progress_once(self) -> Round:
        """One progress, unless a caller has the agent or wants it."""
        if not self._gate.try_enter():
            return Round.BUSY
        try:
            before = self._arrivals
            if self._agent is not None:
                self._drain()
            return Round.NOTHING if self._arrivals == before else Round.FOUND
        except Exception as err:  # noqa: BLE001 - nothing may end the pump (C9)
            log.warning("%s: the pump cannot progress: %s", self.name, blame.text(err))
            return Round.TROUBLE
        finally:
            self._gate.leave()

    @property
    def posted(self) -> int:
        """Reads under way."""
        return self._posted

    # -- under the gate

    def _read_near(self, peer: _Peer, local: Descs, remote: Descs) -> bool:
        """Read it here and now; False: NIXL is asked, now and for good where it did not work."""
        if peer.near is None or not self._memory.hold(local):
            return False
        if self.progress == "poll" and peer.probe is None and len(local) == 1:
            return False  # a fence word connects: no notification would leave before our next call, if there is one
        if not peer.near.read(local, remote, self._second):
            _move_away(peer)
            return False
        return True

    def _open(self, what: str) -> Any:
        if self._agent is None:
            raise TransportError(f"{what}: transport {self.name} is closed; make a new one")
        return self._agent

    def _known(self, handle: int, what: str) -> _Read:
        read = self._reads.get(handle)
        if read is None:
            raise TransportError(f"{what}: handle {handle} was never posted or is released already; a fault of ours")
        return read

    def _settle(self, read: _Read, answer: str) -> None:
        """Take over what NIXL says of a pending read."""
        state = _FINAL.get(answer)
        if state is HandleState.ERR:
            self._fail(read, "NIXL says ERR")
        elif state is HandleState.DONE:
            try:
                self._confirm(read)
            except Exception as err:  # noqa: BLE001 - nixl's have no common base
                self._fail(read, f"NIXL says DONE, but its connection has failed: {blame.text(err)}", err)
                return
            read.state = HandleState.DONE
            self._posted -= 1

    def _fail(self, read: _Read, reason: str, err: Exception | None = None) -> None:
        read.state = HandleState.ERR
        read.reason = reason
        self._posted -= 1
        self._note_loss(read.peer, err)

    def _note_loss(self, peer: str, err: Exception | None) -> None:
        if blame.connection_lost(err) and peer in self._peers:
            self._peers[peer].lost = True

    def _confirm(self, read: _Read) -> None:
        """Raise if the connection of a read that is DONE has failed, for then some of its parts have (rule 3)."""
        peer = self._peers[read.peer]
        self._drain()  # UCX tells of a failed connection from its progress
        if peer.probe is None:
            peer.probe = self._empty_read(read.peer, peer)
        self._check_connection(peer)

    def _check_connection(self, peer: _Peer) -> None:
        """Raise if this peer's connection has failed. Says nothing before the first DONE from it."""
        if peer.probe is None:
            return
        if peer.probed and self._agent.check_xfer_state(peer.probe) == "PROC":
            return  # it waits behind other reads, and would have failed with them
        peer.probed = True
        if self._agent.transfer(peer.probe) == "ERR":
            raise RuntimeError("a read of no bytes failed")

    def _empty_read(self, name: str, peer: _Peer) -> Any:
        assert peer.origin is not None, "something was posted"
        ours, local_mem, theirs, remote_mem = peer.origin
        ours[:, 1] = theirs[:, 1] = 0
        agent = self._agent
        return agent.initialize_xfer(
            "READ", agent.get_xfer_descs(ours, local_mem), agent.get_xfer_descs(theirs, remote_mem), name
        )

    def _drain(self) -> None:
        """Progress and queue what came in."""
        news: dict[str, list[bytes]] = self._agent.get_new_notifs()
        if not news:
            return
        self._arrivals += 1
        for sender, messages in news.items():
            for message in messages:
                size = self._inbox_bytes + len(message)
                if len(self._inbox) < self._max_notifications and size <= MAX_NOTIFICATION_BYTES:
                    self._inbox.append((sender, message))
                    self._inbox_bytes = size
                    continue
                if not self.dropped_notifications:
                    log.error(
                        "%s: %d notifications wait unread, further ones are dropped; last sender %s. "
                        "The step thread has stopped polling, or a peer floods us",
                        self.name, len(self._inbox), sender,
                    )  # fmt: skip
                self.dropped_notifications += 1


def _make_agent(name: str, progress: Progress, backends: tuple[str, ...], num_threads: int) -> Any:
    """A native agent. Nothing in this process may have loaded nixl before the environment is settled (rule 8)."""
    prepare_ucx_env()
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as err:
        raise TransportError(f"nixl cannot be imported: {err}; install it with `pip install nixl`") from err
    try:
        config = api.nixl_agent_config(
            enable_prog_thread=progress == "nixl", num_threads=num_threads, backends=list(backends)
        )
        agent = api.nixl_agent(name, config)
    except Exception as err:
        raise blame.mapped(err, f"create an agent with backends {', '.join(backends)}") from err
    missing = [b for b in backends if b not in agent.backends]
    if missing:
        raise TransportError(
            f"NIXL has no backend {', '.join(missing)} here; it has {', '.join(agent.get_plugin_list())}. "
            "The operator's `backends` is wrong or the nixl package lacks that plugin"
        )
    return agent


def _names(blob: bytes, name: str) -> bool:
    """Whether a blob bears this agent's name, as NIXL 1.5 writes a string: length, text, bar."""
    text = name.encode()
    return len(text).to_bytes(8, "little") + text + b"|" in blob


def _move_away(peer: _Peer) -> None:
    """What is read of it from now on is read by NIXL."""
    if peer.near is not None:
        peer.near.close()
        peer.near = None


def _give_back(read: _Read, forget_agent: bool = False) -> None:
    """Free NIXL's bookkeeping of a read. It may refuse; the agent frees it at its end then."""
    native, read.native = read.native, None
    if native is None:
        return
    try:
        native.release()
    except Exception as err:  # noqa: BLE001 - nixl's have no common base
        log.debug("NIXL keeps a handle of %s: %s", read.peer, blame.text(err))
    if forget_agent:
        native._released = True  # or its finalizer would ask for the agent
        native._agent = None
