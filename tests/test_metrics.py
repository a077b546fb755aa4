"""Counters that travel."""

from __future__ import annotations

import pickle

from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.metrics import Meter, Stats

COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000), max_size=4)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(a=COUNTS, b=COUNTS, c=COUNTS)
def test_stats_join_in_any_order_and_leave_their_parts_alone(a: dict, b: dict, c: dict) -> None:  # type: ignore[type-arg]
    parts = [Stats(a), Stats(b), Stats(c)]
    before = [dict(x.values) for x in parts]
    left = parts[0].aggregate(parts[1]).aggregate(parts[2])
    right = parts[2].aggregate(parts[0].aggregate(parts[1]))
    assert left == right
    assert {k: left.values[k] for k in left.values} == {k: a.get(k, 0) + b.get(k, 0) + c.get(k, 0) for k in a | b | c}
    assert [x.values for x in parts] == before


def test_a_meter_counts_until_taken() -> None:
    meter = Meter()
    assert meter.take() is None
    meter.add("reads")
    meter.add("reads")
    meter.add("seconds", 0.5)
    assert meter.take() == Stats({"reads": 2, "seconds": 0.5})
    assert meter.take() is None


def test_what_was_taken_does_not_grow_afterwards() -> None:
    meter = Meter()
    meter.add("reads")
    taken = meter.take()
    meter.add("reads")
    assert taken == Stats({"reads": 1})


def test_stats_cross_processes_and_read_in_one_line() -> None:
    stats = Stats({"b": 2, "a": 0.5})
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert repr(stats) == "Stats(a=0.5 b=2)"
    assert stats != {"b": 2, "a": 0.5}
