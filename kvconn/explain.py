"""What a running engine waits for, told to its owner: one Unix socket per connector, found by process or directory.

Rules
1. The socket is its owner's alone: mode 0600 before it listens, in a directory of mode 0700 that is ours. A directory
   that is somebody else's, or open to others, is not used, and the engine runs without a socket.
2. Asking changes nothing. The answer is made on the socket's own thread while the engine steps: what changes under
   it is looked at again, a few times, and what is told may be a step old.
3. Nothing here ends an engine: what fails is logged once.
4. A socket whose process is gone is removed by whoever finds it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from kvconn.config import LIMITS

__all__ = ["ExplainServer", "Report", "ask", "find", "run_dir"]

log = logging.getLogger("kvconn")
#: lines of one report; more are counted, not told
MAX_LINES = 10_000
MAX_BYTES = 16 << 20
_TRIES = 20
_POLL = 0.2
_numbers = itertools.count()
Half = Literal["scheduler", "worker"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One connector half's answer. ``lines``: one per thing that it waits for or holds; ``left_out``: how many more."""

    engine_id: str
    half: Half
    rank: int | None
    pid: int
    summary: str
    lines: tuple[str, ...]
    left_out: int = 0


def run_dir() -> Path:
    """``KVCONN_RUN_DIR``, else ``$XDG_RUNTIME_DIR/kvconn``, else a directory of this user's in the temporary one."""
    if named := os.environ.get("KVCONN_RUN_DIR"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvconn"
    return Path(tempfile.gettempdir()) / f"kvconn-{os.getuid()}"


class ExplainServer:
    """Answers for one outermost connector half. Never raises; ``path`` is None when there is no socket.

    ``explain`` gives the lines at a time of ``clock`` (:meth:`kvconn.base.KVConnector.explain`), ``summary`` one more
    that is told first. Both are called on this object's thread.
    """

    def __init__(
        self,
        explain: Callable[[float], list[str]],
        summary: Callable[[], str],
        engine_id: str,
        half: Half,
        rank: int | None = None,
        directory: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._explain = explain
        self._summary = summary
        self._engine_id = engine_id
        self._half: Half = half
        self._rank = rank
        self._clock = clock
        self.path: Path | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        directory = directory if directory is not None else run_dir()
        path = directory / f"{os.getpid()}.{next(_numbers)}.sock"
        try:
            _own(directory)
            self._socket = _listen(path)
        except OSError as err:
            log.warning("kvconn explain is off for this process: %s", err)
            return
        self.path = path
        self._thread = threading.Thread(target=self._run, name="kvconn-explain", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """What is told. Tries again when the engine changes a table meanwhile."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(RuntimeError):  # a table changed size while it was walked
                return self._look()
        return self._look()

    def _look(self) -> Report:
        lines = self._explain(self._clock())
        return Report(
            engine_id=self._engine_id,
            half=self._half,
            rank=self._rank,
            pid=os.getpid(),
            summary=self._summary(),
            lines=tuple(lines[:MAX_LINES]),
            left_out=max(0, len(lines) - MAX_LINES),
        )

    def _run(self) -> None:
        with self._socket as listening:
            listening.settimeout(_POLL)
            while not self._stop.is_set():
                try:
                    asking, _ = listening.accept()
                except TimeoutError:
                    continue
                except OSError as err:
                    log.warning("kvconn explain ends: %s", err)
                    return
                with asking, contextlib.suppress(OSError):  # whoever asked went away
                    asking.settimeout(LIMITS.explain)
                    asking.sendall(self._answer())

    def _answer(self) -> bytes:
        try:
            return msgspec.json.encode(self.report())
        except Exception as err:  # a connector's own explain may do anything; the asker is told
            log.exception("kvconn explain: the connector could not say what it waits for")
            return msgspec.json.encode({"error": f"{type(err).__name__}: {err}"})

    def close(self) -> None:
        """Stop answering and remove the socket. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(LIMITS.explain)
            self._thread = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def __repr__(self) -> str:
        return f"ExplainServer({self.path or 'off'})"


def _own(directory: Path) -> None:
    """Make the directory, or see that it is ours alone. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    seen = directory.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        got = f"{stat.filemode(seen.st_mode)} of user {seen.st_uid}"
        raise PermissionError(
            f"{directory}: expected a directory of user {os.getuid()} with mode 0700, got {got}; "
            "set KVCONN_RUN_DIR to another one"
        )
    for name in directory.glob("*.sock"):
        if not _alive(name):
            name.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    """A listening socket at ``path``. It gets that name last: one that refuses counts as left behind (rule 4)."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unnamed = path.with_suffix(".new")
    try:
        unnamed.unlink(missing_ok=True)
        listening.bind(str(unnamed))
        unnamed.chmod(0o600)  # nobody can connect before listen
        listening.listen(8)
        unnamed.rename(path)
    except OSError:
        listening.close()
        with contextlib.suppress(OSError):
            unnamed.unlink(missing_ok=True)
        raise
    return listening


def _alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        trying.settimeout(LIMITS.explain)
        try:
            trying.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # not ours to judge
    return True


# --- asking -------------------------------------------------------------------------------------------------------


def ask(path: Path, timeout: float = LIMITS.explain) -> Report:
    """The report of the connector behind ``path``. Raises OSError, ValueError for an answer that is none."""
    deadline = time.monotonic() + timeout
    got = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(timeout)
        while True:
            try:
                asking.connect(str(path))
                break
            except BlockingIOError:  # others are before us: Linux does not let a Unix socket wait for its turn
                if time.monotonic() > deadline:
                    raise TimeoutError(f"others asked all the time, for {timeout:g} s; ask again later") from None
                time.sleep(0.01)
        while True:
            asking.settimeout(max(0.01, deadline - time.monotonic()))
            part = asking.recv(1 << 16)
            if not part:
                break
            got += part
            if len(got) > MAX_BYTES:
                raise ValueError(f"{path}: expected at most {MAX_BYTES} bytes, got more")
    try:
        return msgspec.json.decode(bytes(got), type=Report)
    except msgspec.MsgspecError as err:
        raise ValueError(f"{path}: expected a report, got {bytes(got[:200])!r} ({err})") from None


def find(directory: Path, pid: int | None = None) -> tuple[list[Report], list[str]]:
    """Reports of all connectors with a socket in ``directory``, by engine, scheduler halves first; and what went wrong.

    ``pid``: only the engines that this process is part of. Sockets of processes that are gone are removed.
    """
    reports: list[Report] = []
    problems: list[str] = []
    for path in sorted(directory.glob("*.sock")):
        try:
            reports.append(ask(path))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        except (OSError, ValueError) as err:
            problems.append(f"{path}: {err}")
    if pid is not None:
        wanted = {report.engine_id for report in reports if report.pid == pid}
        reports = [report for report in reports if report.engine_id in wanted]
    reports.sort(key=lambda r: (r.engine_id, r.half != "scheduler", -1 if r.rank is None else r.rank))
    return reports, problems
