"""An engine that gets SIGTERM refuses what is new, waits for its readers up to a deadline, and says what came of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvconn.base import FinishReason
from kvconn.engine.client import EngineProcess, EngineRequest, Finished
from kvconn.engine.config import EngineConfig
from kvconn.errors import EngineDeadError
from tests.engine.driving import unique_tokens
from tests.engine.pairs import SECONDS, Starter, assert_all_end, ends, fresh_stats, prefilled, starting
from tests.engine.test_engine_processes import ENDLESS, ROOMY, consumer, first_token, poll_until_dead
from tests.support import NIXL_PRODUCER, multi, offload_hold, wait_until

PROMPT = unique_tokens("a", 45)


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


def producer(lease: float = 30.0) -> dict[str, Any]:
    nixl = NIXL_PRODUCER | {"kv_connector_extra_config": {"kv_lease_duration": lease}}
    return multi(nixl, offload_hold())


def sigterm(engine: EngineProcess) -> None:
    """To every process of it, as a service manager does; its own last, which ends the others."""
    for pid in (*engine.worker_pids, engine.pid):
        os.kill(pid, signal.SIGTERM)


def told_to_end(engine: EngineProcess) -> None:
    """SIGTERM, and proof that it heard. What overtakes the signal is still served, and holds nothing after that."""
    sigterm(engine)
    n = 0

    def refuses() -> bool:
        nonlocal n
        n += 1
        engine.submit(EngineRequest(f"late{n}", (1, 2, 3), 1))
        end = ends(engine, f"late{n}")[f"late{n}"]
        return end.error is not None and "was told to end" in end.error

    wait_until(refuses, SECONDS, "new requests are refused")


def test_a_reader_that_comes_after_sigterm_is_served_and_then_the_engine_ends(start: Starter) -> None:
    p, d, alone = start("P", pcp=2, transfer=producer()), start("D", transfer=consumer()), start("M")
    params = prefilled(p, "a", PROMPT)
    told_to_end(p)
    assert fresh_stats(p).pending_release == 1
    d.submit(EngineRequest("a", PROMPT, 6, params))
    alone.submit(EngineRequest("a", PROMPT, 6))
    assert ends(d, "a")["a"].tokens == ends(alone, "a")["a"].tokens
    assert d.drain(SECONDS) and d.stats().connector["nixl_num_transfers"] == 1
    pids = [p.pid, *p.worker_pids]
    assert poll_until_dead(p).startswith("engine P: told to end, nothing was left after ")
    assert_all_end(pids)


def test_at_the_deadline_it_ends_all_the_same_names_who_owes_and_late_readers_compute(start: Starter) -> None:
    p, d = start("P", pcp=2, transfer=producer(), drain=0.5), start("D", transfer=consumer("recompute", handshake=0.5))
    alone = start("M")
    params = prefilled(p, "a", PROMPT)
    sigterm(p)
    words = poll_until_dead(p)
    assert words.startswith("engine P: told to end, not over after ") and "send of a (life 1) owed by" in words
    d.submit(EngineRequest("a", PROMPT, 6, params))
    alone.submit(EngineRequest("a", PROMPT, 6))
    assert ends(d, "a")["a"].tokens == ends(alone, "a")["a"].tokens
    assert d.drain(SECONDS)
    assert d.stats().connector["nixl_num_failed_transfers"] == 1


def test_what_nobody_reads_is_waited_for_until_its_lease_ends(start: Starter) -> None:
    p = start("P", pcp=2, transfer=producer(lease=1.0))
    prefilled(p, "a", PROMPT)
    sigterm(p)
    assert poll_until_dead(p).startswith("engine P: told to end, nothing was left after ")
    assert p.last_stats.connector["nixl_num_kv_expired_reqs"] == 1


def test_what_an_engine_said_is_told_before_its_last_words_and_those_stay() -> None:
    engine, (ours, theirs) = EngineProcess(EngineConfig(name="E")), multiprocessing.Pipe()
    engine._pipe = ours
    end = Finished(id="a", tokens=(1,), reason=FinishReason.ABORT, t=0.0)
    theirs.send(("events", [end]))
    theirs.send(("error", EngineDeadError("last words")))
    theirs.close()
    assert engine.poll(1.0) == [end]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="last words"):
            engine.poll(1.0)
    ours.close()


def test_an_idle_engine_ends_at_once(start: Starter) -> None:
    engine = start("E")
    os.kill(engine.pid, signal.SIGTERM)
    assert poll_until_dead(engine).startswith("engine E: told to end, nothing was left after ")


@pytest.mark.parametrize("fits", [True, False], ids=["in time", "not in time"])
def test_running_requests_go_on_and_at_the_deadline_their_clients_are_told(start: Starter, fits: bool) -> None:
    engine = start("E", drain=SECONDS if fits else 0.3, **ROOMY)
    engine.submit(EngineRequest("a", (1, 2, 3), 1000) if fits else ENDLESS)
    first_token(engine)
    os.kill(engine.pid, signal.SIGTERM)
    told: list[Finished] = []

    def until_it_ends() -> None:
        while True:
            told.extend(event for event in engine.poll(0.2) if isinstance(event, Finished))

    with pytest.raises(EngineDeadError, match="told to end"):
        until_it_ends()
    (end,) = told
    assert end.reason is (FinishReason.LENGTH if fits else FinishReason.ABORT)
    assert (len(end.tokens) == 1000) is fits
