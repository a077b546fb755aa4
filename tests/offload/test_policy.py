"""LRU and ARC against their textbooks, and with keys in use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.offload.policy import Admission, Arc, Lru, Policy, make_policy
from tests.offload.textbook import PlainArc, PlainLru

KEYS = st.lists(st.integers(0, 11).map(lambda n: bytes([n])), max_size=200)


def nobody(key: bytes) -> bool:
    return False


def use(policy: Policy, key: bytes) -> None:
    if key in policy:
        policy.touch(key)
    else:
        assert policy.admit(key, nobody) is not None


@pytest.mark.parametrize(("name", "plain"), [("lru", PlainLru), ("arc", PlainArc)])
@given(keys=KEYS, capacity=st.integers(1, 6))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_same_keys_are_resident_as_in_the_textbook(
    name: str, plain: type[PlainLru | PlainArc], keys: list[bytes], capacity: int
) -> None:
    ours, textbook = make_policy(name, capacity), plain(capacity)  # type: ignore[arg-type]
    for key in keys:
        use(ours, key)
        textbook.use(key)
        assert all((one in ours) == textbook.has(one) for one in set(keys))
    assert len(ours) <= capacity


def test_arc_keeps_what_is_used_again_through_a_scan_and_lru_does_not() -> None:
    arc, lru = Arc(8), Lru(8)
    for policy in (arc, lru):
        for _ in range(2):
            for n in range(4):
                use(policy, b"hot%d" % n)
        for n in range(100):
            use(policy, b"scan%d" % n)
    assert [b"hot%d" % n in arc for n in range(4)] == [True] * 4
    assert [b"hot%d" % n in lru for n in range(4)] == [False] * 4


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_what_is_in_use_is_never_the_victim_and_a_refusal_changes_nothing(name: str) -> None:
    policy = make_policy(name, 3)  # type: ignore[arg-type]
    for key in (b"a", b"b", b"c"):
        use(policy, key)
    assert policy.admit(b"d", lambda key: key == b"a") == Admission(b"b")
    before = repr(policy)
    assert policy.admit(b"e", lambda key: True) is None
    assert repr(policy) == before and b"e" not in policy and b"a" in policy


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_any_sequence_with_pins_and_losses_stays_within_capacity(name: str) -> None:
    rng, policy = random.Random(7), make_policy(name, 5)  # type: ignore[arg-type]
    resident: set[bytes] = set()
    for _ in range(5000):
        key = bytes([rng.randrange(16)])
        pinned = {one for one in resident if rng.random() < 0.5}
        if key in resident and rng.random() < 0.2:
            policy.remove(key)
            resident.discard(key)
        elif key in resident:
            policy.touch(key)
        else:
            admission = policy.admit(key, pinned.__contains__)
            assert (admission is None) == (len(resident) == 5 and pinned == resident)
            if admission is not None:
                resident = (resident - {admission.victim}) | {key}  # type: ignore[assignment]
                assert admission.victim not in pinned
        assert len(policy) == len(resident) <= 5 and all(one in policy for one in resident)


def test_repr_is_one_readable_line() -> None:
    assert [repr(Lru(3)), repr(Arc(3))] == ["Lru(0/3)", "Arc(0/3 once=0 border=0.0)"]
