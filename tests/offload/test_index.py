"""Slots and keys: a dictionary is the model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvconn.offload.index import HostIndex, Room
from kvconn.offload.policy import Arc, Lru, Policy

SLOTS = 4
KEYS = [bytes([65 + n]) for n in range(8)]


def stored(index: HostIndex, *keys: bytes) -> list[bool]:
    return [index.stored(key) for key in keys]


def put(index: HostIndex, key: bytes) -> Room | None:
    room = index.reserve(key)
    if room is not None:
        index.commit(key)
    return room


def test_a_block_is_stored_when_its_writing_is_over() -> None:
    index = HostIndex(Lru(2))
    room = index.reserve(b"a")
    assert room == Room(0) and not index.stored(b"a") and index.writing(b"a") and index.slot(b"a") is None
    assert index.commit(b"a")
    assert index.stored(b"a") and index.slot(b"a") == 0
    index.reserve(b"b")
    index.abandon(b"b")
    assert put(index, b"c") == Room(1), "the abandoned one's slot"


def test_what_is_written_pinned_or_offered_makes_no_room() -> None:
    index = HostIndex(Lru(3))
    for key in (b"a", b"b"):
        put(index, key)
    index.reserve(b"c")
    index.pin(b"a")
    index.pin(b"a")
    index.offer(b"b")
    assert index.reserve(b"d") is None
    index.unpin(b"a")
    assert index.reserve(b"d") is None, "one reader is left"
    index.withdraw()
    assert index.reserve(b"d") == Room(1, b"b")


def test_reset_forgets_and_what_is_being_written_is_forgotten_later() -> None:
    index = HostIndex(Lru(3))
    put(index, b"a")
    put(index, b"read")
    index.pin(b"read")
    index.reserve(b"w")
    assert index.reset() == ([b"a"], False)
    assert not index.commit(b"w"), "of the time before the reset"
    index.unpin(b"read")
    assert index.reset() == ([b"read"], True)
    assert [index.reserve(key) is not None for key in (b"x", b"y", b"z")] == [True] * 3


class IndexMachine(RuleBasedStateMachine):
    """``slots`` is the truth: which key each slot holds, and who uses it."""

    policy: type[Policy] = Lru

    def __init__(self) -> None:
        super().__init__()
        self.index = HostIndex(self.policy(SLOTS))
        self.model: dict[bytes, int] = {}
        self.writing: set[bytes] = set()
        self.pins: list[bytes] = []
        self.offered: set[bytes] = set()

    def used(self) -> set[bytes]:
        return self.writing | set(self.pins) | self.offered

    @rule(key=st.sampled_from(KEYS))
    def access(self, key: bytes) -> None:
        if key in self.model:
            self.index.touch(key)
            return
        room, used = self.index.reserve(key), self.used()
        assert (room is None) == (len(self.model) == SLOTS and used >= set(self.model))
        if room is None:
            return
        if room.evicted is not None:
            assert room.evicted not in used and self.model.pop(room.evicted) == room.slot
        assert room.slot not in self.model.values()
        self.model[key] = room.slot
        self.writing.add(key)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), fine=st.booleans())
    def over(self, data: st.DataObject, fine: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(key)
        if fine:
            assert self.index.commit(key)
        else:
            self.index.abandon(key)
            del self.model[key]

    @precondition(lambda self: set(self.model) - self.writing)
    @rule(data=st.data(), offer=st.booleans())
    def use(self, data: st.DataObject, offer: bool) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.model) - self.writing)))
        if offer:
            self.index.offer(key)
            self.offered.add(key)
        else:
            self.index.pin(key)
            self.pins.append(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.pins.remove(key)
        self.index.unpin(key)

    @rule()
    def step_over(self) -> None:
        self.offered.clear()
        self.index.withdraw()

    @invariant()
    def the_model_is_right(self) -> None:
        for key in KEYS:
            assert self.index.writing(key) == (key in self.writing)
            assert self.index.slot(key) == (self.model.get(key) if key not in self.writing else None)
        assert len(self.index) == len(self.model) - len(self.writing)


class ArcMachine(IndexMachine):
    policy = Arc


def test_with_lru_every_slot_has_one_owner() -> None:
    run_state_machine_as_test(IndexMachine, settings=settings(max_examples=80, deadline=None, derandomize=True))


def test_with_arc_every_slot_has_one_owner() -> None:
    run_state_machine_as_test(ArcMachine, settings=settings(max_examples=80, deadline=None, derandomize=True))


def test_repr_is_one_readable_line() -> None:
    assert repr(HostIndex(Lru(3))) == "HostIndex(slots=3 stored=0 writing=0 pinned=0 evicted=0)"
