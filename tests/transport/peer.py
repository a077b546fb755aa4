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

import ctypes
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
Kind = Literal["raw", "transport", "probe"]
TCP = {"UCX_TLS": "tcp"}
#: how long a child's own waiting may take; orders get this plus the time to start a python.
WAIT = 15.0


class ChildError(Exception):
    """The order raised in the child. ``type_name`` is the class it raised, ``attrs`` what the exception carried."""

    def __init__(self, type_name: str, text: str, attrs: dict[str, Any]) -> None:
        super().__init__(f"{type_name}: {text}")
        self.type_name = type_name
        self.text = text
        self.attrs = attrs


class Child:
    """A child process and the orders one may give it. A context manager: leaving it kills the child."""

    def __init__(self, kind: Kind, env: dict[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", str(Path(__file__).resolve()), kind, str(theirs.fileno())],
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
        except EOFError:
            raise RuntimeError(f"child {self.pid} ended with status {self._process.wait(WAIT)}") from None
        if not ok:
            raise ChildError(*value)
        return value

    def __call__(self, order: str, *args: Any, **kwargs: Any) -> Any:
        self.send(order, *args, **kwargs)
        return self.receive()

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

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def __enter__(self) -> Child:
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


class Raw:
    """A bare NIXL agent and one registered buffer: what the facts are measured on."""

    def __init__(self) -> None:
        self.buf: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.agent: Any = None
        self.handles: list[Any] = []

    def start(self, nbytes: int, fill: int = 0, progress_thread: bool = False) -> tuple[bytes, int]:
        from nixl._api import nixl_agent, nixl_agent_config

        self.buf = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # page aligned, so that pages can be protected
        self.buf[:] = fill
        config = nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self.agent = nixl_agent(f"raw-{os.getpid()}", config)
        self.agent.register_memory(np.array([[self.address, nbytes, 0]], np.int64), "DRAM")
        return self.agent.get_agent_metadata(), self.address

    @property
    def address(self) -> int:
        return self.buf.ctypes.data

    def add(self, blob: bytes) -> str:
        name: bytes = self.agent.add_remote_agent(blob)
        return name.decode()

    def post(self, peer: str, parts: list[tuple[int, int, int]]) -> tuple[int, str]:
        """Post one READ of ``(local offset, remote address, length)`` parts; its index and the state post gave."""
        local = np.array([[self.address + off, length, 0] for off, _, length in parts], np.int64)
        remote = np.array([[address, length, 0] for _, address, length in parts], np.int64)
        handle = self.agent.initialize_xfer(
            "READ", self.agent.get_xfer_descs(local, "DRAM"), self.agent.get_xfer_descs(remote, "DRAM"), peer
        )
        self.handles.append(handle)
        return len(self.handles) - 1, str(self.agent.transfer(handle))

    def state(self, index: int, polls: int = 1) -> str:
        """The state after this many polls."""
        state = ""
        for _ in range(polls):
            state = _or_error(lambda: str(self.agent.check_xfer_state(self.handles[index])))
        return state

    def wait(self, index: int, *states: str) -> str:
        until(lambda: self.state(index) in states, f"state {states}, is {self.state(index)}")
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

    def progress_until(self, fill: int, count: int) -> int:
        until(lambda: (self.progress(), self.landed(fill) >= count)[1], f"{count} bytes, are {self.landed(fill)}")
        return self.landed(fill)

    def landed(self, fill: int) -> int:
        """How many bytes of the buffer have this value."""
        return int(np.count_nonzero(self.buf == fill))

    def fill(self, value: int) -> None:
        self.buf[:] = value

    def protect(self, offset: int, length: int) -> None:
        """Make these pages unreadable: who copies from them fails, as on memory that was unmapped after its handshake."""
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(self.address + offset), length, 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def cut(self, which: int) -> int:
        """Shut down one of this process's tcp connections under UCX, as a middlebox would; how many there are."""
        found = []
        for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
            try:
                sock = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue  # not a socket, or the descriptor of the listing itself
            try:
                sock.getpeername()
            except OSError:
                sock.close()
                continue
            if sock.family == socket.AF_INET:
                found.append(sock)
            else:
                sock.close()
        ours = {sock.getsockname() for sock in found}  # an agent is connected to itself too
        outside = [sock for sock in found if sock.getpeername() not in ours]
        for i, sock in enumerate(outside):
            if i == which:
                sock.shutdown(socket.SHUT_RDWR)
        for sock in found:
            sock.close()
        return len(outside)

    def destroy(self) -> None:
        """Destroy the agent: its destructor runs when the last reference is gone, handles hold one each."""
        for handle in self.handles:
            handle._released = True  # their finalizers would release; destruction is what is measured
        self.handles.clear()
        self.agent = None
        gc.collect()

    def mapped(self) -> int:
        return threading.active_count()


def _or_error(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as err:
        return type(err).__name__


def _describe(err: BaseException) -> tuple[str, str, dict[str, Any]]:
    attrs = {k: v for k, v in vars(err).items() if isinstance(v, (int, str, bytes, type(None)))}
    return type(err).__name__, str(err), attrs


def main(kind: str, fd: int) -> None:
    conn = Connection(fd)
    target = {"raw": Raw}[kind]()
    while True:
        try:
            order, args, kwargs = conn.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(target, order)(*args, **kwargs))
        except Exception as err:
            answer = (False, _describe(err))
        conn.send(answer)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1], int(sys.argv[2]))
