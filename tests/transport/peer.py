"""An agent in a process of its own, driven over a socket pair.

Rules
1. The UCX environment is read once per process, before its first agent, and a test that stops or kills a peer must not
   stop itself: so both sides of every test live in children, and the test process holds no agent at all.
2. A child does exactly what it is told and then waits for the next order. It makes no progress on its own unless its
   agent has a thread, so a test decides which side moves when (F2).
3. Every order has a deadline on the test's side. A child that misses it is killed and the test fails.
4. In a child nothing sleeps to wait for something: it polls a condition until the order's own deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from kvconn.errors import TransportError
from kvconn.transport.base import MemoryRegion
from kvconn.transport.ucx import prepare_ucx_env

ROOT = Path(__file__).resolve().parents[2]
Kind = Literal["raw", "transport"]
#: of one read: offset in our buffer, address in the peer's memory, length.
Parts = list[tuple[int, int, int]]
#: what a test means by a network: between processes of one host UCX would copy with the kernel's help (F5).
TCP = {"UCX_TLS": "tcp"}
#: whatever UCX likes, which between processes of one host is CMA where it is permitted.
ANY = {"UCX_TLS": "all"}
#: how long a child's own waiting may take; orders get this plus the time to start a python.
WAIT = 15.0
#: and of all rounds of a hammer together
HAMMER = 3 * WAIT


class ChildError(Exception):
    """The order raised in the child. ``type_name`` is the class it raised, ``attrs`` what the exception carried."""

    def __init__(self, type_name: str, text: str, attrs: dict[str, Any]) -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.attrs = attrs


class ChildGoneError(RuntimeError):
    """The child ended instead of answering."""

    def __init__(self, pid: int, status: int) -> None:
        super().__init__(f"child {pid} ended with status {status}")
        self.status = status


class Child:
    """A child process and the orders one may give it. A context manager: leaving it kills the child."""

    def __init__(self, kind: Kind, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.transport.peer", kind, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(env or {})},
                cwd=ROOT,
            )
        self._conn = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: str, *args: Any, **kwargs: Any) -> None:
        """Give an order without waiting for its answer."""
        self._conn.send((order, args, kwargs))

    def receive(self, timeout: float = 2 * WAIT) -> Any:
        """The answer to the oldest order given."""
        if not self._conn.poll(timeout):
            self.kill()
            raise TimeoutError(f"child {self.pid} did not answer within {timeout} s")
        try:
            ok, value = self._conn.recv()
        except (EOFError, ConnectionError):
            raise ChildGoneError(self.pid, self._process.wait(WAIT)) from None
        if not ok:
            raise ChildError(*value)
        return value

    def __call__(self, order: str, *args: Any, **kwargs: Any) -> Any:
        try:
            self.send(order, *args, **kwargs)
        except ConnectionError:
            raise ChildGoneError(self.pid, self._process.wait(WAIT)) from None
        return self.receive()

    def lives_or_aborted(self, order: str, *args: Any) -> bool:
        """Give an order to a peer whose reader went away: whether it answered. Else UCX aborted it (F6), which depends
        on what the kernel had told it by then; that is the one other end allowed."""
        try:
            self(order, *args)
        except ChildGoneError as gone:
            if gone.status != -signal.SIGABRT:
                raise
            return False
        return True

    def stop(self) -> None:
        """SIGSTOP; returns when the kernel says that the process is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: self._state() == "T", f"child {self.pid} to stop")

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone and its sockets are closed."""
        self._process.kill()
        self._process.wait(WAIT)

    def exit_code(self) -> int:
        """Wait for the process to end by itself."""
        return self._process.wait(WAIT)

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._conn.close()


def until(condition: Callable[[], object], what: str, timeout: float = WAIT, pause: float = 0.0) -> None:
    """Ask ``condition`` again and again until it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout} s for {what}")
        time.sleep(pause)


class Memory:
    """A buffer of this process, and what a test asks about it. Page aligned, so that pages can be protected."""

    def __init__(self) -> None:
        self.buf: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def allocate(self, nbytes: int, fill: int) -> None:
        self.buf = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.fill(fill)

    @property
    def address(self) -> int:
        return self.buf.ctypes.data

    def fill(self, value: int) -> None:
        self.buf[:] = value

    def scramble(self, seed: int) -> None:
        """Bytes that say where they are: a wrong, short or shifted read shows."""
        self.buf[:] = np.random.default_rng(seed).integers(0, 256, len(self.buf), np.uint8)

    def read(self, offset: int, length: int) -> bytes:
        return self.buf[offset : offset + length].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        self.buf[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def landed(self, value: int) -> int:
        """How many bytes of the buffer have this value."""
        return int(np.count_nonzero(self.buf == value))

    def protect(self, offset: int, length: int) -> None:
        """Make these pages unreadable: who copies from them fails, as on memory that went away after its handshake."""
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(self.address + offset), length, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def cut(self, which: int) -> int:
        """Shut down one of this process's tcp connections to another one, as a middlebox would; how many there are."""
        ours: set[Any] = set()
        peers: list[tuple[socket.socket, Any]] = []
        for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # not a socket, not connected, or the descriptor of the listing itself
                sock = socket.socket(fileno=os.dup(fd))
                if sock.family == socket.AF_INET:
                    peers.append((sock, sock.getpeername()))
                    ours.add(sock.getsockname())
        outside = [sock for sock, name in peers if name not in ours]  # an agent is connected to itself too
        if which < len(outside):
            outside[which].shutdown(socket.SHUT_RDWR)
        for sock, _ in peers:
            sock.close()
        return len(outside)

    def threads(self) -> list[str]:
        """The Python threads of this process."""
        return [thread.name for thread in threading.enumerate()]

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Raw(Memory):
    """A bare NIXL agent and one registered buffer: what the facts are measured on."""

    def __init__(self) -> None:
        super().__init__()
        self.agent: Any = None
        self.handles: list[Any] = []

    def start(self, nbytes: int, fill: int = 0, progress_thread: bool = False) -> tuple[bytes, int]:
        """Make the agent; its blob and the buffer's address."""
        prepare_ucx_env()
        from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-untyped]

        self.allocate(nbytes, fill)
        config = nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self.agent = nixl_agent(f"raw-{os.getpid()}", config)
        self.agent.register_memory(np.array([[self.address, nbytes, 0]], np.int64), "DRAM")
        return self.agent.get_agent_metadata(), self.address

    def add(self, blob: bytes) -> str:
        name: bytes = self.agent.add_remote_agent(blob)
        return name.decode()

    def post(self, peer: str, parts: Parts) -> tuple[int, str]:
        """Post one READ of ``(local offset, remote address, length)`` parts; its index and the state post gave."""
        local = np.array([[self.address + off, length, 0] for off, _, length in parts], np.int64)
        remote = np.array([[address, length, 0] for _, address, length in parts], np.int64)
        handle = self.agent.initialize_xfer(
            "READ", self.agent.get_xfer_descs(local, "DRAM"), self.agent.get_xfer_descs(remote, "DRAM"), peer
        )
        self.handles.append(handle)
        return len(self.handles) - 1, str(self.agent.transfer(handle))

    def state(self, index: int, polls: int = 1) -> str:
        """The state after this many polls; the name of what it raised, if it raised."""
        state = ""
        for _ in range(polls):
            try:
                state = str(self.agent.check_xfer_state(self.handles[index]))
            except Exception as err:  # noqa: BLE001 - the test names what it expects
                state = type(err).__name__
        return state

    def ended(self, index: int) -> str:
        """Poll until the state is no longer PROC."""
        until(lambda: self.state(index) != "PROC", "a read to end")
        return self.state(index)

    def release(self, index: int) -> None:
        self.agent.release_xfer_handle(self.handles[index])

    def remove(self, peer: str) -> None:
        self.agent.remove_remote_agent(peer)

    def notify(self, peer: str, message: bytes) -> None:
        self.agent.send_notif(peer, message)

    def progress(self, polls: int = 1) -> dict[str, list[bytes]]:
        got: dict[str, list[bytes]] = {}
        for _ in range(polls):
            for name, messages in self.agent.get_new_notifs().items():
                got.setdefault(name, []).extend(messages)
        return got

    def destroy(self) -> None:
        """Destroy the agent under whatever is posted: its destructor runs when the last reference is gone, and every
        handle holds one."""
        while self.handles:
            self.handles.pop()._released = True  # a handle's finalizer would release it; that is another test
        native = weakref.ref(self.agent.agent)
        self.agent = None
        if native() is not None:
            raise RuntimeError("somebody holds the agent")


class Served(Memory):
    """Our transport and one registered buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.transport: Any = None

    def start(self, nbytes: int, fill: int = 0, **kwargs: Any) -> tuple[bytes, int]:
        """Make the transport; its blob and the buffer's address."""
        from kvconn.transport.nixl import NixlTransport

        self.allocate(nbytes, fill)
        self.transport = NixlTransport(**kwargs)
        self.transport.register([MemoryRegion(self.address, nbytes)])
        return self.transport.metadata(), self.address

    def post(self, peer: str, parts: Parts) -> int:
        local = np.array([[self.address + off, length] for off, _, length in parts], np.int64)
        remote = np.array([[address, length] for _, address, length in parts], np.int64)
        return int(self.transport.post_read(peer, local, remote))

    def state(self, handle: int) -> str:
        return str(self.transport.poll(handle).name)

    def ended(self, handle: int) -> str:
        until(lambda: self.state(handle) != "PENDING", "a read to end", pause=100e-6)
        return self.state(handle)

    def hear(self, count: int = 1) -> list[tuple[str, bytes]]:
        """The next notifications, this many at least."""
        got: list[tuple[str, bytes]] = []

        def enough() -> bool:
            got.extend(self.transport.notifications())
            return len(got) >= count

        until(enough, f"{count} notifications", pause=100e-6)
        return got

    def call(self, method: str, *args: Any) -> Any:
        """Any method of the transport whose arguments and result travel."""
        return getattr(self.transport, method)(*args)

    def hammer(self, peer: str, address: int, rounds: int) -> list[str]:
        """Two threads read and two threads ask for notifications, all on this transport; what went wrong.

        Thread ``k`` reads the peer's 4 KiB page ``k + 2 i`` into its own page, again and again.
        """
        wrong: list[str] = []
        reading = threading.Event()
        reading.set()

        def reads(k: int) -> None:
            try:
                for i in range(rounds):
                    there = (k + 2 * i) % (len(self.buf) // 4096 - 2) + 2
                    handle = self.post(peer, [(k * 4096, address + there * 4096, 4096)])
                    if (state := self.ended(handle)) != "DONE":
                        wrong.append(f"thread {k} round {i}: {state} {self.transport.reason(handle)}")
                    self.transport.release(handle)
            except Exception as err:  # noqa: BLE001 - the test gets it
                wrong.append(f"thread {k}: {err!r}")

        def asks() -> None:
            while reading.is_set():
                self.transport.notifications()

        readers = [threading.Thread(target=reads, args=(k,)) for k in range(2)]
        askers = [threading.Thread(target=asks) for _ in range(2)]
        for thread in readers + askers:
            thread.start()
        deadline = time.monotonic() + HAMMER
        for thread in readers:
            thread.join(max(0.0, deadline - time.monotonic()))
        reading.clear()
        for thread in askers:
            thread.join(WAIT)
        return wrong + [f"{thread.name} hangs" for thread in readers + askers if thread.is_alive()]

    def close_holding_errors(self, peer: str) -> list[str]:
        """Close while somebody still handles our errors, whose tracebacks hold NIXL's objects."""
        errors: list[TransportError] = []
        for parts in ([(0, 8, 8)], [(len(self.buf), 8, 8)]):
            try:
                self.post(peer, parts)
            except TransportError as err:
                errors.append(err)
        self.transport.close()
        return [str(err) for err in errors]

    def forget(self) -> None:
        """Drop the transport without closing it."""
        self.transport = None

    def near(self, peer: str) -> bool:
        """Whether many small parts of this peer are read at once."""
        return self.transport._peers[peer].near is not None

    def probed(self, peer: str) -> bool:
        """Whether NIXL has brought anything of this peer yet."""
        return self.transport._peers[peer].probe is not None

    def get(self, attribute: str) -> Any:
        return getattr(self.transport, attribute)

    def repr(self) -> str:
        return repr(self.transport)


def _describe(err: BaseException) -> tuple[str, str, dict[str, Any]]:
    return type(err).__name__, str(err), {k: v for k, v in vars(err).items() if isinstance(v, int | str | None)}


def _do_not_import_torch() -> None:
    """nixl imports all of torch to learn that a CPU build has no CUDA, which is most of a child's start."""
    with contextlib.suppress(ImportError, AttributeError):
        import nixl_meta_utils  # type: ignore[import-untyped]

        if nixl_meta_utils._torch_cuda_version_from_disk() is None:
            nixl_meta_utils.detect_cuda_major = lambda: None


def main(kind: str, fd: int) -> None:
    _do_not_import_torch()
    conn = Connection(fd)
    target: Memory = {"raw": Raw, "transport": Served}[kind]()
    while True:
        try:
            order, args, kwargs = conn.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(target, order)(*args, **kwargs))
        except Exception as err:  # noqa: BLE001 - the test gets it as ChildError
            answer = (False, _describe(err))
        conn.send(answer)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
