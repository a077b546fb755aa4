"""The facts that the design builds on, probed on the installed NIXL and UCX (docs/design.md, section 2).

A test here that fails after an upgrade is news about NIXL or UCX, and the design has to hear it. ``UCX_TLS=tcp`` stands
for a network (F5); what was measured over tcp and CMA says nothing about RDMA.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import NamedTuple

import pytest

from kvconn.transport.ucx import cma_usable
from tests.transport.peer import ANY, TCP, Child, ChildError, until

pytestmark = pytest.mark.timeout(60)

MIB = 1 << 20
BIG = 64 * MIB  #: more than the sockets between two processes hold, so that it can't be under way unseen
PAGE = 4096  #: one fragment of UCX's over tcp
FILL = 7

needs_cma = pytest.mark.skipif(not cma_usable(), reason="process_vm_readv between processes is not permitted here")


class Pair(NamedTuple):
    """D reads, P is read. Nothing moves but by an order (peer.py, rule 2)."""

    d: Child
    p: Child
    p_blob: bytes
    p_name: str
    p_address: int

    def post(self, *parts: tuple[int, int]) -> tuple[int, str]:
        """D posts a read of ``(offset, length)`` parts, at the same offsets on both sides."""
        handle, state = self.d("post", self.p_name, [(off, self.p_address + off, length) for off, length in parts])
        return int(handle), str(state)

    def landed(self) -> int:
        return int(self.d("landed", FILL))

    def move(self) -> None:
        """Both sides progress a little."""
        self.p("progress", 20)
        self.d("progress", 20)

    def meet(self) -> None:
        """Connect, by a read of 8 bytes, and forget it."""
        handle, _ = self.post((0, 8))
        until(lambda: (self.move(), self.d("state", handle))[1] == "DONE", "the first contact")
        self.d("release", handle)
        self.d("fill", 0)

    def reconnect(self) -> None:
        """A new connection in place of a failed one."""
        self.d("remove", self.p_name)
        self.d("add", self.p_blob)
        self.meet()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two processes that know each other and have not talked yet; the environment is the test's parameter."""
    with ExitStack() as stack:
        d, p = (stack.enter_context(Child("raw", request.param)) for _ in range(2))
        p.send("start", BIG, FILL)
        d.send("start", BIG)
        (p_blob, p_address), (d_blob, _) = p.receive(), d.receive()
        p("add", d_blob)
        yield Pair(d, p, p_blob, d("add", p_blob), p_address)


over_tcp = pytest.mark.parametrize("pair", [pytest.param(TCP, id="tcp")], indirect=True)
over_cma = pytest.mark.parametrize("pair", [pytest.param(ANY, id="cma", marks=needs_cma)], indirect=True)


@over_tcp
def test_f1_a_released_read_still_lands(pair: Pair) -> None:
    pair.meet()
    pair.p.stop()
    handle, state = pair.post((0, BIG))
    assert state == "PROC"
    assert pair.d("state", handle, polls=100) == "PROC"

    pair.d("release", handle)  # returns as if the read had stopped

    pair.d("progress", 100)
    assert pair.landed() == 0
    pair.p.cont()
    until(lambda: (pair.move(), pair.landed())[1] == BIG, "all bytes of the released read")


@over_tcp
def test_f1_a_read_from_a_removed_peer_still_lands(pair: Pair) -> None:
    pair.meet()
    pair.p.stop()
    handle, state = pair.post((0, BIG))
    assert state == "PROC"

    pair.d("remove", pair.p_name)

    assert pair.d("state", handle) == "nixlNotFoundError"  # which looks like a failure, and is none
    assert pair.landed() == 0
    pair.p.cont()
    until(lambda: (pair.move(), pair.landed())[1] == BIG, "all bytes from the removed peer")


@over_tcp
def test_f1_nothing_lands_from_a_dead_peer(pair: Pair) -> None:
    pair.meet()
    pair.p.stop()
    handle, state = pair.post((0, BIG))
    assert state == "PROC"

    pair.p.kill()

    assert pair.d("ended", handle) == "nixlRemoteDisconnectError"
    pair.d("fill", 0)
    pair.d("progress", 2000)
    assert pair.landed() == 0
    pair.d("release", handle)


@over_tcp
def test_f1_nothing_lands_after_our_agent_was_destroyed(pair: Pair) -> None:
    pair.meet()
    pair.p.stop()
    _, state = pair.post((0, PAGE))  # one fragment: with more, F6 kills P every time
    assert state == "PROC"

    pair.d("destroy")

    pair.p.cont()
    pair.p.lives_or_aborted("progress", 2000)
    assert pair.landed() == 0


@over_tcp
def test_f2_over_tcp_a_read_waits_for_the_passive_side(pair: Pair) -> None:
    pair.meet()
    handle, state = pair.post((0, BIG))
    assert state == "PROC"
    assert pair.d("state", handle, polls=2000) == "PROC"
    assert pair.landed() == 0
    until(lambda: (pair.p("progress", 20), pair.d("state", handle, 20))[1] == "DONE", "a read whose source polls")
    assert pair.landed() == BIG


@over_cma
def test_f2_over_cma_only_the_first_contact_waits_for_the_passive_side(pair: Pair) -> None:
    handle, state = pair.post((0, BIG))
    assert state == "PROC"
    assert pair.d("state", handle, polls=2000) == "PROC"
    until(lambda: (pair.p("progress", 20), pair.d("state", handle, 20))[1] == "DONE", "the first contact")
    assert pair.landed() == BIG

    pair.d("fill", 0)
    handle, _ = pair.post((0, BIG))
    assert pair.d("ended", handle) == "DONE"
    assert pair.landed() == BIG


@over_tcp
def test_f4_nothing_lands_after_a_lost_connection_though_the_peer_lives(pair: Pair) -> None:
    pair.meet()
    pair.p.stop()
    handle, state = pair.post((0, PAGE))
    assert state == "PROC"

    for connection in range(pair.d("cut", -1)):
        pair.d("cut", connection)

    assert pair.d("ended", handle) == "nixlRemoteDisconnectError"
    pair.p.cont()
    for _ in range(50):
        pair.move()
    assert pair.landed() == 0
    assert pair.p("landed", FILL) == BIG  # P is alive


@over_tcp
def test_f4_nothing_lands_after_err_when_a_read_is_cut_half_way(pair: Pair) -> None:
    pair.meet()
    handle, _ = pair.post((0, BIG // 2), (BIG // 2, BIG // 2))
    until(lambda: (pair.move(), pair.landed())[1] > 0, "the first bytes")
    assert pair.d("state", handle) == "PROC"

    pair.d("cut", 0)

    assert pair.d("ended", handle) == "nixlRemoteDisconnectError"
    assert 0 < pair.landed() < BIG
    pair.d("fill", 0)
    for _ in range(50):
        pair.move()
    assert pair.landed() == 0
    assert pair.p("landed", FILL) == BIG  # P is alive


@over_cma
def test_f4_a_post_that_raises_has_read_the_parts_before(pair: Pair) -> None:
    pair.meet()
    pair.p("protect", BIG - PAGE, PAGE)

    with pytest.raises(ChildError, match="nixlRemoteDisconnectError"):
        pair.post((0, MIB), (MIB, 2 * MIB), (BIG - PAGE, PAGE))

    assert pair.landed() == 3 * MIB


@over_cma
def test_f5_over_cma_a_stopped_peer_can_be_read(pair: Pair) -> None:
    pair.meet()
    pair.p.stop()
    pair.post((0, BIG))
    assert pair.landed() == BIG


@over_tcp
def test_f6_a_reader_that_goes_away_kills_a_peer_that_serves_it_later(pair: Pair) -> None:
    """UCX over tcp aborts the serving process when the first answer finds its reader gone. A peer that polls all the
    time has read and answered before; one that was stopped, or polls between steps only, has not."""
    pair.meet()
    pair.p.stop()
    _, state = pair.post((0, BIG))
    assert state == "PROC"

    pair.d("destroy")

    pair.p.cont()
    pair.p.send("progress", 2000)
    assert pair.p.exit_code() == -signal.SIGABRT
    assert pair.landed() == 0


@over_cma
def test_f7_done_may_hide_a_part_that_failed(pair: Pair) -> None:
    """NIXL keeps only the last part's request. The connection it leaves behind gives it away."""
    pair.meet()
    pair.p("protect", BIG - PAGE, PAGE)
    for _ in range(5):  # now and then the post of a later part notices
        with suppress(ChildError):
            handle, _ = pair.post((BIG - PAGE, PAGE), (0, MIB))
            break
        pair.reconnect()
    else:
        pytest.fail("every post raised")

    assert pair.d("ended", handle) == "DONE"
    assert pair.landed() == MIB  # and not the other page
    with pytest.raises(ChildError, match="nixlRemoteDisconnectError"):
        pair.post((0, 0))
