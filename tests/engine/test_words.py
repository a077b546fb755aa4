"""An engine and its driver do not wait for each other in their pipe."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest

from kvconn.engine.client import EngineProcess, _loop
from kvconn.engine.config import EngineConfig
from kvconn.engine.core import EngineCore, EngineStats
from kvconn.engine.words import Words
from tests.support import wait_until

MANY = 3000


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def heard(words: Words, ours: Connection) -> list[tuple[str, Any]]:
    """All that was said, by one who begins to listen now."""
    out = []
    while words.waiting or ours.poll(0):
        while ours.poll(0):
            out.append(ours.recv())
        words.flush()
    return out


def test_who_does_not_listen_is_told_all_events_in_order_later(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    words = Words(theirs)
    events = [f"{n} {'x' * 1000}" for n in range(MANY)]
    for at in range(0, MANY, 100):
        words.events(events[at : at + 100])
    assert words.waiting
    told = heard(words, ours)
    assert {kind for kind, _ in told} == {"events"} and [one for _, some in told for one in some] == events


def test_of_statistics_the_newest_comes_and_comes_last(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    words = Words(theirs)
    for n in range(MANY):
        words.stats((n, "x" * 1000))
    words.say("asked", 1)
    told = heard(words, ours)
    assert len(told) < MANY and told[-1][0] == "stats" and told[-1][1][0] == MANY - 1
    for n in range(MANY):
        words.stats((n, "x" * 1000))
    assert not words.last("error", "words", 0.0), "nobody listens"
    assert [kind for kind, _ in heard(words, ours)[-2:]] == ["stats", "error"]


def test_last_words_wait_for_a_listener_until_they_are_sent(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    words = Words(theirs)
    for _ in range(MANY):
        words.say("asked", "x" * 1000)
    listener = threading.Thread(target=lambda: [ours.recv() for _ in range(MANY + 1)])
    listener.start()
    assert words.last("error", "words", 60.0)
    listener.join(60)
    assert not listener.is_alive()


def test_a_listener_that_is_gone_is_an_error_and_no_wait(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    ours.close()
    with pytest.raises(BrokenPipeError):
        Words(theirs).say("ready", [])


class Stepping:
    """A core that always has work, and says something in each step."""

    executor = type("", (), {"ends": (), "check": staticmethod(lambda: None)})()
    scheduler = type("", (), {"waiting": ()})()

    def __init__(self) -> None:
        self.steps = 0

    def drained(self) -> bool:
        return False

    def has_work(self) -> bool:
        return True

    def stats(self) -> EngineStats:
        return EngineStats(steps=self.steps)

    def step(self) -> tuple[bool, list[str]]:
        self.steps += 1
        return True, [f"{self.steps} {'x' * 1000}"]


def test_an_engine_whose_driver_does_not_listen_takes_its_steps(pipe: tuple[Connection, Connection]) -> None:
    ours, theirs = pipe
    core, (readable, writable) = Stepping(), os.pipe()
    words = Words(theirs)
    engine = threading.Thread(target=_loop, args=(cast(EngineCore, core), theirs, words, readable), daemon=True)
    engine.start()
    wait_until(lambda: core.steps >= MANY)
    ours.send(("stop", None))
    engine.join(60)
    assert not engine.is_alive()
    told = [one for kind, some in heard(words, ours) if kind == "events" for one in some]
    assert [int(one.split()[0]) for one in told] == list(range(1, core.steps + 1))
    os.close(readable)
    os.close(writable)


def _flood(pipe: Connection) -> None:
    for _ in range(MANY):
        pipe.send(("stats", "x" * 1000))
    while pipe.recv() != ("stop", None):
        pass


def test_an_engine_with_more_to_say_than_a_pipe_takes_is_not_killed_for_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=_flood, args=(theirs,))
    process.start()
    theirs.close()
    driver = EngineProcess(EngineConfig(name="P"))
    driver._process, driver._pipe = process, ours
    driver.shutdown()
    assert process.exitcode == 0
