"""Short-lived children with deadlines.

Rules
1. A child says JSON lines (:class:`Line`) on stdout: the stage it begins, then one result or one error. So a child that
   hangs or is aborted still told where.
2. Output goes to unlinked files and is read up to a bound: a child that floods blocks nobody and fills no memory here.
3. No child outlives :class:`Children`: leaving it kills them, and the kernel kills them should we be killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, TypeVar

import msgspec

import kvconn

__all__ = ["Children", "Ending", "Line", "begin", "die_with_parent", "explain", "run_child", "say_error", "say_result"]

#: seconds that a killed child may take to be gone; one stuck in the kernel (a dead file system) is left behind then.
REAP: Final = 5.0
MAX_OUT: Final = 1 << 20
MAX_ERR: Final = 4 << 20
PR_SET_PDEATHSIG: Final = 1
T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a child's stdout."""

    stage: str = ""
    error: str = ""
    result: msgspec.Raw = msgspec.Raw()


class Ending(msgspec.Struct, frozen=True):
    """How a child ended. ``status`` None: killed at its deadline of ``limit`` seconds."""

    status: int | None
    limit: float
    stage: str = ""
    error: str = ""
    result: bytes = b""
    stderr: str = ""


# --- the parent's side --------------------------------------------------------------------------------------------


class _Started:
    """A child under way and the files it writes to."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> None:
        self.process = process
        self.out = out
        self.err = err


class Children:
    """Starts ``python -m kvconn.doctor.child WHAT ...``. A context manager: leaving it kills what still runs."""

    def __init__(self) -> None:
        self._started: list[_Started] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._started:
            _end(child.process)
            child.out.close()
            child.err.close()
        self._started.clear()

    def start(self, arguments: Sequence[str], env: Mapping[str, str] | None = None, fds: Sequence[int] = ()) -> int:
        """Start a child; its index for :meth:`wait`. Raises OSError."""
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvconn.doctor.child", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **(env or {}), "PYTHONPATH": _python_path()},
            pass_fds=fds,
        )
        self._started.append(_Started(process, out, err))
        return len(self._started) - 1

    def wait(self, index: int, until: float, limit: float) -> Ending:
        """How it ended, or what it had said when it was killed at ``until`` (monotonic)."""
        child = self._started[index]
        try:
            status: int | None = child.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(child.process)
            status = None
        return parse(_read(child.out, MAX_OUT), _read(child.err, MAX_ERR), status, limit)


def run_child(arguments: Sequence[str], limit: float, env: Mapping[str, str] | None = None) -> Ending:
    """Run one child to its end, or for ``limit`` seconds."""
    try:
        with Children() as children:
            return children.wait(children.start(arguments, env), time.monotonic() + limit, limit)
    except OSError as err:
        return Ending(1, limit, "start", f"cannot start a process: {err}")


def parse(out: str, err: str, status: int | None, limit: float) -> Ending:
    """A child's stdout as the last stage it named, its error, its result. What is no line of ours is ignored."""
    stage, error = "start", ""
    result = b""
    for text in out.splitlines():
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.MsgspecError:
            continue
        stage, error, result = line.stage or stage, line.error or error, bytes(line.result) or result
    return Ending(status, limit, stage, error, result, err)


def decoded(ending: Ending, kind: type[T]) -> T | None:
    """The child's result; None when it made none of that kind."""
    if not ending.result:
        return None
    try:
        return msgspec.json.decode(ending.result, type=kind)
    except msgspec.MsgspecError:
        return None


def explain(ending: Ending) -> str:
    """In words, for a child without a result: where and how it ended, and the last thing it complained about."""
    if ending.error:
        return f"in stage {ending.stage!r}: {ending.error}"
    if ending.status is None:
        how = f"did not end within {ending.limit:.0f} s, stage {ending.stage!r}"
    elif ending.status < 0:
        try:
            name = signal.Signals(-ending.status).name
        except ValueError:
            name = f"signal {-ending.status}"
        how = f"the process was ended by {name} in stage {ending.stage!r}"
    else:
        how = f"the process ended with status {ending.status} in stage {ending.stage!r}"
    last = complaint(ending.stderr)
    return f"{how}; its last words: {last}" if last else how


def complaint(stderr: str, limit: int = 300) -> str:
    """The line of stderr that says most: UCX's first fatal or error line, else the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and "| " not in line and "+-" not in line]
    for word in ("Fatal", "FATAL", "ERROR"):
        for line in lines:
            if word in line:
                return re.sub(r"^\[[^]]*\]\s*(\[[^]]*\]\s*)?", "", line)[:limit]
    return lines[-1][:limit] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        try:
            process.wait(REAP)
        except subprocess.TimeoutExpired:
            return


def _read(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")


def _python_path() -> str:
    """Ours, and behind it the tree this kvconn was imported from, so that a child imports the same one."""
    tree = str(Path(kvconn.__file__).resolve().parents[1])
    given = os.environ.get("PYTHONPATH")
    return f"{given}{os.pathsep}{tree}" if given else tree


# --- the child's side ---------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends; end it now if it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def begin(stage: str) -> None:
    _say(Line(stage=stage))


def say_error(error: str) -> None:
    _say(Line(error=error[:2000] or "an error without a text"))


def say_result(result: msgspec.Struct) -> None:
    _say(Line(result=msgspec.Raw(msgspec.json.encode(result))))


def _say(line: Line) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
