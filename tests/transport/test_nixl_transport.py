"""NixlTransport between processes, over CMA where that is permitted, over tcp, and over what is left without CMA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvconn.config import Limits
from kvconn.errors import TransportError
from kvconn.transport import ucx
from kvconn.transport.gate import Gate
from kvconn.transport.nixl import NixlTransport
from kvconn.transport.parts import check, joined
from tests.transport.peer import ANY, HAMMER, ROOT, TCP, WAIT, Child, ChildError, until

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
SIZE = 16 * MIB
PAGE = 4096
PUMP = "kvconn-nixl-pump"

needs_cma = pytest.mark.skipif(not ucx.cma_usable(), reason="process_vm_readv between processes is not permitted here")
CMA = pytest.param(ANY, id="cma", marks=needs_cma)
OVER_TCP = pytest.param(TCP, id="tcp")
NO_CMA = pytest.param({"UCX_TLS": "^cma"}, id="without-cma")


class Pair(NamedTuple):
    """D reads, P is read."""

    d: Child
    p: Child
    d_name: str
    p_name: str
    p_blob: bytes
    p_address: int

    def post(self, *parts: tuple[int, int]) -> int:
        """D posts a read of ``(offset, length)`` parts, at the same offsets on both sides."""
        return int(self.d("post", self.p_name, [(off, self.p_address + off, length) for off, length in parts]))

    def meet(self) -> None:
        handle = self.post((0, 8))
        assert self.d("ended", handle) == "DONE"
        self.d("call", "release", handle)


def make_pair(stack: ExitStack, env: dict[str, str], p_env: dict[str, str] | None = None, **kwargs: object) -> Pair:
    """``p_env``: of P, where it is another."""
    d, p = (stack.enter_context(Child("transport", one)) for one in (env, env if p_env is None else p_env))
    p.send("start", SIZE, **kwargs)
    d.send("start", SIZE, **kwargs)
    (p_blob, p_address), (d_blob, _) = p.receive(), d.receive()
    return Pair(d, p, p("call", "add_peer", d_blob), d("call", "add_peer", p_blob), p_blob, p_address)


@pytest.fixture(scope="module", params=[CMA, OVER_TCP, NO_CMA])
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For tests that leave both sides as they found them. NIXL reads; what is read beside it is test_near's."""
    with ExitStack() as stack:
        yield make_pair(stack, request.param, batch=False)


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For tests that stop, kill or close a side."""
    with ExitStack() as stack:
        yield make_pair(stack, getattr(request, "param", TCP), batch=False)


# -- what works


def test_bytes_are_exact(shared: Pair) -> None:
    shared.p("scramble", 1)
    shared.d("scramble", 2)
    before = shared.d("read", 0, SIZE)
    rng = np.random.default_rng(3)
    cuts = np.sort(rng.choice(np.arange(1, SIZE), 400, replace=False))
    ranges = list(zip(cuts[:-1].tolist(), np.diff(cuts).tolist(), strict=True))
    chosen = [ranges[i] for i in rng.permutation(len(ranges))[:200]]

    handle = shared.post(*chosen)

    assert shared.d("ended", handle) == "DONE"
    assert shared.d("call", "reason", handle) == ""
    shared.d("call", "release", handle)
    expected, source = bytearray(before), shared.p("read", 0, SIZE)
    for off, length in chosen:
        expected[off : off + length] = source[off : off + length]
    assert shared.d("read", 0, SIZE) == bytes(expected)


@pytest.mark.parametrize("stock", ["reader", "producer"])
def test_a_peer_with_segments_of_ucx_s_own_size_is_read_and_reads(stock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are larger than UCX's default; who has that one, as a stock engine has, must take them."""
    for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        monkeypatch.delenv(name, raising=False)
    default = {**TCP, "UCX_TCP_TX_SEG_SIZE": "8k"}
    d_env, p_env = (default, TCP) if stock == "reader" else (TCP, default)
    with ExitStack() as stack:
        pair = make_pair(stack, d_env, p_env, batch=False)
        for child, env in ((pair.d, d_env), (pair.p, p_env)):
            assert child("environment", "UCX_TCP_TX_SEG_SIZE") == env.get("UCX_TCP_TX_SEG_SIZE", str(ucx.SEGMENT))
            assert child("environment", "UCX_TCP_RX_SEG_SIZE") is None
        pair.p("scramble", 7)
        parts = ((0, 8 * MIB), (8 * MIB + 1, 70_001), (9 * MIB, 7), (10 * MIB, 65_536))
        assert pair.d("ended", pair.post(*parts)) == "DONE"
        for offset, length in parts:
            assert pair.d("read", offset, length) == pair.p("read", offset, length)


def test_local_and_remote_places_need_not_agree(shared: Pair) -> None:
    shared.p("scramble", 4)
    parts = [(i * PAGE, (255 - i) * PAGE) for i in range(256)]
    handle = shared.d("post", shared.p_name, [(here, shared.p_address + there, PAGE) for here, there in parts])
    assert shared.d("ended", handle) == "DONE"
    shared.d("call", "release", handle)
    here, there = shared.d("read", 0, MIB), shared.p("read", 0, MIB)
    assert all(here[a : a + PAGE] == there[b : b + PAGE] for a, b in parts)


def test_notifications_name_their_sender_and_keep_their_order(shared: Pair) -> None:
    messages = [b"%d" % i for i in range(100)] + [b"", bytes(range(256))]
    for message in messages:
        shared.d("call", "notify", shared.p_name, message)
    assert shared.p("hear", len(messages)) == [(shared.d_name, message) for message in messages]
    shared.p("call", "notify", shared.d_name, b"back")
    assert shared.d("hear") == [(shared.p_name, b"back")]
    assert shared.d("call", "notifications") == []


def test_threads_share_one_agent(shared: Pair) -> None:
    shared.p("scramble", 5)
    shared.d.send("hammer", shared.p_name, shared.p_address, 300)
    assert shared.d.receive(HAMMER + 3 * WAIT) == []
    last = SIZE // PAGE - 2
    for k in range(2):
        there = (k + 2 * 299) % last + 2
        assert shared.d("read", k * PAGE, PAGE) == shared.p("read", there * PAGE, PAGE)


def test_adding_a_peer_again_is_harmless(shared: Pair) -> None:
    assert shared.d("call", "add_peer", shared.p_blob) == shared.p_name
    shared.meet()


def test_a_removed_peer_can_come_back(shared: Pair) -> None:
    shared.meet()
    shared.d("call", "remove_peer", shared.p_name)
    with pytest.raises(ChildError, match="no peer"):
        shared.post((0, 8))
    assert shared.d("call", "add_peer", shared.p_blob) == shared.p_name
    shared.meet()


def test_repr_is_one_readable_line(shared: Pair) -> None:
    text = shared.d("repr")
    assert "\n" not in text
    assert text.startswith(
        f"<NixlTransport {shared.d_name} progress=pump backends=UCX regions=1 peers=1 reads=0 posted"
    )


@pytest.mark.parametrize("progress", ["nixl", "poll"])
def test_other_ways_of_progress(progress: str) -> None:
    with ExitStack() as stack:
        pair = make_pair(stack, TCP, progress=progress)
        assert PUMP not in pair.d("threads")
        pair.p("scramble", 6)
        handle = pair.post((0, MIB))
        if progress == "poll":  # nobody moves but who is told to
            assert pair.d("state", handle) == "PENDING"
            until(
                lambda: (pair.p("call", "notifications"), pair.d("state", handle))[1] != "PENDING", "both sides to poll"
            )
        assert pair.d("ended", handle) == "DONE"
        assert pair.d("read", 0, MIB) == pair.p("read", 0, MIB)


# -- what is refused


@pytest.mark.parametrize("blob", [b"", b"x", b"nixlSerDes|", bytes(1000)])
def test_a_bad_blob_is_an_error_of_ours(shared: Pair, blob: bytes) -> None:
    with pytest.raises(ChildError, match="add_peer") as caught:
        shared.d("call", "add_peer", blob)
    assert caught.value.type_name == "TransportError"


def test_a_damaged_blob_of_a_known_peer_does_no_harm(shared: Pair) -> None:
    """NIXL forgets an agent for good when a damaged blob bears its name; so it never sees one."""
    for end in range(1, len(shared.p_blob), 7):
        with pytest.raises(ChildError) as caught:
            shared.d("call", "add_peer", shared.p_blob[:end])
        assert caught.value.type_name == "TransportError"
    with pytest.raises(ChildError, match="known by another blob"):
        shared.d("call", "add_peer", shared.p_blob[:-1])
    shared.meet()


def test_our_own_blob_is_refused(shared: Pair) -> None:
    with pytest.raises(ChildError, match="INVALID_PARAM"):
        shared.d("call", "add_peer", shared.d("call", "metadata"))


def test_unknown_peers_and_handles_are_named(shared: Pair) -> None:
    for order in (("post", "nobody", [(0, 1 << 20, 8)]), ("call", "notify", "nobody", b"x")):
        with pytest.raises(ChildError, match="no peer 'nobody'"):
            shared.d(*order)
    with pytest.raises(ChildError, match="no peer 'nobody'"):
        shared.d("call", "remove_peer", "nobody")
    assert shared.d("call", "peer_gone", "nobody") is False
    for method in ("poll", "release", "reason"):
        with pytest.raises(ChildError, match=r"handle 99999 was never posted"):
            shared.d("call", method, 99999)


def test_memory_that_nobody_registered_is_refused_before_anything_is_posted(shared: Pair) -> None:
    for local, remote in ((0, shared.p_address + SIZE - 8), (SIZE - 8, shared.p_address)):
        with pytest.raises(ChildError, match="NOT_FOUND") as caught:
            shared.d("post", shared.p_name, [(local, remote, 64)])
        assert caught.value.attrs["handle"] is None
    shared.meet()


@pytest.mark.parametrize(
    ("local", "remote", "says"),
    [
        ([[100, 8]], [[100, 9]], "do not pair"),
        ([[100, 8], [200, 8]], [[100, 8]], "do not pair"),
        ([[-8, 8]], [[100, 8]], "local address -8"),
        ([[100, 8]], [[0, 8]], "remote address 0"),
        ([[100, 0]], [[100, 0]], "a part of 0 bytes"),
        ([[100, 8, 0]], [[100, 8, 0]], "shape"),
    ],
)
def test_descriptors_are_checked(local: list[list[int]], remote: list[list[int]], says: str) -> None:
    with pytest.raises(TransportError, match=says):
        check(np.array(remote, np.int64), np.array(local, np.int64))


def test_empty_and_mistyped_descriptors_are_refused() -> None:
    good = np.array([[100, 8]], np.int64)
    bad: Any
    for bad in (np.empty((0, 2), np.int64), good.astype(np.uint64), good.astype(np.float64), good[0]):
        with pytest.raises(TransportError, match="expected local"):
            check(good, bad)


def test_adjacent_parts_are_merged_only_when_both_sides_go_on() -> None:
    local = np.array([[100, 10], [110, 20], [130, 5], [200, 5]], np.int64)
    remote = np.array([[1000, 10], [1010, 20], [1999, 5], [2004, 5]], np.int64)
    theirs, ours = joined(remote, local, 3, 4)
    assert ours.tolist() == [[100, 30, 4], [130, 5, 4], [200, 5, 4]]
    assert theirs.tolist() == [[1000, 30, 3], [1999, 5, 3], [2004, 5, 3]]


def test_a_backend_that_is_not_there_is_the_operators_fault() -> None:
    with Child("transport", TCP) as child, pytest.raises(ChildError, match="no backend NOPE"):
        child("start", SIZE, backends=("NOPE",))


# -- when the other side fails


def test_a_read_under_way_cannot_be_released_nor_its_peer_removed(own: Pair) -> None:
    own.meet()
    own.p.stop()
    handle = own.post((0, SIZE))
    assert own.d("state", handle) == "PENDING"
    with pytest.raises(ChildError, match="still on their way"):
        own.d("call", "release", handle)
    with pytest.raises(ChildError, match="not known to be quiet"):
        own.d("call", "remove_peer", own.p_name)
    assert own.d("call", "peer_gone", own.p_name) is False
    own.p.cont()
    assert own.d("ended", handle) == "DONE"
    own.d("call", "remove_peer", own.p_name)
    own.d("call", "release", handle)


def test_a_dead_peer_is_err_then_gone(own: Pair) -> None:
    own.meet()
    own.p.stop()
    handle = own.post((0, SIZE))
    own.p.kill()
    assert own.d("ended", handle) == "ERR"
    assert "nixlRemoteDisconnectError" in own.d("call", "reason", handle)
    assert own.d("call", "peer_gone", own.p_name) is True
    with pytest.raises(ChildError, match="not known to be quiet"):
        own.d("call", "remove_peer", own.p_name)
    with pytest.raises(ChildError, match="the connection to the peer failed") as caught:
        own.post((0, 8))
    assert own.d("state", caught.value.attrs["handle"]) == "ERR"
    with pytest.raises(ChildError, match="the connection to the peer failed"):
        own.d("call", "notify", own.p_name, b"x")
    for h in (handle, caught.value.attrs["handle"]):
        own.d("call", "release", h)
    own.d("call", "remove_peer", own.p_name)


def test_a_death_between_reads_is_found_out(own: Pair) -> None:
    own.meet()
    assert own.d("call", "peer_gone", own.p_name) is False
    own.p.kill()
    until(lambda: own.d("call", "peer_gone", own.p_name), "the lost connection to be seen")


@pytest.mark.parametrize("own", [CMA], indirect=True)
def test_done_is_not_taken_on_trust(own: Pair) -> None:
    """F7: NIXL says DONE although the first part could not be read."""
    for _ in range(5):
        own.meet()
        own.p("protect", SIZE - PAGE, PAGE)
        try:
            handle = own.post((SIZE - PAGE, PAGE), (PAGE, MIB))
        except ChildError as err:
            handle = err.attrs["handle"]
        assert own.d("ended", handle) == "ERR"
        assert own.d("call", "peer_gone", own.p_name) is True
        own.d("call", "release", handle)
        own.d("call", "remove_peer", own.p_name)
        own.d("call", "add_peer", own.p_blob)


def test_unread_notifications_are_bounded_and_counted() -> None:
    with ExitStack() as stack:
        pair = make_pair(stack, TCP, max_notifications=4)
        for i in range(10):
            pair.d("call", "notify", pair.p_name, b"%d" % i)
        until(lambda: pair.p("get", "dropped_notifications") == 6, "six to be dropped")
        assert pair.p("call", "notifications") == [(pair.d_name, b"%d" % i) for i in range(4)]
        pair.d("call", "notify", pair.p_name, b"again")
        assert pair.p("hear") == [(pair.d_name, b"again")]
        assert "6 dropped" in pair.p("repr")


# -- the end


def test_close_is_idempotent_and_nothing_lands_after(own: Pair) -> None:
    own.meet()
    own.p("fill", 7)
    assert PUMP in own.d("threads")
    own.p.stop()
    handle = own.post((PAGE, PAGE))  # one fragment: with more, F6 kills P before it could prove anything
    assert own.d("state", handle) == "PENDING"

    own.d("call", "close")
    own.d("call", "close")

    assert PUMP not in own.d("threads")
    assert own.d("state", handle) == "ERR"
    assert own.d("call", "reason", handle) == "our agent was destroyed"
    own.p.cont()
    own.p.lives_or_aborted("call", "notifications") and own.p.lives_or_aborted("call", "notifications")
    assert own.d("landed", 7) == 0
    assert own.d("call", "notifications") == []
    own.d("call", "release", handle)
    assert "closed" in own.d("repr")
    for method, *args in (("metadata",), ("add_peer", own.p_blob), ("notify", own.p_name, b"x")):
        with pytest.raises(ChildError, match="is closed; make a new one"):
            own.d("call", method, *args)


def test_close_ends_the_agent_whoever_still_holds_our_errors(own: Pair) -> None:
    own.meet()
    assert own.d("ended", own.post((0, 8))) == "DONE"  # and held
    errors = own.d("close_holding_errors", own.p_name)
    assert len(errors) == 2
    assert all("NOT_FOUND" in text for text in errors)
    until(lambda: _notify_fails(own.p, own.d_name), "the agent to be gone")


@pytest.mark.parametrize("own", [CMA, OVER_TCP], indirect=True)
def test_a_new_agent_after_the_old_one_was_closed(own: Pair) -> None:
    """What the worker does when quarantine is over age."""
    own.meet()
    own.d("call", "close")
    d_blob, _ = own.d("start", SIZE)
    own.p("call", "add_peer", d_blob)
    assert own.d("call", "add_peer", own.p_blob) == own.p_name
    own.p("scramble", 8)
    handle = own.post((0, SIZE))
    assert own.d("ended", handle) == "DONE"
    assert own.d("read", 0, SIZE) == own.p("read", 0, SIZE)


def test_a_forgotten_transport_ends(own: Pair) -> None:
    own.meet()
    own.d("forget")
    until(lambda: PUMP not in own.d("threads"), "the pump to end")
    until(lambda: _notify_fails(own.p, own.d_name), "the agent to be gone")


def _notify_fails(child: Child, peer: str) -> bool:
    try:
        child("call", "notify", peer, b"are you there")
    except ChildError:
        return True
    return False


# -- the environment


def test_without_cma_ucx_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "cma_usable", lambda: False)
    monkeypatch.setattr(os, "environ", {})
    ucx.prepare_ucx_env()
    assert os.environ["UCX_TLS"] == "^cma"
    assert os.environ["UCX_LOG_FILE"] == "stderr"


@pytest.mark.parametrize("theirs", ["UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"])
def test_whoever_chose_a_size_of_tcp_segments_keeps_it(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that are received: then ours would be larger than what the others were told to take."""
    monkeypatch.setattr(ucx, "cma_usable", lambda: True)
    monkeypatch.setattr(os, "environ", {theirs: "16k"})
    ucx.prepare_ucx_env()
    assert {name: value for name, value in os.environ.items() if "SEG_SIZE" in name} == {theirs: "16k"}


@pytest.mark.parametrize(
    ("received", "too_little"),
    [
        (None, False), ("64k", False), ("65536", False), ("64KB", False), ("1m", False), ("inf", False),
        ("auto", False), ("", False), ("16k", True), ("65535", True), ("8kb", True), ("65535b", True),
    ],
)  # fmt: skip
def test_a_reader_that_takes_less_than_ours_send_is_told(
    received: str | None, too_little: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """UCX writes past its buffer then, and the process ends: it has to be said before."""
    monkeypatch.setattr(ucx, "cma_usable", lambda: True)
    monkeypatch.setattr(os, "environ", {} if received is None else {"UCX_TCP_RX_SEG_SIZE": received})
    ucx.prepare_ucx_env()
    assert ("UCX_TCP_RX_SEG_SIZE" in caplog.text) is too_little


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_ask() -> bool:
        raise AssertionError("UCX_TLS is set, nobody needs to know")

    theirs = {"UCX_TLS": "rc,tcp", "UCX_LOG_LEVEL": "debug", "UCX_LOG_FILE": "x", "NIXL_LOG_LEVEL": "TRACE"}
    theirs["UCX_TCP_TX_SEG_SIZE"] = "4k"
    monkeypatch.setattr(ucx, "cma_usable", must_not_ask)
    monkeypatch.setattr(os, "environ", dict(theirs))
    ucx.prepare_ucx_env()
    assert os.environ == theirs


def test_where_cma_is_usable_nothing_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "cma_usable", lambda: True)
    monkeypatch.setattr(os, "environ", {})
    ucx.prepare_ucx_env()
    assert "UCX_TLS" not in os.environ


def test_the_probe_notices_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = ucx._CMA_PROBE.replace("libc.process_vm_readv(", "(lambda *_: -1)(")
    assert refusing != ucx._CMA_PROBE
    monkeypatch.setattr(ucx, "_CMA_PROBE", refusing)
    assert ucx.cma_usable.__wrapped__() is False


@pytest.mark.parametrize("why", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_an_agent_without_its_pump_is_destroyed_and_an_error_of_ours(
    why: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Native:
        """Of which weak references can be made."""

    made = SimpleNamespace(agent=Native())

    def refuse(*_: object) -> None:
        raise why

    monkeypatch.setattr("kvconn.transport.nixl._make_agent", lambda *_: made)
    monkeypatch.setattr("kvconn.transport.nixl.Pump", refuse)
    with pytest.raises(TransportError, match="look at its limits"):
        NixlTransport()
    assert made.agent is None


@pytest.mark.parametrize("who", ["a caller", "the pump"])
def test_a_call_that_hangs_does_not_hold_up_the_end_for_ever(who: str) -> None:
    gate = Gate()
    held = ExitStack()
    if who == "a caller":
        held.enter_context(gate)
    else:
        assert gate.try_enter()
        held.callback(gate.leave)
    with held, pytest.raises(TransportError, match="a call into NIXL has not returned"), gate.within(0.01):
        raise AssertionError("it came in")
    with gate.within(0.01):
        assert not gate.try_enter()
    assert gate.try_enter()


def test_an_agent_in_which_a_call_hangs_is_not_closed_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(agent=Gate())
    monkeypatch.setattr("kvconn.transport.nixl._make_agent", lambda *_: made)
    monkeypatch.setattr("kvconn.transport.nixl.LIMITS", Limits(end_thread=0.01))
    transport = NixlTransport("poll")
    with transport._gate, pytest.raises(TransportError, match="end this process before reusing the memory"):
        transport.close()
    assert made.agent is not None
    transport.close()
    assert made.agent is None


def test_nixl_is_loaded_only_when_an_agent_is_made() -> None:
    code = "import sys, kvconn.transport.nixl; sys.exit(any(m.split('.')[0] in ('nixl', 'torch') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
