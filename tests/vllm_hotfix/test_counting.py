"""The filter before a counter that counts: together they must count ranks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvconn.vllm._hotfix_counting import Direction, ReportFilter

REPORTS = st.lists(st.tuples(st.sampled_from(["send", "recv"]), st.sampled_from("abc"), st.integers(0, 3)), max_size=60)


@given(REPORTS)
def test_a_counter_behind_it_completes_when_every_rank_has_spoken(reports: list[tuple[Direction, str, int]]) -> None:
    """Against sets of ranks that know C4's rule by themselves."""
    world, reports_filter = 4, ReportFilter()
    counted: Counter[tuple[Direction, str]] = Counter()
    ranks: dict[tuple[Direction, str], set[int]] = {}
    sent: set[str] = set()
    for direction, id, rank in reports:
        key = (direction, id)
        emitted = False
        if reports_filter.admit(rank, direction, {id}):
            counted[key] += 1
            if counted[key] == world:
                del counted[key]
                reports_filter.completed(direction, {id})
                emitted = True
        expected = False
        if direction == "recv" or id not in sent:
            ranks.setdefault(key, set()).add(rank)
            if len(ranks[key]) == world:
                del ranks[key]
                expected = True
                sent |= {id} if direction == "send" else set()
        assert emitted is expected


def test_tables_are_bounded_and_empty_themselves() -> None:
    reports = ReportFilter(memory=2, open_max=3)
    for n in range(10):
        reports.admit(0, "send", {f"stray{n}"})
    assert repr(reports) == "ReportFilter(open=3 remembered=0 duplicates=0 late=0 dropped=7)"
    reports.completed("send", {"stray7", "stray8", "stray9"})
    assert repr(reports) == "ReportFilter(open=0 remembered=2 duplicates=0 late=0 dropped=7)"


def test_a_completed_send_is_forgotten_after_memory_others() -> None:
    reports = ReportFilter(memory=1)
    reports.admit(0, "send", {"a"})
    reports.completed("send", {"a"})
    assert reports.admit(0, "send", {"a"}) == set()
    reports.completed("send", {"b"})
    assert reports.admit(0, "send", {"a"}) == {"a"}
    assert (reports.duplicates, reports.late) == (0, 1)
