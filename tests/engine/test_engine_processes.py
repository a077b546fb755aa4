"""Whole engines in their processes: equal ranks, named deaths, nothing left behind, and a real pair over NIXL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvconn.base import FinishReason
from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess, EngineRequest, FirstToken
from kvconn.engine.config import EngineConfig, ModelSpec, check
from kvconn.errors import ConfigError, EngineDeadError
from kvconn.params import RemoteRef, fresh_transfer_id, to_params
from tests.engine.driving import unique_tokens
from tests.engine.pairs import CONTENT, SECONDS, Starter, alive, assert_all_end, ends, fresh_stats, prefilled, starting
from tests.support import NIXL_CONSUMER, NIXL_PRODUCER, free_port, multi, offload_hold, wait_until

TRANSFORMER = ModelSpec(n_layers=2, d_model=32, n_heads=2, d_ff=64)
MODES = pytest.mark.parametrize("model", [CONTENT, TRANSFORMER], ids=["content-addressed", "transformer"])
Start = Starter


@pytest.fixture
def start() -> Iterator[Start]:
    with starting() as starter:
        yield starter


def poll_until_dead(engine: EngineProcess, seconds: float = SECONDS) -> str:
    """Poll until the engine's end is told. Returns its last words."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            engine.poll(0.2)
        except EngineDeadError as err:
            return str(err)
    raise AssertionError(f"{engine!r} is not dead after {seconds} s")


def first_token(engine: EngineProcess) -> None:
    """Poll until a request is under way."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if any(isinstance(event, FirstToken) for event in engine.poll(0.2)):
            return
    raise AssertionError("no first token")


ENDLESS = EngineRequest("endless", (1, 2, 3), 30_000)
ROOMY: dict[str, Any] = {"num_blocks": 4096, "model": msgspec.structs.replace(CONTENT, n_layers=1)}


class TestRanks:
    @MODES
    def test_two_and_three_ranks_give_one_ranks_tokens_and_hold_the_same_bytes(
        self, start: Start, model: ModelSpec
    ) -> None:
        """Prompts of one token leave ranks idle; 40 tokens a step cut prompts into chunks across requests."""
        lengths = {"a": 1, "b": 2, "c": 61, "d": 33, "e": 40}
        told = {}
        for pcp in (1, 2, 3):
            engine = start(f"pcp{pcp}", pcp=pcp, model=model, max_num_batched_tokens=40)
            for id, n in lengths.items():
                engine.submit(EngineRequest(id, unique_tokens(id, n), 5))
            told[pcp] = {id: end.tokens for id, end in ends(engine, *lengths).items()}
            digests = engine.digests(list(range(64)))
            assert len(digests) == pcp and len(set(digests)) == 1
            assert engine.digests([63]) != engine.digests([0]), "a digest is of what is there"
            assert engine.drain(SECONDS) and engine.stats().kv_blocks_used == 0
            if model is TRANSFORMER:
                assert engine.stats().min_margin > model.margin_floor
            engine.shutdown()
        assert told[1] == told[2] == told[3]
        assert {id: len(tokens) for id, tokens in told[1].items()} == dict.fromkeys(lengths, 5)

    def test_stages_heads_and_shared_tokens_give_one_ranks_tokens(self, start: Start) -> None:
        """Over gloo; every size and mixture is in test_topologies.py."""
        lengths = {"a": 1, "b": 2, "c": 61, "d": 33}
        told = []
        for parallel in (
            ParallelConfig(),
            ParallelConfig(pp=2, tp=2, dcp=2),
            ParallelConfig(pcp=2, dcp=2, dcp_interleave=8),
        ):
            engine = start("ranks", parallel=parallel, model=TRANSFORMER, max_num_batched_tokens=40)
            for id, n in lengths.items():
                engine.submit(EngineRequest(id, unique_tokens(id, n), 5))
            told.append({id: end.tokens for id, end in ends(engine, *lengths).items()})
            assert len(set(engine.digests(list(range(64))))) == parallel.world, "every rank has something else"
            assert engine.drain(SECONDS)
            assert TRANSFORMER.margin_floor < engine.stats().min_margin < 1e9
            engine.shutdown()
        assert told[0] == told[1] == told[2]

    def test_more_ranks_than_tokens(self, start: Start) -> None:
        engine = start(pcp=3, model=TRANSFORMER)
        engine.submit(EngineRequest("a", (5,), 1))
        assert ends(engine, "a")["a"].reason is FinishReason.LENGTH
        assert len(set(engine.digests([0]))) == 1


class TestLife:
    def test_start_and_shutdown_leave_no_process(self, start: Start) -> None:
        engine = start(pcp=2)
        pids = [engine.pid, *engine.worker_pids]
        assert repr(engine) == "EngineProcess(E running workers=2)"
        engine.shutdown()
        assert not any(map(alive, pids))
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="engine E: not started, or shut down"):
            engine.submit(ENDLESS)

    def test_shutdown_in_the_middle_of_a_request_leaves_no_process(self, start: Start) -> None:
        engine = start(pcp=2, **ROOMY)
        engine.submit(ENDLESS)
        first_token(engine)
        pids = [engine.pid, *engine.worker_pids]
        engine.shutdown()
        assert not any(map(alive, pids))

    def test_a_refused_request_is_told_although_the_engine_is_idle(self, start: Start) -> None:
        engine = start()
        engine.submit(EngineRequest("huge", (1,) * 600, 1))
        assert "request refused" in str(ends(engine, "huge")["huge"].error)

    def test_abort_ends_a_running_request_with_its_tokens(self, start: Start) -> None:
        engine = start(**ROOMY)
        engine.submit(ENDLESS)
        first_token(engine)
        engine.abort("endless")
        end = ends(engine, "endless")["endless"]
        assert end.reason is FinishReason.ABORT and len(end.tokens) >= 1
        assert engine.drain(SECONDS)

    def test_drain_does_not_believe_statistics_from_before_the_last_order(self, start: Start) -> None:
        engine = start(**ROOMY)
        engine.submit(ENDLESS)
        assert not engine.drain(0.3)
        engine.abort("endless")
        assert engine.drain(SECONDS)


class TestDeaths:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_killed_worker_is_named_and_nothing_is_left(self, start: Start, rank: int) -> None:
        engine = start("killed", pcp=2, **ROOMY)
        engine.submit(ENDLESS)
        first_token(engine)
        pids = [engine.pid, *engine.worker_pids]
        os.kill(engine.worker_pids[rank], signal.SIGKILL)
        assert poll_until_dead(engine).startswith(f"engine killed: rank {rank} ")
        assert_all_end(pids)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_worker_killed_while_it_rests_is_named_though_nothing_is_asked_of_it(
        self, start: Start, rank: int
    ) -> None:
        engine = start("rested", pcp=2)
        pids = [engine.pid, *engine.worker_pids]
        os.kill(engine.worker_pids[rank], signal.SIGKILL)
        assert poll_until_dead(engine) == f"engine rested: rank {rank} ended with -9 while nothing was asked of it"
        assert_all_end(pids)

    def test_a_stopped_worker_did_not_answer_in_time(self, start: Start) -> None:
        engine = start("stopped", step_timeout=5.0, **ROOMY)
        engine.submit(ENDLESS)
        first_token(engine)
        pids = [engine.pid, *engine.worker_pids]
        os.kill(engine.worker_pids[0], signal.SIGSTOP)
        assert poll_until_dead(engine) == "engine stopped: rank 0 did not answer 'step' in time"
        os.kill(engine.pid, signal.SIGKILL)  # it would ask the stopped one to end for some seconds first
        assert_all_end(pids)

    def test_a_killed_engine_is_gone_without_a_word_and_takes_its_workers_along(self, start: Start) -> None:
        engine = start("gone", pcp=2)
        pids = [engine.pid, *engine.worker_pids]
        os.kill(engine.pid, signal.SIGKILL)
        assert poll_until_dead(engine) == "engine gone: is gone without a word"
        with pytest.raises(EngineDeadError, match="engine gone"):
            engine.submit(ENDLESS)
        assert_all_end(pids)
        assert list(Path(tempfile.gettempdir()).glob(f"kvconn-engine-{pids[0]}-*")) == [], "where its ranks met"

    def test_a_killed_driver_leaves_no_process_of_a_busy_or_an_idle_engine(self) -> None:
        command = [sys.executable, "-m", "tests.engine.driver"]
        pids: list[int] = []
        with ExitStack() as ending:
            drivers = [
                ending.enter_context(subprocess.Popen([*command, what], stdout=subprocess.PIPE, text=True))
                for what in ("busy", "idle")
            ]
            for driver in drivers:
                ending.callback(driver.kill)
            for driver in drivers:
                assert driver.stdout is not None
                own = [int(pid) for pid in driver.stdout.readline().split()]
                assert len(own) == 3 and all(map(alive, own))
                pids += own
        assert_all_end(pids)


class TestConfiguration:
    def test_every_problem_is_named_before_a_process_starts(self) -> None:
        config = EngineConfig(
            name="bad",
            num_blocks=1,
            block_size=0,
            max_num_seqs=0,
            max_num_batched_tokens=0,
            parallel=ParallelConfig(tp=2, pcp=2, dcp=3),
            kv_transfer_config=NIXL_CONSUMER | {"kv_rolle": "x"},
        )
        engine = EngineProcess(config)
        with pytest.raises(ConfigError) as caught:
            engine.start()
        assert engine.pid == 0
        assert caught.value.problems == (
            "engine bad: num_blocks: expected at least 2, got 1",
            "engine bad: block_size: expected at least 1, got 0",
            "engine bad: max_num_batched_tokens: expected at least 1, got 0",
            "engine bad: max_num_seqs: expected at least 1, got 0",
            "engine bad: parallel.dcp: with pcp 2 expected tp 1 and dcp 1 or 2, got dcp 3 with tp 2",
            "engine bad: kv_transfer_config.kv_rolle: unknown key (did you mean 'kv_role'?)",
        )

    @pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
    def test_replicated_ranks_cannot_read(self, role: str) -> None:
        nixl = NIXL_PRODUCER | {"kv_role": role}
        said = f"kv_role: with replicated PCP 2 only kv_producer works, got {role}"
        for transfer, path in (
            (nixl, "kv_transfer_config"),
            (multi(offload_hold(), nixl), "kv_transfer_config.kv_connector_extra_config.connectors[1]"),
        ):
            config = EngineConfig(name="E", parallel=ParallelConfig(pcp=2), kv_transfer_config=transfer)
            with pytest.raises(ConfigError) as caught:
                check(config)
            assert caught.value.problems == (f"engine E: {path}.{said}",)
            check(msgspec.structs.replace(config, parallel=ParallelConfig(pcp=1)))

    def test_all_reading_children_are_named_also_nested_ones(self) -> None:
        transfer = multi(NIXL_CONSUMER, multi(NIXL_PRODUCER, NIXL_PRODUCER | {"kv_role": "kv_both"}))
        with pytest.raises(ConfigError) as caught:
            check(EngineConfig(name="E", parallel=ParallelConfig(pcp=2), kv_transfer_config=transfer))
        where = [problem.split(".kv_role")[0].rpartition("transfer_config.")[2] for problem in caught.value.problems]
        nested = "kv_connector_extra_config.connectors"
        assert where == [f"{nested}[0]", f"{nested}[1].{nested}[1]"]

    def test_a_child_without_a_role_is_a_problem_and_no_crash(self) -> None:
        transfer = multi({"kv_connector": "NixlConnector"})
        with pytest.raises(ConfigError, match=r"connectors\[0\]\.kv_role: with replicated PCP 2 .* got None"):
            check(EngineConfig(name="E", parallel=ParallelConfig(pcp=2), kv_transfer_config=transfer))

    def test_what_a_connector_refuses_is_a_config_error_with_all_its_problems(self, start: Start) -> None:
        extra = {"backend": ["UCX"], "kv_lease_duration": -1}
        with pytest.raises(ConfigError) as caught:
            start("E", transfer=NIXL_PRODUCER | {"kv_connector_extra_config": extra})
        assert len(caught.value.problems) == 2, caught.value.problems
        assert all(problem.startswith("engine E: kv_transfer_config.") for problem in caught.value.problems)

    def test_an_unknown_connector_is_a_config_error(self, start: Start) -> None:
        with pytest.raises(
            ConfigError, match=r"engine E: kv_transfer_config.kv_connector: 'NixelConnector' is none of"
        ):
            start("E", transfer=NIXL_PRODUCER | {"kv_connector": "NixelConnector"})


# --- a pair, over real NIXL ---------------------------------------------------------------------------------------


def consumer(policy: str = "fail", **limits: float) -> dict[str, Any]:
    return NIXL_CONSUMER | {"kv_load_failure_policy": policy, "kv_connector_extra_config": {"kvconn": limits}}


def params_of_nobody(n_tokens: int, port: int | None = None) -> dict[str, Any]:
    """A reference to an engine on a port where nobody listens, or where the test does."""
    blocks = (tuple(range(-(-n_tokens // 8))),)
    return to_params(RemoteRef("nobody", fresh_transfer_id(), "127.0.0.1", port or free_port(), blocks, n_tokens))


@pytest.fixture
def silent() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A producer that says nothing until the test does."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as raw:
        raw.setsockopt(zmq.LINGER, 0)
        yield raw, raw.bind_to_random_port("tcp://127.0.0.1")


class TestPair:
    @MODES
    def test_tokens_are_one_engines_also_behind_a_partial_prefix_hit(self, start: Start, model: ModelSpec) -> None:
        producer, alone = start("P", transfer=NIXL_PRODUCER, model=model), start("M", model=model)
        decode = start("D", transfer=consumer(), model=model)
        prompt = unique_tokens("a", 45)
        decode.submit(EngineRequest("warm", prompt[:20], 1))
        ends(decode, "warm")
        decode.submit(EngineRequest("a", prompt, 6, prefilled(producer, "a", prompt)))
        decode.submit(EngineRequest("b", prompt[:3], 6, prefilled(producer, "b", prompt[:3])))
        for id, n in (("a", 45), ("b", 3)):
            alone.submit(EngineRequest(id, prompt[:n], 6))
        told, expected = ends(decode, "a", "b"), ends(alone, "a", "b")
        assert {id: told[id].tokens for id in "ab"} == {id: expected[id].tokens for id in "ab"}
        for engine in (producer, decode):
            assert engine.drain(SECONDS), engine.stats()
            assert engine.stats().kv_blocks_used == engine.stats().pending_release == 0
        stats = decode.stats()
        assert (stats.prefix_hit_tokens, stats.external_tokens) == (16, 45 - 16 + 3)
        assert stats.connector["nixl_num_transfers"] == 2

    def test_aborted_while_parked_is_told_at_once_and_its_blocks_come_back_when_nothing_can_land(
        self, start: Start, silent: tuple[zmq.Socket[bytes], int]
    ) -> None:
        producer, port = silent
        decode = start("D", transfer=consumer(handshake=120.0))
        decode.submit(EngineRequest("a", unique_tokens("a", 20), 4, params_of_nobody(20, port)))
        wait_until(lambda: decode.stats().parked == 1, SECONDS, "a is parked")
        decode.abort("a")
        assert ends(decode, "a")["a"].reason is FinishReason.ABORT
        assert not decode.drain(0.1), "blocks came back while the receive was not over"
        assert fresh_stats(decode).kv_blocks_used == 3
        assert producer.poll(SECONDS * 1000), "it was not asked"
        producer.send_multipart([producer.recv_multipart()[0], b"not an answer"])
        assert decode.drain(SECONDS), decode.stats()

    def test_a_producer_that_is_not_there_is_an_error_under_fail(self, start: Start) -> None:
        decode = start("D", transfer=consumer("fail", handshake=0.3))
        decode.submit(EngineRequest("a", unique_tokens("a", 20), 4, params_of_nobody(20)))
        end = ends(decode, "a")["a"]
        assert (end.reason, end.tokens) == (FinishReason.ERROR, ())
        assert end.error is not None and end.error.startswith("KV load failed: peer nobody@127.0.0.1:")
        assert "handshake" in end.error
        assert decode.drain(SECONDS), decode.stats()

    def test_a_producer_that_is_not_there_is_made_up_for_under_recompute(self, start: Start) -> None:
        decode, alone = start("D", transfer=consumer("recompute", handshake=0.3)), start("M")
        prompt = unique_tokens("a", 20)
        decode.submit(EngineRequest("a", prompt, 4, params_of_nobody(20)))
        alone.submit(EngineRequest("a", prompt, 4))
        assert ends(decode, "a")["a"].tokens == ends(alone, "a")["a"].tokens
        assert decode.drain(SECONDS), decode.stats()
        assert decode.stats().connector["nixl_num_failed_transfers"] == 1

    @pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_port": "x"}])
    def test_params_from_a_client_gone_wrong_fail_that_request_only(self, start: Start, params: dict[str, Any]) -> None:
        decode = start("D", transfer=consumer())
        decode.submit(EngineRequest("bad", unique_tokens("a", 20), 4, params))
        decode.submit(EngineRequest("good", unique_tokens("b", 20), 4))
        told = ends(decode, "bad", "good")
        assert told["bad"].reason is FinishReason.ERROR and told["good"].reason is FinishReason.LENGTH
        assert decode.drain(SECONDS)


def test_a_stalled_release_is_named_with_its_request_ranks_and_child(start: Start) -> None:
    hidden = NIXL_PRODUCER | {
        "kv_connector": "HiddenRanksNixlConnector",
        "kv_connector_module_path": "kvconn.testing.contract",
        "kv_connector_extra_config": {"kv_lease_duration": 0.2},
    }
    engine = start("P", pcp=2, transfer=multi(hidden, offload_hold()), stall_after=0.5)
    prefilled(engine, "a", unique_tokens("a", 20))
    wait_until(lambda: bool(engine.stats().stalls), SECONDS, "the stall is named")
    (line,) = engine.stats().stalls
    assert "send of a (life 1) owed by HiddenRanksNixlConnector" in line and "rank" in line
    wait_until(lambda: "HiddenRanksNixlConnector rank 1 for" in engine.stats().stalls[0], SECONDS, "rank 0 is done")
    stats = engine.stats()
    assert stats.pending_release == 1 and stats.kv_blocks_used == 3
    assert not engine.drain(0.3)
