"""Real vLLM engines for tests: in one process each, driven over pipes, and ``vllm serve``.

Every wait has a deadline; what a dead engine said last is in the error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BLOCK = 32
#: of the model ``llama``, all ranks together: keys and values of two layers, two heads, 64 channels of float32
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 64 * 4
PRODUCER = {"do_remote_decode": True, "do_remote_prefill": False}
#: a stock proxy's request to the producer
STOCK_PRODUCER = {
    **PRODUCER,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def free_port() -> int:
    """A port below the ephemeral range that nobody listens on now."""
    for port in range(20000 + os.getpid() % 8000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port
    raise RuntimeError("no free port")


_given: set[int] = set()


def ours(role: str, **more: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with our connector."""
    return {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvconn.vllm", "kv_role": role, **more}


def stock(role: str, **more: Any) -> dict[str, Any]:
    """``kv_transfer_config`` with vLLM's own."""
    return {"kv_connector": "NixlConnector", "kv_role": role, **more}


def environment(port: int, more: Mapping[str, str]) -> dict[str, str]:
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_CPU_KVCACHE_SPACE": "",
        "PYTHONPATH": f"{HERE / 'site'}:{ROOT}",
    }
    env.pop("VLLM_CPU_KVCACHE_SPACE")
    env.update(more)
    return env


def arguments(model: Path, transfer: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "enforce_eager": True,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 32 << 20,
        "disable_log_stats": False,
        **more,
    }
    if transfer is not None:
        out["kv_transfer_config"] = dict(transfer)
    return out


class EngineError(RuntimeError):
    """An engine ended, or did not answer in time."""


class Process:
    """A child process that leads a session of its own and writes a log; it is killed with all that it started."""

    def __init__(self, name: str, log: Path, port: int | None) -> None:
        self.name, self.log = name, log
        self.port = free_port() if port is None else port

    def _start(self, command: list[str], settings: Mapping[str, str], stdin: int, pass_fds: Sequence[int] = ()) -> None:
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(self.port, settings),
                pass_fds=pass_fds,
                cwd=ROOT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 25) -> str:
        return f"{self.log}:\n" + "\n".join(self.said().splitlines()[-lines:])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name} pid={self.process.pid} exit={self.process.poll()})"


class Engine(Process):
    """One in-process vLLM engine in a child process. Starts in the background; :meth:`ready` waits for it."""

    #: what the child process runs
    main = "tests.vllm.child"

    def __init__(
        self,
        name: str,
        log: Path,
        model: Path,
        transfer: Mapping[str, Any] | None,
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(name, log, port)
        self._tickets = itertools.count(1)
        self._answers: dict[int, Any] = {}
        self._buffer = b""
        self._started = False
        read, write = os.pipe()
        command = [sys.executable, "-m", self.main, json.dumps(arguments(model, transfer, more))]
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "ENGINE_FD": str(write), **(env or {})}
        self._start(command, settings, subprocess.PIPE, [write])
        os.close(write)
        self._read = read

    def ready(self, timeout: float = 400) -> Engine:
        """Wait until it has started. May be called again."""
        if not self._started:
            self._wait(0, timeout)
            self._started = True
        return self

    def order(self, order: str, **arguments: Any) -> int:
        """Send an order; :meth:`wait` fetches its answer."""
        ticket = next(self._tickets)
        line = json.dumps({"order": order, "ticket": ticket, "arguments": arguments}) + "\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return ticket

    def ask(self, order: str, timeout: float = 60, **arguments: Any) -> Any:
        return self._wait(self.order(order, **arguments), timeout)

    def submit(self, *requests: dict[str, Any]) -> int:
        return self.order("submit", requests=list(requests))

    def wait(self, ticket: int, timeout: float = 90) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._wait(ticket, timeout)
        return answer

    def generate(self, *requests: dict[str, Any], timeout: float = 90) -> list[dict[str, Any]]:
        return self.wait(self.submit(*requests), timeout)

    def one(self, prompt: Sequence[int], max_tokens: int = 8, timeout: float = 90, **more: Any) -> dict[str, Any]:
        return self.generate({"prompt": list(prompt), "max_tokens": max_tokens, **more}, timeout=timeout)[0]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("state")
        return state

    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self.ask("metrics")
        return metrics

    def idle(self, timeout: float = 20) -> dict[str, Any]:
        """Wait until nothing runs and nothing is held; the state then."""
        return self._until(lambda state: not state["requests"], "something", timeout)

    def freed(self, request: str, timeout: float = 20) -> None:
        """Wait until request ``request`` is held no longer."""
        mine = f"{request}-"
        self._until(lambda s: not any(id == request or id.startswith(mine) for id in s["requests"]), request, timeout)

    def _until(self, good: Callable[[dict[str, Any]], bool], what: str, timeout: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not good(state := self.state()):
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: still holds {what}: {state}")
            time.sleep(0.02)
        return state

    def _wait(self, ticket: int, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while ticket not in self._answers:
            if not select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineError(f"{self.name}: no answer to order {ticket} within {timeout:g} s; {self.tail()}")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise self._died()
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            for line in lines:
                said = json.loads(line)
                self._answers[said["ticket"]] = said["answer"]
        return self._answers.pop(ticket)

    def _died(self) -> EngineError:
        code = self.process.wait(timeout=20)
        return EngineError(f"{self.name} ended with {code}; {self.tail()}")

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask("quit", timeout=15)
                self.process.wait(timeout=10)
            except (EngineError, subprocess.TimeoutExpired):
                pass
        end(self.process)
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self._read >= 0:
            os.close(self._read)
            self._read = -1


class Server(Process):
    """``vllm serve`` with an OpenAI-compatible front end."""

    def __init__(
        self,
        name: str,
        log: Path,
        model: Path,
        transfer: Mapping[str, Any] | None,
        *,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(name, log, port)
        self.http = free_port()
        given = arguments(model, transfer, more)
        given.pop("disable_log_stats")
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.http), "--served-model-name", "tiny"]
        for key, value in given.items():
            flag = "--" + key.replace("_", "-")
            if value is True:
                command.append(flag)
            elif value is not False:
                command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
        self._start(command, env or {}, subprocess.DEVNULL)

    def ready(self, timeout: float = 180) -> Server:
        """Wait until it answers. May be called again."""
        deadline = time.monotonic() + timeout
        while True:
            if self.process.poll() is not None:
                raise EngineError(f"{self.name} ended with {self.process.poll()}; {self.tail()}")
            try:
                self.get("/health")
            except OSError:
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.name}: not healthy after {timeout:g} s; {self.tail()}") from None
                time.sleep(0.3)
            else:
                return self

    def get(self, path: str, timeout: float = 30) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=timeout) as answer:
            text: str = answer.read().decode()
            return text

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 90) -> tuple[int, dict[str, Any]]:
        """(HTTP status, JSON)."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as err:
            with err:
                text = err.read().decode(errors="replace")
            try:
                return err.code, json.loads(text)
            except ValueError:
                return err.code, {"text": text}

    def complete(
        self, prompt: Sequence[int], max_tokens: int = 8, params: Mapping[str, Any] | None = None, timeout: float = 90
    ) -> tuple[int, dict[str, Any]]:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        return self.post("/v1/completions", body, timeout)

    def metrics(self) -> dict[str, float]:
        """Values by metric name, labels summed."""
        out: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("#") or "_bucket{" in line or "_created{" in line:
                continue
            name, _, value = line.rpartition(" ")
            name = name.split("{")[0]
            out[name] = out.get(name, 0.0) + float(value)
        return out

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=20)
        end(self.process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole session that ``process`` leads, itself included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)
