"""Chaos itself, short and real: it finds nothing in what we ship, finds a known fault, and can be stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from kvconn.chaos import run as chaos
from kvconn.chaos.book import Shares, Submit
from kvconn.chaos.fleet import Fleet
from kvconn.chaos.run import Oracle, Report, Row, Settings
from kvconn.cli import chaos as showing
from kvconn.engine.config import EngineConfig
from kvconn.engine.request import EngineRequest
from tests.engine.pairs import assert_all_end
from tests.support import wait_until

COMMAND = [sys.executable, "-m", "kvconn.cli", "chaos"]


def test_seconds_of_chaos_lose_nothing() -> None:
    done = subprocess.run(
        [*COMMAND, "--minutes", "0.15", "--seed", "3", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    told = msgspec.json.decode(done.stdout)
    assert done.returncode == told["code"] == 0, (told["problems"], done.stderr[-4000:])
    report = told["report"]
    assert report["done"] == report["asked"] > 0
    assert sum(row["injected"] for row in report["faults"]) > 0, report["faults"]


@pytest.mark.parametrize(("tls", "env"), [("tcp", {"UCX_TLS": "tcp"}), ("", {})])
def test_engines_are_told_what_ucx_may_use_or_nothing(tls: str, env: dict[str, str]) -> None:
    """Over tcp every read goes by UCX; with nothing said a peer on this host is read without it."""
    assert [config.env for config in chaos.configs(Settings(ucx_tls=tls))] == [env] * 3


def test_an_engine_is_back_under_its_own_id_whatever_happened_to_others() -> None:
    rng = random.Random(0)
    with Fleet(chaos.configs(Settings())[:2]) as fleet:
        fleet.start()

        def comes_back(name: str, same_id: bool) -> str:
            assert fleet.kill(name, rng, rank=False, same_id=same_id)
            wait_until(lambda: not fleet.poll(name, 0.01) and fleet.bury() == [name], 60, f"{name} is back")
            transfer = fleet._engines[name].config.kv_transfer_config
            assert transfer is not None
            return str(transfer["engine_id"])

        assert comes_back("D1", same_id=False).endswith("-1")
        assert comes_back("P", same_id=True).endswith("-0")
        assert fleet.died == []


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_producer_that_aborts_after_its_readers_end_is_ucxs_doing_and_any_other_is_ours(reader_first: bool) -> None:
    with Fleet(chaos.configs(Settings())[:2]) as fleet:
        fleet.start()
        if reader_first:
            assert fleet.kill("D1", random.Random(0), rank=False, same_id=True)
            wait_until(lambda: not fleet.poll("D1", 0.01) and fleet.bury() == ["D1"], 60, "D1 is back")
        os.kill(fleet.pids("P")[1], signal.SIGABRT)
        fleet.give(Submit("P", EngineRequest("r", (1, 2, 3), 1)))  # an idle engine does not look
        wait_until(lambda: not fleet.poll("P", 0.01) and fleet.bury() == ["P"], 60, "P is back")
        assert (len(fleet.aborted), len(fleet.died)) == ((1, 0) if reader_first else (0, 1)), fleet.died


def with_connector(which: str, name: str, module: str) -> Callable[[Settings], list[EngineConfig]]:
    """The engines of chaos, those whose name begins so with another NIXL connector."""
    made = chaos.configs

    def configs(settings: Settings) -> list[EngineConfig]:
        out = []
        for config in made(settings):
            transfer = msgspec.json.encode(config.kv_transfer_config).decode()
            if config.name.startswith(which):
                transfer = transfer.replace('"NixlConnector"', f'"{name}","kv_connector_module_path":"{module}"')
            out.append(msgspec.structs.replace(config, kv_transfer_config=msgspec.json.decode(transfer)))
        return out

    return configs


def test_without_the_fence_tokens_of_other_prompts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "configs", with_connector("D", "NoFenceNixlConnector", "tests.chaos.broken"))
    report = chaos.run(Settings(requests=200, engines=False, shares=Shares(0.0, 0.5)), lambda line: None)
    assert report.wrong and any(line.startswith("wrong: ") for line in showing.problems(report))
    assert showing.code(report) == 1


def test_the_fault_that_this_library_exists_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P's second rank never reports a send: nothing is freed, nothing goes on."""
    monkeypatch.setattr(chaos, "configs", with_connector("P", "HiddenRanksNixlConnector", "kvconn.testing.contract"))
    monkeypatch.setattr(chaos, "PATIENCE", 4.0)
    monkeypatch.setattr(chaos, "SETTLE", 6.0)
    for name in ("LEASE", "READ", "HANDSHAKE", "DRAIN"):
        monkeypatch.setattr(chaos, name, 1.0)
    report = chaos.run(Settings(requests=60, engines=False, shares=Shares(0.0, 0.0)), lambda line: None)
    said = showing.problems(report)
    assert any(line.startswith("lost: ") for line in said)
    assert any(line.startswith("leaked: P") and "HiddenRanksNixlConnector rank 1" in line for line in said), said
    assert report.wrong == () and showing.code(report) == 1


def test_ctrl_c_leaves_no_process() -> None:
    with subprocess.Popen(
        [*COMMAND, "--minutes", "5"], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as one:
        assert one.stderr is not None
        for line in one.stderr:
            if "KV in use" in line:
                break
        session = _session(one.pid)
        assert len(session) > 7  # the command, three engines, four ranks
        os.killpg(one.pid, signal.SIGINT)
        _, errors = one.communicate(timeout=60)
    assert one.returncode == 130, errors
    assert "interrupted; the engines are shut down" in errors
    assert_all_end(session)


def _session(pid: int) -> list[int]:
    """All processes of the session that ``pid`` leads."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getsid(int(name)) == pid:
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found


def test_the_oracle_says_the_same_every_time_and_different_prompts_differ() -> None:
    one, other = Oracle(Settings(seed=5)), Oracle(Settings(seed=5))
    told = [one(n) for n in range(20)]
    assert told == [other(n) for n in range(20)]
    assert len({answer for _, answer in told if len(answer) > 3}) == len([1 for _, answer in told if len(answer) > 3])
    assert max(len(prompt) for prompt, _ in told) <= 200 and max(len(answer) for _, answer in told) <= 12


GOOD = Report(
    asked=2,
    done=2,
    retried=0,
    seconds=1.0,
    faults=(Row("P killed", 1, 1),),
    lost=(),
    wrong=(),
    leaked=(),
    died=(),
    counters={},
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lost": ("r1.1: no word",), "done": 1}, "lost: r1.1: no word"),
        ({"leaked": ("P: 3 blocks",)}, "leaked: P: 3 blocks"),
        ({"died": ("P: rank 0 is gone",)}, "an engine ended by itself: P: rank 0 is gone"),
        ({"faults": (Row("P killed", 2, 1),)}, "P killed: of 2 only 1 were seen to be survived"),
        ({"done": 1}, "of 2 requests 1 are done and 0 lost"),
    ],
)
def test_whatever_is_not_right_is_exit_code_1_and_named(change: dict[str, object], said: str) -> None:
    assert showing.code(GOOD) == 0 and showing.problems(GOOD) == []
    report = msgspec.structs.replace(GOOD, **change)  # type: ignore[arg-type]
    assert showing.code(report) == 1 and said in showing.problems(report)
