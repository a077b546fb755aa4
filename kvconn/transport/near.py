"""The memory of another process on this host, many parts by one system call.

UCX's cma makes a request and a system call of its own for every part. ``process_vm_readv`` takes 1024 parts at once,
and the rest is most of what small parts cost; of a few large parts it costs no more (docs/performance.md).

Rules
1. It is the call that UCX's cma makes, and is made only where UCX may make it, on either side: a process whose UCX may
   not says nothing of itself.
2. An agent's name says where its process lives: boot and pid namespace, pid, start time. A pidfd is held, and the
   process behind it is alive after the copy: so it was that process that was read, and not one that got its pid.
   A name that tells of this process is met with nobody: a peer does not choose what is read of our own memory.
3. What was asked for has all come when the call returns, and nothing is under way then. Whatever is not that, NIXL is
   asked for instead, and it says what is wrong. The kernel does not know what they registered; places come of their
   handshake, and who lies in it can as well hand over other bytes.
4. To the kernel each side is a stream of bytes, cut as that side likes: neighbours are joined on each side by itself.
   What counts is their side, whose pages are looked up part by part; so callers name parts in the order of theirs.
5. A second thread takes calls from the same queue, while there are any; it sleeps otherwise. A read returns when both
   have done what they took. Where no thread can be started the caller's does all.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import select
from collections import deque
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvconn.transport.base import Descs
from kvconn.transport.ucx import cma_usable

__all__ = ["Near", "may_be_near", "whereabouts"]

#: parts of one call: the kernel's IOV_MAX
AT_ONCE: Final = 1024
#: bytes of one call: half a millisecond, so that two threads end together
MOST: Final = 4 << 20
_PROC: Final = Path("/proc")


def may_be_near(tls: str) -> bool:
    """Does ``UCX_TLS`` leave UCX its cma, and do the kernel and this process's sandbox?"""
    names = set(tls.lower().removeprefix("^").replace(" ", "").split(","))
    chosen = bool(names & {"all", "cma", "sm", "shm"})
    return chosen != tls.startswith("^") and hasattr(os, "pidfd_open") and _readv() is not None and cma_usable()


def whereabouts() -> str:
    """Of this process, for the end of its agent's name; empty where ``/proc`` does not say."""
    try:
        return f"@{_host()}.{os.getpid()}.{_began(os.getpid())}"
    except (OSError, ValueError, IndexError):
        return ""


def _host() -> str:
    """Processes that see each other under their pids have this in common."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {os.readlink(_PROC / 'self/ns/pid')}".encode()).hexdigest()[:16]


def _began(pid: int) -> int:
    """Its start, in the kernel's ticks. The command in front of it may hold anything."""
    return int((_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[19])


def _readv() -> Any:
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]
    return call


class Near:
    """The process of a peer's agent. Use :meth:`meet`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self._call = _readv()
        self._alive = select.poll()
        self._alive.register(pidfd, select.POLLIN)

    @classmethod
    def meet(cls, name: str) -> Near | None:
        """The process that this agent's name tells of, if it lives on this host; a name may say anything (C9)."""
        parts = name.rpartition("@")[2].split(".")
        if len(parts) != 3 or not all(one.isascii() and one.isdigit() and len(one) < 20 for one in parts[1:]):
            return None
        pid, began = int(parts[1]), int(parts[2])
        pidfd = -1
        try:
            if parts[0] != _host() or not 0 < pid < 1 << 31 or pid == os.getpid():
                return None
            pidfd = os.pidfd_open(pid)
            if _began(pid) == began:
                near = cls(pid, pidfd)
                pidfd = -1
                return near
        except (OSError, ValueError, IndexError):
            pass
        finally:
            if pidfd >= 0:
                os.close(pidfd)
        return None

    def read(self, local: Descs, remote: Descs, second: Executor | None = None) -> bool:
        """Copy ``remote[i]`` of it to ``local[i]`` for every i; False when not all of it is known to have come.

        ``second``: whose thread may help. Nothing is under way when this returns.
        """
        here, mine, there, theirs = _calls(local, remote)
        calls = deque(range(len(mine) - 1))

        def copy() -> bool:
            while True:
                try:
                    i = calls.popleft()
                except IndexError:
                    return True
                ours, others = here[mine[i] : mine[i + 1]], there[theirs[i] : theirs[i + 1]]
                got = self._call(self._pid, ours.ctypes.data, len(ours), others.ctypes.data, len(others), 0)
                if got != int(ours[:, 1].sum()):
                    calls.clear()
                    return False

        helped: Future[bool] | None = None
        if second is not None and len(calls) > 1:
            with contextlib.suppress(RuntimeError):  # no thread left, or it was ended
                helped = second.submit(copy)
        good = copy()
        if helped is not None and not helped.cancel():  # it may not have begun
            good = helped.result() and good
        return good and not self._alive.poll(0)

    def close(self) -> None:
        """Idempotent."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __repr__(self) -> str:
        return f"<Near pid {self._pid}>"


def _calls(local: Descs, remote: Descs) -> tuple[Descs, list[int], Descs, list[int]]:
    """Vectors of both sides, each followed by where those of every call begin and those of the last one end."""
    largest = int(local[:, 1].max())
    if len(local) == 1 and largest <= MOST:  # a fence word: what follows costs ten times what reading it does
        return np.ascontiguousarray(local), [0, 1], np.ascontiguousarray(remote), [0, 1]
    if largest > MOST:
        local, remote = _cut(local), _cut(remote)
    every = max(1, min(AT_ONCE, MOST // largest))
    return *_vectors(local, every), *_vectors(remote, every)


def _cut(parts: Descs) -> Descs:
    """These parts, none longer than ``MOST``."""
    pieces = -(-parts[:, 1] // MOST)
    which = np.repeat(np.arange(len(parts)), pieces)
    off = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * MOST
    return np.stack([parts[which, 0] + off, np.minimum(parts[which, 1] - off, MOST)], axis=1)


def _vectors(parts: Descs, every: int) -> tuple[Descs, list[int]]:
    """Address and length of what lies together, and the number of the vector that begins every so many parts."""
    begins = np.ones(len(parts), np.bool_)
    begins[1:] = parts[1:, 0] != parts[:-1, 0] + parts[:-1, 1]
    begins[::every] = True
    first = np.flatnonzero(begins)
    vectors = np.stack([parts[first, 0], np.add.reduceat(parts[:, 1], first)], axis=1)
    return vectors, [*np.searchsorted(first, np.arange(0, len(parts), every)).tolist(), len(first)]
