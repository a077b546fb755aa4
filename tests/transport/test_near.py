"""The memory of a process on this host: what comes, whose memory it is, and when NIXL is asked instead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvconn.config import NixlKvconn, NixlSettings
from kvconn.nixl.connector import _nixl_transport
from kvconn.transport import near as near_module
from kvconn.transport import ucx
from kvconn.transport.near import AT_ONCE, Near, may_be_near, whereabouts
from kvconn.transport.parts import Spans
from tests.transport.peer import ANY, TCP, ChildError, until
from tests.transport.test_nixl_transport import PAGE, SIZE, Pair, make_pair

needs_cma = pytest.mark.skipif(not ucx.cma_usable(), reason="process_vm_readv between processes is not permitted here")
pytestmark = [pytest.mark.timeout(60), needs_cma]
#: every other page, last first: nothing joins
SCATTERED = [(off, PAGE) for off in range(SIZE - 2 * PAGE, 0, -2 * PAGE)]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield make_pair(stack, ANY)


def pidfds() -> int:
    """Those of this process; other descriptors come and go with other tests' objects."""
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            kinds.append(os.readlink(f"/proc/self/fd/{fd}"))
    return kinds.count("anon_inode:[pidfd]")


def test_the_bytes_are_exact_and_nothing_else_is_touched(pair: Pair) -> None:
    assert len(SCATTERED) > AT_ONCE
    pair.p("scramble", 1)
    pair.d("scramble", 2)
    expected, source = bytearray(pair.d("read", 0, SIZE)), pair.p("read", 0, SIZE)

    handle = pair.post(*SCATTERED)

    assert pair.d("state", handle) == "DONE"
    assert not pair.d("probed", pair.p_name), "NIXL was asked"
    pair.d("call", "release", handle)
    for off, length in SCATTERED:
        expected[off : off + length] = source[off : off + length]
    assert pair.d("read", 0, SIZE) == bytes(expected)


def test_a_single_word_and_all_there_is_are_read_so_too(pair: Pair) -> None:
    pair.p("scramble", 1)
    for part in ((8, 8), (0, SIZE)):
        assert pair.d("state", pair.post(part)) == "DONE"
        assert pair.d("read", *part) == pair.p("read", *part)
    assert not pair.d("probed", pair.p_name), "NIXL was asked"


def test_where_nobody_progresses_between_calls_a_word_connects_so_that_what_is_said_then_leaves() -> None:
    with ExitStack() as stack:
        pair = make_pair(stack, ANY, progress="poll")
        pair.d("call", "release", pair.post(*SCATTERED))
        handle = pair.post((8, 8))

        def over() -> bool:
            pair.p("call", "notifications")
            return bool(pair.d("state", handle) == "DONE")

        until(over, "the word")
        assert pair.d("near", pair.p_name) and pair.d("probed", pair.p_name)
        pair.d("call", "notify", pair.p_name, b"done")
        until(lambda: pair.p("call", "notifications") == [(pair.d_name, b"done")], "the notification")


def test_a_part_outside_of_our_registered_memory_is_refused_and_nothing_written(pair: Pair) -> None:
    pair.p("scramble", 1)
    before = pair.d("read", 0, SIZE)
    with pytest.raises(ChildError, match="read of"):
        pair.post(*SCATTERED, (SIZE, PAGE))
    assert pair.d("read", 0, SIZE) == before


def test_what_the_kernel_refuses_is_nixls_to_refuse(pair: Pair) -> None:
    parts = [(off, pair.p_address + off, PAGE) for off, _ in SCATTERED]
    with pytest.raises(ChildError, match="read of"):
        pair.d("post", pair.p_name, [*parts, (0, 1 << 20, PAGE)])
    assert not pair.d("near", pair.p_name), "it is not tried again"
    handle = pair.post(*SCATTERED)
    assert pair.d("ended", handle) == "DONE"


def test_a_dead_peer_is_not_read(pair: Pair) -> None:
    pair.meet()
    pair.p.kill()
    try:
        state = pair.d("ended", pair.post(*SCATTERED))
    except ChildError as err:
        state = err.type_name
    assert state in ("ERR", "TransportError")
    assert not pair.d("near", pair.p_name)


def test_switched_off_or_where_ucx_may_not_use_cma_nixl_reads() -> None:
    for env, settings in ((TCP, {}), ({"UCX_TLS": "^cma"}, {}), (ANY, {"batch": False})):
        with ExitStack() as stack:
            pair = make_pair(stack, env, **settings)
            assert "@" not in pair.p_name
            assert not pair.d("near", pair.p_name)
            assert pair.d("ended", pair.post(*SCATTERED)) == "DONE"


@pytest.mark.parametrize(("setting", "says"), [("auto", True), ("off", False)])
def test_an_operator_may_switch_it_off(setting: Literal["auto", "off"], says: bool) -> None:
    settings = NixlSettings(kvconn=NixlKvconn(batch_reads=setting))
    transport = _nixl_transport(settings)
    transport.close()
    assert ("@" in transport.name) is says


def test_a_peer_that_may_not_be_read_so_says_nothing_of_its_process() -> None:
    with ExitStack() as stack:
        networked = make_pair(stack, TCP).p_blob
        near = make_pair(stack, ANY)
        name = near.d("call", "add_peer", networked)
        assert not near.d("near", name)


def test_removing_a_peer_and_closing_forget_its_process(pair: Pair) -> None:
    pair.d("call", "remove_peer", pair.p_name)
    assert pair.d("call", "add_peer", pair.p_blob) == pair.p_name
    assert pair.d("near", pair.p_name)
    pair.d("call", "close")


# -- whose memory


HOLDS = """import ctypes, sys
held = ctypes.create_string_buffer(bytes(range(64)), 64)
print(ctypes.addressof(held), flush=True)
sys.stdin.read()
"""
Other = subprocess.Popen[bytes]


@contextmanager
def another() -> Iterator[Other]:
    """A process that says where it holds the bytes 0 to 63."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def other() -> Iterator[Other]:
    with another() as process:
        yield process


def name_of(pid: int, later: int = 0) -> str:
    """As an agent of that process would be called; of one that began so much later, with a pid that was used before."""
    host = whereabouts().rpartition("@")[2].split(".")[0]
    began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return f"some-agent@{host}.{pid}.{began + later}"


def test_a_process_is_met_by_its_name(other: Other) -> None:
    before = pidfds()
    near = Near.meet(name_of(other.pid))
    assert near is not None and pidfds() == before + 1
    assert repr(near) == f"<Near pid {other.pid}>"
    near.close()
    near.close()
    assert pidfds() == before


def test_names_that_tell_of_nobody_here_are_met_with_nobody(other: Other) -> None:
    before = pidfds()
    host, pid, began = name_of(other.pid).split("@")[1].split(".")
    for name in (
        "", "no-place", "@", "x@..", "x@a.b", f"x@{host}.{pid}", f"x@{host}.-1.{began}", f"x@{host}.0.{began}",
        f"x@{host}.{1 << 40}.{began}", f"x@{host}.٣.{began}", f"x@{host}.{pid}.{'9' * 500}",
        f"x@0123456789abcdef.{pid}.{began}",
        name_of(other.pid, later=1), f"x@{host}.{pid}.{began}.1",
        whereabouts(), name_of(os.getpid()),
    ):  # fmt: skip
        assert Near.meet(name) is None, name
    assert pidfds() == before


def test_a_process_that_ended_meanwhile_gives_nothing(other: Other) -> None:
    """Its pid may be another's by then: the copy itself may succeed and does not count."""
    with another() as successor:
        near, gone = Near.meet(name_of(successor.pid)), Near.meet(name_of(other.pid))
        assert near is not None and gone is not None
        assert successor.stdout is not None
        here, held = np.zeros(64, np.uint8), int(successor.stdout.readline())
        local, remote = (np.array([[at + i * 8, 8] for i in range(8)], np.int64) for at in (here.ctypes.data, held))
        assert near.read(local, remote)
        assert (here == np.arange(64)).all()
        other.send_signal(signal.SIGKILL)
        until(lambda: bool(gone._alive.poll(0)), "the other process to end")
        gone._pid = successor.pid  # who has its pid now
        assert not gone.read(local, remote)


@pytest.mark.parametrize("parts_at_once", [1, 3, 1024])
@pytest.mark.parametrize("bytes_at_once", [1, 5, 16, 1 << 30])
def test_each_side_is_cut_as_it_likes_and_calls_are_bounded(
    other: Other, monkeypatch: pytest.MonkeyPatch, parts_at_once: int, bytes_at_once: int
) -> None:
    monkeypatch.setattr(near_module, "AT_ONCE", parts_at_once)
    monkeypatch.setattr(near_module, "MOST", bytes_at_once)
    near = Near.meet(name_of(other.pid))
    assert near is not None and other.stdout is not None
    here, held = np.zeros(64, np.uint8), int(other.stdout.readline())
    expected = here.copy()
    local, remote = [], []
    # neighbours on both sides, on theirs, on ours, on neither; of several lengths
    for to, at, length in ((0, 0, 8), (8, 8, 7), (40, 15, 9), (50, 24, 1), (51, 40, 8), (60, 62, 2)):
        local.append([here.ctypes.data + to, length])
        remote.append([held + at, length])
        expected[to : to + length] = np.arange(at, at + length)
    with ThreadPoolExecutor(1) as second:
        for helper in (None, second):
            here[:] = 0
            assert near.read(np.array(local, np.int64), np.array(remote, np.int64), helper)
            assert here.tolist() == expected.tolist()
            assert not near.read(np.array(local, np.int64), np.array([*remote[:-1], [4096, 2]], np.int64), helper)
    assert near.read(np.array(local, np.int64), np.array(remote, np.int64), second), "no thread is to be had"
    near.close()


# -- what is decided


@pytest.mark.parametrize(
    ("tls", "may"),
    [("all", True), ("cma,tcp", True), ("sm,self", True), ("tcp", False), ("^cma", False), ("^tcp", True)],
)
def test_ucx_tls_is_obeyed(tls: str, may: bool) -> None:
    assert may_be_near(tls) is may


def test_spans_hold_what_lies_in_one_of_them() -> None:
    spans = Spans()
    assert not spans.hold(np.array([[100, 1, 0]], np.int64))
    spans.add(np.array([[200, 50, 0], [100, 50, 0]], np.int64))
    assert spans.hold(np.array([[100, 50, 0], [249, 1, 0], [210, 10, 0]], np.int64))
    for outside in ([99, 2], [149, 2], [150, 1], [249, 2], [300, 1], [1, 1]):
        assert not spans.hold(np.array([[100, 1], outside], np.int64)), outside
