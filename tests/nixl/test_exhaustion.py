"""A process that gets no more threads or files: nothing escapes a poll, and it goes on by what it has."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import zmq

from kvconn.errors import TransportError
from kvconn.nixl.agent import REOPEN, Agent
from kvconn.nixl.names import Names
from kvconn.nixl.sideclient import HandshakeClient
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.testing import LoopbackNet
from kvconn.transport.loopback import LoopbackTransport
from tests.nixl.pairs import Net
from tests.support import free_port, wait_until


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of threads that cannot be started."""
    refused: set[str] = set()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return refused


@pytest.mark.parametrize("why", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_an_agent_that_the_system_refuses_is_tried_again(why: Exception) -> None:
    refusals = [why]

    def make() -> LoopbackTransport:
        if refusals:
            raise refusals.pop()
        return LoopbackNet().transport()

    agent = Agent(make, 0)
    assert not agent.reopen(5.0)
    assert agent.transport is None and agent.next_due == 5.0 + REOPEN
    assert agent.reopen(6.0) and agent.transport is not None
    agent.destroy()


@pytest.mark.parametrize("end", ["client", "server"])
def test_a_side_channel_without_its_thread_is_an_error_that_says_so_and_leaves_nothing_behind(
    end: str, no_threads: set[str]
) -> None:
    def make() -> HandshakeClient | HandshakeServer:
        return HandshakeClient(1.0) if end == "client" else HandshakeServer("127.0.0.1", port, {})

    port, files = free_port(), len(os.listdir("/proc/self/fd"))
    no_threads |= {"kvconn-handshakes", "kvconn-side-channel"}
    with pytest.raises(TransportError, match=rf"side channel's {end}: .*look at its limits"):
        make()
    assert len(os.listdir("/proc/self/fd")) <= files
    no_threads.clear()
    make().close()  # and the port is free


@pytest.mark.parametrize("end", ["client", "server"])
def test_a_side_channel_without_a_descriptor_is_an_error_that_says_so(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files") if end == "client" else zmq.ZMQError(24)

    monkeypatch.setattr(*((os, "eventfd") if end == "client" else (zmq.Context, "socket")), refuse)
    with pytest.raises(TransportError, match=rf"side channel's {end}: .*Too many open files"):
        _ = HandshakeClient(1.0) if end == "client" else HandshakeServer("127.0.0.1", free_port(), {})


def test_without_a_thread_to_introduce_a_peer_on_the_step_thread_does_it(no_threads: set[str]) -> None:
    class Slow(LoopbackTransport):
        meets_slowly = True

    net = Net()

    def make() -> Slow:
        transport = Slow(net.net, "slow", "pump")
        net.net.agents["slow"] = transport
        return transport

    no_threads.add("kvconn-introduction")
    try:
        p, d = net.producer(), net.consumer(make_transport=make)
        params: Any = p.prefill("a", [3, 4], seed=1)
        net.load(d, "a", params, [3, 4])
        net.run(lambda: d.received == ["a"])
        assert d.failed == []
        net.sound()
    finally:
        net.close()


def test_a_name_without_a_thread_is_refused_at_once_and_looked_up_when_there_is_one(no_threads: set[str]) -> None:
    answers: list[tuple[str, list[str], str]] = []
    names = Names(lambda *answer: answers.append(answer), look_up=lambda name: [f"of {name}"])
    no_threads.add("kvconn-names")
    assert not names.ask("a") and "waiting=0 threads=0" in repr(names)
    no_threads.clear()
    assert names.ask("b")
    no_threads.add("kvconn-names")
    assert names.ask("c")  # by the one there is
    wait_until(lambda: len(answers) == 2)
    assert [name for name, _, _ in answers] == ["b", "c"]
    names.close()
