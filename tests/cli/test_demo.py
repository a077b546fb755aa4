"""The real thing, small: real engines, real NIXL between processes, the shipped trace and, if there, a published one.

What is compared with the monolithic run is the command's own business; here its exit code and its report are read.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvconn.cli import job
from kvconn.cli.app import app
from kvconn.engine.client import EngineProcess

REAL = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
SMALL = ("--requests", "12", "--concurrency", "6", "--pcp", "2")


def kvconn(*arguments: str, timeout: float = 110) -> tuple[int, dict]:
    """Run the command in a process of its own. Returns its exit code and what it said as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "kvconn.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def assert_sound(code: int, told: dict, total: int) -> None:
    report = told["report"]
    assert code == 0, told["verdict"]
    assert report["finished"] == report["compared"] == report["total"] == total
    assert report["prefill_blocks_used"] == report["decode_blocks_used"] == 0
    assert report["bytes_moved"] > 0 and report["transfers"] > 0 and report["gb_per_s"] > 0
    assert report["blocks_stored"] > 0
    assert 0 < report["handoff_p50_ms"] <= report["handoff_p95_ms"]
    assert report["leases_expired"] == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "content-addressed"),
        ("--mode", "transformer", "--ucx-tls", "tcp"),
        ("--kv", "gqa"),
        ("--kv", "gqa", "--mode", "content-addressed"),
        ("--kv", "gqa", "--mode", "content-addressed", "--pcp", "1", "--p-tp", "2", "--d-pp", "2"),
    ],
    ids=" ".join,
)
def test_a_small_demo_is_sound(options):
    code, told = kvconn("demo", *SMALL, *options)
    assert_sound(code, told, 12)


def test_offloading_brings_blocks_to_both_engines():
    options = ("--requests", "40", "--concurrency", "4", "--pcp", "2", "--mode", "content-addressed")
    code, told = kvconn("demo", *options, "--offload", "tiering")
    assert_sound(code, told, 40)
    for side in "PD":
        done = told["report"]["offload"][side]
        assert done["hits_host"] + done["hits_files"] <= done["asked"] and done["bytes_stored"] > 0
        assert done["tokens_loaded"] == 16 * (done["hits_host"] + done["hits_files"])
    assert told["report"]["offload"]["P"]["tokens_loaded"] > 0


def test_hidden_ranks_stall_is_named_and_exits_3():
    began = time.monotonic()
    code, told = kvconn("demo", "--pcp", "3", "--contract", "hidden-ranks", "--stall-after", "4")
    assert time.monotonic() - began < 120
    assert code == 3, told["verdict"]
    head, *named = told["verdict"]
    stall = told["report"]["stall"]
    assert "requests never finished" in head
    assert stall["last"]["prefill"]["running"] == 0 and stall["last"]["prefill"]["waiting"] > 0
    assert len(named) == stall["last"]["prefill"]["pending_release"] > 0
    assert all("owed by HiddenRanksNixlConnector ranks 1..2 for" in line or "ranks 1,2 for" in line for line in named)
    assert told["report"]["failures"] == []


def test_a_published_trace_replays():
    if not REAL.exists():
        reason = f"no published trace at {REAL}"
        print(reason)
        pytest.skip(reason)
    options = ("--requests", "24", "--concurrency", "16", "--pcp", "2", "--mode", "content-addressed")
    code, told = kvconn("replay", "--trace", str(REAL), *options)
    assert_sound(code, told, 24)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=lambda by: by.name)
def test_an_interrupt_leaves_no_process(by):
    """Ctrl-C reaches every process of the terminal's foreground group; SIGTERM only the one it is sent to."""
    command = [sys.executable, "-m", "kvconn.cli", "demo", "--pcp", "2", "--requests", "96"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        for line in process.stderr:
            if "finished" in line:
                break
        (os.killpg if by is signal.SIGINT else os.kill)(process.pid, by)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted; the engines are shut down" in errors
    deadline = time.monotonic() + 10
    while (left := of_session(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)  # the fork server ends by itself when its last client is gone
    assert left == []


#: says whose the first handler for Ctrl-C is, as soon as it is set
STARTING = """
import signal, sys
from kvconn.cli.main import main

def told(number, handler, real=signal.signal):
    before = real(number, handler)
    if number == signal.SIGINT:
        signal.signal = real
        print(handler.__module__, flush=True)
    return before

signal.signal = told
sys.argv[1:] = ["demo", "--pcp", "2"]
main()
"""


@pytest.mark.parametrize("after", [0.4, 1.2, 2.5])
def test_an_interrupt_while_starting_is_one_line(after):
    command = [sys.executable, "-c", STARTING]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "kvconn.cli.main\n"
        time.sleep(after)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert [line for line in errors.splitlines() if "interrupted" in line] == errors.splitlines()[-1:]


def test_a_killed_worker_ends_the_command_and_is_named(monkeypatch):
    class Killed(EngineProcess):
        def submit(self, request):
            if self.config.name == "P" and request.id == "line-3":
                os.kill(self.worker_pids[1], signal.SIGKILL)
            super().submit(request)

    monkeypatch.setattr(job, "EngineProcess", Killed)
    result = CliRunner().invoke(app, ["demo", *SMALL, "--mode", "content-addressed"])
    assert result.exit_code == 1
    assert "engine P: rank 1" in result.stderr


def of_session(session: int) -> list[str]:
    """Command lines of the living processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, _, sid = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(sid) == session and state != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found
