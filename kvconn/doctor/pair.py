"""A holder and a reader, two processes: one small and one large read, a notification, and memcpy beside them.

Rules
1. Both speak the transport that connectors use, with its defaults, but every read is NIXL's: which way UCX takes is the
   question, and a connector on the same host may read without it. The holder only polls, as P does.
2. Everything is warmed up once, then measured; memcpy copies the same number of bytes in the same process between the
   reads. Medians are reported, never compared to a figure of another machine.
3. The bytes read are compared with what the holder wrote.
4. Every wait in a child ends at the child's own deadline; the parent kills both at a later one.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import numpy as np

from kvconn.doctor.children import Children, Ending, begin, decoded, explain, say_result
from kvconn.doctor.findings import Finding, fail, ok, warn
from kvconn.doctor.ucx import Pick, picks
from kvconn.transport.base import HandleState, MemoryRegion, MemType

__all__ = ["Measured", "PairFacts", "gather", "hold", "judge", "read"]

LIMIT: Final = 60.0
#: a child gives up before its parent kills it, and says where it stood.
CHILD_LIMIT: Final = 45.0
SIZE: Final = 64 << 20
SMALL: Final = 8
ROUNDS: Final = 5
SMALL_ROUNDS: Final = 50
#: reads this much of memcpy's speed are not tcp's; tcp on one host was a tenth of memcpy.
NEAR_MEMCPY: Final = 0.25
GIB: Final = 1e9


class Measured(msgspec.Struct, frozen=True):
    """Seconds, medians. ``notification`` is there and back."""

    size: int
    large: float
    small: float
    notification: float
    memcpy: float
    right: bool


class PairFacts(msgspec.Struct, frozen=True):
    """``measured`` None: ``trouble`` says of whom and why."""

    memory: MemType
    measured: Measured | None = None
    picks: tuple[Pick, ...] = ()
    trouble: str = ""


class Hello(msgspec.Struct, frozen=True):
    """What either side tells the other over their socket."""

    blob: bytes
    address: int


# --- the parent ---------------------------------------------------------------------------------------------------


def gather(memory: MemType = "DRAM") -> PairFacts:
    ours, theirs = socket.socketpair()
    with ours, theirs, Children() as children:
        try:
            holder = children.start(["holder", str(ours.fileno()), memory], fds=[ours.fileno()])
            reader = children.start(
                ["reader", str(theirs.fileno()), memory], {"UCX_PROTO_INFO": "y"}, fds=[theirs.fileno()]
            )
        except OSError as err:
            return PairFacts(memory, trouble=f"cannot start a process: {err}")
        ours.close()  # so that either side sees the other's end
        theirs.close()
        until = time.monotonic() + LIMIT
        read_end = children.wait(reader, until, LIMIT)
        return facts_of(memory, read_end, children.wait(holder, min(until, time.monotonic() + 5.0), LIMIT))


def facts_of(memory: MemType, reader: Ending, holder: Ending) -> PairFacts:
    measured = decoded(reader, Measured)
    trouble = ""
    if measured is None:
        trouble = f"the reader: {explain(reader)}"
        if holder.error or holder.status not in (0, None):
            trouble += f"; the holder: {explain(holder)}"
    return PairFacts(memory, measured, picks(reader.stderr), trouble)


# --- the children -------------------------------------------------------------------------------------------------


class _Buffer:
    """Bytes to move. In VRAM a torch tensor, in DRAM an array."""

    def __init__(self, memory: MemType, size: int) -> None:
        self.memory = memory
        self.device: Any = None
        if memory == "VRAM":
            import torch

            self.device = torch
            self.data: Any = torch.empty(size, dtype=torch.uint8, device="cuda:0")
            self.address = int(self.data.data_ptr())
        else:
            self.data = np.zeros(size, np.uint8)
            self.address = int(self.data.ctypes.data)

    def fill(self) -> None:
        pattern = _pattern(len(self.data))
        self.data[:] = self.device.from_numpy(pattern).to("cuda:0") if self.device else pattern
        self._finish()

    def copy_from(self, other: _Buffer) -> None:
        self.data[:] = other.data
        self._finish()

    def right(self) -> bool:
        held = self.data.cpu().numpy() if self.device else self.data
        return bool(np.array_equal(held, _pattern(len(held))))

    def _finish(self) -> None:
        if self.device:
            self.device.cuda.synchronize()


def _pattern(size: int) -> Any:
    """Bytes that depend on their place."""
    return np.resize(np.random.default_rng(7).integers(1, 256, 65521, np.uint8), size)


def hold(fd: str, memory: MemType) -> None:
    """In the holder: register, tell, answer each notification, end when the reader hangs up."""
    from kvconn.transport.nixl import NixlTransport

    with Connection(int(fd)) as line:
        begin("make a NIXL agent")
        transport = NixlTransport(batch=False)
        buffer = _Buffer(memory, SIZE)
        buffer.fill()
        begin("register memory")
        transport.register([MemoryRegion(buffer.address, SIZE, memory)])
        begin("exchange metadata")
        line.send_bytes(msgspec.msgpack.encode(Hello(transport.metadata(), buffer.address)))
        peer = transport.add_peer(_hello(line).blob)
        begin("serve")
        end = time.monotonic() + CHILD_LIMIT
        while time.monotonic() < end and not line.poll(0):
            for _, message in transport.notifications():
                transport.notify(peer, message)
        transport.close()


def read(fd: str, memory: MemType) -> None:
    """In the reader: read, compare, notify, copy; one result."""
    from kvconn.transport.nixl import NixlTransport

    with Connection(int(fd)) as line:
        begin("make a NIXL agent")
        transport = NixlTransport(batch=False)
        mine, other = _Buffer(memory, SIZE), _Buffer(memory, SIZE)
        begin("register memory")
        transport.register([MemoryRegion(mine.address, SIZE, memory)])
        begin("exchange metadata")
        theirs = _hello(line)
        peer = transport.add_peer(theirs.blob)
        line.send_bytes(msgspec.msgpack.encode(Hello(transport.metadata(), mine.address)))
        end = time.monotonic() + CHILD_LIMIT

        def reading(size: int) -> None:
            pair = [np.array([[side, size]], np.int64) for side in (mine.address, theirs.address)]
            handle = transport.post_read(peer, *pair, local_mem=memory, remote_mem=memory)
            _until(lambda: transport.poll(handle) is not HandleState.PENDING, end)
            if transport.poll(handle) is HandleState.ERR:
                raise RuntimeError(f"a read of {size} bytes failed: {transport.reason(handle)}")
            transport.release(handle)

        def telling() -> None:
            transport.notify(peer, b"doctor")
            _until(lambda: bool(transport.notifications()), end)

        say_result(_measure(reading, telling, mine, other))
        transport.close()


def _measure(reading: Callable[[int], None], telling: Callable[[], None], mine: _Buffer, other: _Buffer) -> Measured:
    begin(f"read {SMALL} bytes")
    reading(SMALL)
    small = [_timed(lambda: reading(SMALL)) for _ in range(SMALL_ROUNDS)]
    begin(f"read {SIZE >> 20} MiB")
    reading(SIZE)
    right = mine.right()
    other.copy_from(mine)
    large, copies = [], []
    for _ in range(ROUNDS):
        large.append(_timed(lambda: reading(SIZE)))
        copies.append(_timed(lambda: other.copy_from(mine)))
    begin("notify")
    telling()
    told = [_timed(telling) for _ in range(SMALL_ROUNDS)]
    return Measured(
        size=SIZE,
        large=statistics.median(large),
        small=statistics.median(small),
        notification=statistics.median(told),
        memcpy=statistics.median(copies),
        right=right and mine.right(),
    )


def _timed(what: Callable[[], None]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def _until(done: Callable[[], bool], end: float) -> None:
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {CHILD_LIMIT:.0f} s")


def _hello(line: Connection) -> Hello:
    if not line.poll(CHILD_LIMIT):
        raise TimeoutError(f"the other side said nothing within {CHILD_LIMIT:.0f} s")
    try:
        return msgspec.msgpack.decode(line.recv_bytes(1 << 20), type=Hello)
    except EOFError:
        os._exit(1)  # the other side ended, and says itself why


# --- what it means ------------------------------------------------------------------------------------------------


def judge(facts: PairFacts, *, cma: bool, remote: bool) -> list[Finding]:
    kind = "host memory" if facts.memory == "DRAM" else "GPU memory"
    if facts.measured is None:
        return [
            fail(
                f"two processes of this host cannot read each other's {kind} through NIXL",
                f"A decode engine could not read either. What happened: {facts.trouble}",
                "see the findings about CMA, UCX_TLS and UCX_NET_DEVICES; UCX_TLS=tcp is the plainest that can work",
            )
        ]
    found = [_judge_bytes(facts.measured, kind), _judge_pick(facts, facts.measured, kind, cma=cma)]
    if remote:
        found.append(ok("both processes ran on this host: the way between your two hosts was not measured"))
    return found


def _judge_bytes(measured: Measured, kind: str) -> Finding:
    rate, copy = measured.size / measured.large / GIB, measured.size / measured.memcpy / GIB
    said = (
        f"{kind}: a {measured.size >> 20} MiB read {rate:.2f} GB/s, {rate / copy:.2f} of memcpy's {copy:.2f}; {SMALL} "
        f"bytes {measured.small * 1e6:.0f} us; a notification and its answer {measured.notification * 1e6:.0f} us"
    )
    if measured.right:
        return ok(said)
    return fail(
        f"{said}; the bytes read are not those that were written",
        "Every block that a decode engine reads would be wrong, without an error.",
        "UCX_TLS=tcp, and report it together with this output as JSON",
    )


def _judge_pick(facts: PairFacts, measured: Measured, kind: str, *, cma: bool) -> Finding:
    if facts.picks:
        shown = "; ".join(f"{pick.wire} ({pick.how}, {pick.range} bytes)" for pick in facts.picks)
        title, wires = f"for {kind} UCX picks {shown}", " ".join(pick.wire for pick in facts.picks)
    else:
        near = measured.memcpy / measured.large > NEAR_MEMCPY
        wires = "memory" if near else "tcp"
        title = (
            f"for {kind} UCX did not say what it picks; inferred from its speed: "
            f"{'a copy by the kernel or shared memory' if near else 'tcp'}"
        )
    if "tcp" not in wires:
        return ok(title)
    why = "CMA is allowed, so UCX_TLS or UCX_NET_DEVICES is why." if cma else "CMA is refused here."
    return warn(
        title,
        f"Two engines of one host read through sockets, and the holder has to help. {why} Right if P and D are to be "
        "on two hosts without RDMA.",
        "unset UCX_TLS, or add cma" if cma else "see the finding about CMA",
    )
