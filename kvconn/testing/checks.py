"""What every transport must do, whatever moves the bytes, for authors of transports.

Rules
1. The checks make no assumption on time but the deadline: they drive both sides until something is so.
2. A failed check is an AssertionError that names the check.
3. Nothing here asks for more than ``transport/base.py`` promises; in particular notifications may change their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvconn.errors import TransportError
from kvconn.transport.base import Descs, HandleState, MemoryRegion, Transport

__all__ = ["TransportPair", "check_transport"]

SIZE = 1 << 16
PAGE = 4096


class TransportPair:
    """A reader and a peer with registered memory of :data:`SIZE` bytes each, and what makes both progress."""

    def __init__(self, reader: Transport, peer: Transport, drive: Callable[[], object], deadline: float = 20.0) -> None:
        self.reader = reader
        self.peer = peer
        self.ours: npt.NDArray[np.uint8] = np.zeros(SIZE, np.uint8)
        self.theirs: npt.NDArray[np.uint8] = np.random.default_rng(7).integers(1, 256, SIZE, dtype=np.uint8)
        self._drive = drive
        self._deadline = deadline
        self.heard: dict[str, list[tuple[str, bytes]]] = {reader.name: [], peer.name: []}
        for one, memory in ((reader, self.ours), (peer, self.theirs)):
            one.register([MemoryRegion(memory.ctypes.data, SIZE)])
        reader.add_peer(peer.metadata())
        peer.add_peer(reader.metadata())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Let both sides progress until ``condition``; AssertionError at the deadline."""
        deadline = time.monotonic() + self._deadline
        while not condition():
            assert time.monotonic() < deadline, f"check_transport: {what}: not within {self._deadline} s"
            self._drive()
            for one in (self.reader, self.peer):
                self.heard[one.name] += one.notifications()

    def post(self, *parts: tuple[int, int, int]) -> int:
        """The reader reads ``(offset here, offset there, length)``."""
        local = np.array([(self.ours.ctypes.data + here, n) for here, _, n in parts], np.int64)
        remote = np.array([(self.theirs.ctypes.data + there, n) for _, there, n in parts], np.int64)
        return self.reader.post_read(self.peer.name, local, remote)

    def ended(self, handle: int) -> HandleState:
        self.until(lambda: self.reader.poll(handle) is not HandleState.PENDING, f"the end of handle {handle}")
        return self.reader.poll(handle)

    def close(self) -> None:
        self.reader.close()
        self.peer.close()


def check_transport(make_pair: Callable[[], TransportPair]) -> None:
    """Run every check, each on a fresh pair. Raises AssertionError."""
    for check in (_bytes, _words, _notifications, _names, _malformed, _out_of_bounds, _removal, _closing):
        pair = make_pair()
        try:
            check(pair)
        finally:
            pair.close()


def _bytes(pair: TransportPair) -> None:
    """Exactly the bytes named land, from where they were named."""
    parts = [(i * PAGE, (15 - i) * PAGE, 100 + i) for i in range(0, 16, 3)]
    handle = pair.post(*parts)
    assert pair.ended(handle) is HandleState.DONE, "bytes: a good read ends DONE"
    expected = np.zeros_like(pair.ours)
    for here, there, length in parts:
        expected[here : here + length] = pair.theirs[there : there + length]
    assert np.array_equal(pair.ours, expected), "bytes: other bytes than those named"
    assert pair.reader.reason(handle) == "", "bytes: no reason when it is not ERR"
    pair.reader.release(handle)
    _refused(lambda: pair.reader.poll(handle), "bytes: a released handle is unknown")


def _words(pair: TransportPair) -> None:
    """Two reads at once are told apart, and a word is a word when its read is DONE."""
    first, second = pair.post((0, 0, 8)), pair.post((8, PAGE, 8))
    assert first != second, "words: two reads, two handles"
    assert {pair.ended(second), pair.ended(first)} == {HandleState.DONE}, "words: a good read ends DONE"
    assert bytes(pair.ours[:16]) == bytes(pair.theirs[:8]) + bytes(pair.theirs[PAGE : PAGE + 8]), "words: exact"
    for handle in (first, second):
        pair.reader.release(handle)


def _notifications(pair: TransportPair) -> None:
    """They arrive once each, whole, under the sender's name, in both directions."""
    messages = [b"%d" % i for i in range(20)] + [bytes(range(256))]
    for message in messages:
        pair.reader.notify(pair.peer.name, message)
    pair.peer.notify(pair.reader.name, b"back")
    theirs, ours = pair.heard[pair.peer.name], pair.heard[pair.reader.name]
    pair.until(lambda: len(theirs) >= len(messages) and bool(ours), "notifications")
    assert sorted(theirs) == sorted((pair.reader.name, m) for m in messages), "notifications: what was sent"
    assert ours == [(pair.peer.name, b"back")], "notifications: the other way"


def _names(pair: TransportPair) -> None:
    """Names agree with blobs; adding again is harmless; strangers and nonsense are refused."""
    blob = pair.peer.metadata()
    assert pair.reader.add_peer(blob) == pair.peer.name, "names: again, the same"
    for bad in (b"", b"x", bytes(100), pair.reader.metadata()):
        _refused(lambda bad=bad: pair.reader.add_peer(bad), f"names: {bad[:10]!r} is no peer's blob")  # type: ignore[misc]
    _refused(lambda: pair.reader.notify("nobody", b"x"), "names: nobody can't be notified")
    _refused(lambda: pair.reader.remove_peer("nobody"), "names: nobody can't be removed")
    assert not pair.reader.peer_gone("nobody") and not pair.reader.peer_gone(pair.peer.name), "names: nobody is gone"


def _malformed(pair: TransportPair) -> None:
    """Parts that do not pair are refused before anything is posted."""
    here, there = pair.ours.ctypes.data, pair.theirs.ctypes.data

    def post(local: object, remote: object) -> None:
        sides: list[Descs] = [np.array(side, np.int64).reshape(-1, 2) for side in (local, remote)]
        pair.reader.post_read(pair.peer.name, *sides)

    for local, remote in (
        ([], []),
        ([[here, 8]], [[there, 16]]),
        ([[here, 8]], [[there, 4], [there + 4, 4]]),
        ([[here, 0]], [[there, 0]]),
        ([[0, 8]], [[there, 8]]),
    ):
        _refused(lambda a=local, b=remote: post(a, b), f"malformed: {local} of {remote}")  # type: ignore[misc]
    assert not pair.ours.any(), "malformed: nothing was posted"


def _out_of_bounds(pair: TransportPair) -> None:
    """A place that was not registered is never read or written as if it were."""
    outside = np.zeros(PAGE, np.uint8)
    local = np.array([[outside.ctypes.data, 8]], np.int64)
    remote = np.array([[pair.theirs.ctypes.data, 8]], np.int64)
    _refused(lambda: pair.reader.post_read(pair.peer.name, local, remote), "bounds: a local place that is not ours")
    assert not outside.any(), "bounds: written all the same"
    try:
        handle = pair.post((0, SIZE - 4, 8))
    except TransportError:
        return
    assert pair.ended(handle) is HandleState.ERR, "bounds: a remote place that is not theirs is no success"
    assert pair.reader.reason(handle), "bounds: a reason"


def _removal(pair: TransportPair) -> None:
    """A removed peer is unknown and can come back."""
    blob = pair.peer.metadata()
    handle = pair.post((0, 0, 8))
    assert pair.ended(handle) is HandleState.DONE, "removal: a good read ends DONE"
    pair.reader.release(handle)
    pair.reader.remove_peer(pair.peer.name)
    _refused(lambda: pair.post((0, 0, 8)), "removal: unknown afterwards")
    assert pair.reader.add_peer(blob) == pair.peer.name, "removal: can come back"
    again = pair.post((8, 8, 8))
    assert pair.ended(again) is HandleState.DONE, "removal: reads again"
    pair.reader.release(again)


def _closing(pair: TransportPair) -> None:
    """A closed agent does nothing more and says so; closing again is harmless."""
    pair.reader.close()
    pair.reader.close()
    _refused(lambda: pair.post((0, 0, 8)), "closing: no reads")
    _refused(lambda: pair.reader.notify(pair.peer.name, b"x"), "closing: no notifications")
    _refused(pair.reader.metadata, "closing: no metadata")
    assert pair.reader.notifications() == [], "closing: hears nothing"


def _refused(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except TransportError:
        return
    raise AssertionError(f"{what}: not refused")
