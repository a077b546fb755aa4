"""What a running engine tells its owner: the socket is the owner's alone, and asking it harms nothing."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.config import EngineConfig, ModelSpec
from kvconn.explain import MAX_LINES, ExplainServer, ask, find, run_dir
from tests.support import COMPOSITIONS, free_port, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@contextlib.contextmanager
def serving(folder: Path, *lines: str, **kwargs: Any) -> Iterator[ExplainServer]:
    server = ExplainServer(
        kwargs.pop("explain", lambda now: list(lines)), lambda: "summary", "E", "scheduler", directory=folder, **kwargs
    )
    try:
        yield server
    finally:
        server.close()


class TestTheSocket:
    def test_tells_what_the_half_waits_for(self, folder: Path) -> None:
        with serving(folder, "send of a", "send of b", rank=3) as server:
            assert server.path is not None
            report = ask(server.path)
        assert (report.engine_id, report.half, report.rank, report.pid) == ("E", "scheduler", 3, os.getpid())
        assert (report.summary, report.lines, report.left_out) == ("summary", ("send of a", "send of b"), 0)

    def test_is_the_owners_alone(self, folder: Path) -> None:
        with serving(folder) as server:
            assert server.path is not None
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_is_not_taken_for_one_left_behind_before_it_listens(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listen = socket.socket.listen

        def another_starts_first(self: socket.socket, *args: int) -> None:
            assert find(folder) == ([], [])
            listen(self, *args)

        monkeypatch.setattr(socket.socket, "listen", another_starts_first)
        with serving(folder) as server:
            assert server.path is not None
            assert ask(server.path).engine_id == "E"

    def test_who_asks_while_a_whole_row_waits_gets_an_answer(self, folder: Path) -> None:
        asked, go = threading.Event(), threading.Event()

        def slow(now: float) -> list[str]:
            asked.set()
            go.wait(10)
            return ["a line"]

        with serving(folder, explain=slow) as server, contextlib.ExitStack() as row:
            path = server.path
            assert path is not None
            for _ in range(10):  # one is answered, nine fill the row
                one = row.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                one.connect(str(path))
                assert asked.wait(10)
            full = row.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            full.setblocking(False)
            with pytest.raises(BlockingIOError):
                full.connect(str(path))
            turn = threading.Timer(0.05, go.set)
            turn.start()
            assert ask(path).lines == ("a line",)
            turn.join()

    @pytest.mark.parametrize("how", ["open to others", "a link", "a file", "not to be made"])
    def test_a_place_that_is_not_ours_alone_is_not_used_and_said_once(
        self, folder: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        if how == "open to others":
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)
        elif how == "a link":
            (tmp_path / "real").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "real")
        else:
            folder.write_text("")
        place = folder / "below" if how == "not to be made" else folder
        with serving(place) as server:
            assert server.path is None and repr(server) == "ExplainServer(off)"
        (record,) = caplog.records
        assert "kvconn explain is off" in record.getMessage() and str(folder) in record.getMessage()

    def test_is_gone_after_close_and_so_is_the_thread(self, folder: Path) -> None:
        before = set(threading.enumerate())
        with serving(folder) as server:
            assert [one.name for one in set(threading.enumerate()) - before] == ["kvconn-explain"]
        server.close()
        assert list(folder.iterdir()) == []
        assert not set(threading.enumerate()) - before

    def test_of_a_process_that_is_gone_is_removed_by_whoever_comes_next(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        for name in ("1.0.sock", "2.0.sock"):
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(folder / name))
        assert find(folder) == ([], [])
        assert list(folder.iterdir()) == []
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / "3.0.sock"))
        with serving(folder) as server:
            assert list(folder.iterdir()) == [server.path]

    def test_lines_are_bounded_and_the_rest_is_counted(self, folder: Path) -> None:
        with serving(folder, *map(str, range(MAX_LINES + 5))) as server:
            report = server.report()
        assert (len(report.lines), report.left_out) == (MAX_LINES, 5)

    def test_a_table_that_changes_while_it_is_walked_is_walked_again(self, folder: Path) -> None:
        tries: list[int] = []

        def explain(now: float) -> list[str]:
            tries.append(1)
            if len(tries) < 3:
                raise RuntimeError("dictionary changed size during iteration")
            return ["at last"]

        with serving(folder, explain=explain) as server:
            assert server.report().lines == ("at last",)

    def test_a_half_that_can_not_say_it_is_named_and_asked_again_later(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def explain(now: float) -> list[str]:
            raise KeyError("child")

        with serving(folder, explain=explain) as server:
            for _ in range(2):
                reports, problems = find(folder)
                assert reports == [] and "KeyError" in problems[0] and str(server.path) in problems[0]

    def test_who_connects_and_goes_away_harms_nothing(self, folder: Path) -> None:
        with serving(folder, "still here") as server:
            for _ in range(20):
                with socket.socket(socket.AF_UNIX) as rude:
                    rude.connect(str(server.path))
            assert server.path is not None and ask(server.path).lines == ("still here",)


def test_the_directory_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCONN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert run_dir() == tmp_path
    monkeypatch.delenv("KVCONN_RUN_DIR")
    assert run_dir() == Path("/run/user/7/kvconn")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_dir().name == f"kvconn-{os.getuid()}"


def explain(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvconn.cli", "explain", "--run-dir", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_nobody_there_is_one_line_that_says_where_was_looked(folder: Path) -> None:
    told = explain(folder, "--pid", "1")
    assert told.returncode == 1 and told.stdout == ""
    assert told.stderr.splitlines() == [
        f"kvconn: no engine of process 1 has a socket in {folder} (KVCONN_RUN_DIR or --run-dir names another)"
    ]


def test_an_engine_that_holds_a_request_says_who_owes_what(folder: Path) -> None:
    config = EngineConfig(
        name="P",
        parallel=ParallelConfig(pcp=2),
        kv_transfer_config=COMPOSITIONS["in Multi"],
        num_blocks=32,
        model=ModelSpec(mode="content-addressed"),
        port=free_port(),
        env={"KVCONN_RUN_DIR": str(folder)},
    )
    engine = EngineProcess(config)
    engine.start()
    try:
        engine.submit(EngineRequest("held", tuple(range(40)), 1, {"do_remote_decode": True}))

        def lines(*options: str) -> dict[str, list[str]]:
            told = explain(folder, "--json", *options)
            assert told.returncode == 0, told.stderr
            return {f"{r['half']} {r['rank']}": r["lines"] for r in json.loads(told.stdout)["reports"]}

        wait_until(lambda: any("lease of held" in line for line in lines().get("worker 0", [])), what="the lease")
        halves = lines("--pid", str(engine.worker_pids[1]))
        assert sorted(halves) == ["scheduler None", "worker 0", "worker 1"]
        (about,) = [line for line in halves["scheduler None"] if line.startswith("send of held ")]
        assert "NixlConnector" in about and "rank 0" in about and "rank 1" not in about
        assert halves["worker 1"] == []
        shown = explain(folder)
        assert shown.returncode == 0 and "lease of held (life 1): heard 0 of 1 readers" in shown.stdout
    finally:
        engine.shutdown()
    assert list(folder.iterdir()) == []
