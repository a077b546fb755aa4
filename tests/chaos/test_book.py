"""Where every request is while engines come and go: what is tried again, what is lost, what counts as survived."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvconn.base import FinishReason
from kvconn.chaos.book import ABORT_WITHIN, PRANKS, TOO_LONG, TRIES, Book, Cut, Shares, Submit
from kvconn.chaos.faults import Director, Fault, faults
from kvconn.engine.client import Finished, FirstToken

PARAMS = {"remote_block_ids": [[3, 4]], "remote_port": 1, "remote_request_id": "t"}
RIGHT = (7, 8, 9)
NOBODY, SILENT, FOOL = 11, 12, 13


def book(prank: str | None = None, concurrency: int = 1, patience: float = 10.0) -> Book:
    shares = Shares(0.0, 1.0 if prank in PRANKS else 0.0)
    if prank is not None and prank not in PRANKS:
        shares = Shares(1.0, 0.0)
    made = Book(
        lambda n: ((1, 2, n), RIGHT),
        ("D1", "D2"),
        (NOBODY, SILENT, FOOL),
        concurrency=concurrency,
        shares=shares,
        patience=patience,
        rng=random.Random(0),
    )
    if prank is not None:
        made._rng = Chooses(prank)  # type: ignore[assignment]
    return made


class Chooses(random.Random):
    """Chooses this one where it is to be had, else the first."""

    def __init__(self, what: str) -> None:
        super().__init__(0)
        self.what = what

    def choice(self, seq: Any) -> Any:
        return self.what if self.what in seq else seq[0]


def ended(
    id: str, tokens: tuple[int, ...] = RIGHT, reason: FinishReason = FinishReason.LENGTH, **more: Any
) -> Finished:
    return Finished(id=id, tokens=tokens, reason=reason, t=0.0, **more)


def prefilled(id: str) -> Finished:
    return ended(id, RIGHT[:1], kv_transfer_params=PARAMS)


def test_a_request_goes_through_p_and_one_d_and_is_done_with_its_tokens() -> None:
    b = book()
    (to_p,) = b.due(0.0)
    assert isinstance(to_p, Submit) and (to_p.where, to_p.request.id, to_p.request.max_tokens) == ("P", "r1.1", 1)
    assert b.told("P", FirstToken(id="r1.1", t=0.0), 0.0) == []
    (to_d,) = b.told("P", prefilled("r1.1"), 0.0)
    assert isinstance(to_d, Submit) and to_d.where in ("D1", "D2") and to_d.request.kv_transfer_params == PARAMS
    b.open = False
    assert b.told(to_d.where, ended("r1.1"), 0.0) == []
    assert (b.done, b.asked, b.in_flight, b.lost, b.wrong) == (1, 1, 0, [], [])
    assert b.served == {to_d.where: 1, "P": 1}
    assert repr(b) == "Book(asked=1 done=1 in flight=0 retried=0 lost=0 wrong=0)"


@pytest.mark.parametrize("where", ["P", "D"])
def test_a_request_whose_engine_died_is_tried_again_later_and_each_time_later(where: str) -> None:
    b, at = book(), 0.0
    for tries in range(1, 4):
        at = next(t for t in (at + k * 0.01 for k in range(1000)) if b.due(t))
        on = "P"
        if where == "D":
            (order,) = b.told("P", prefilled(f"r1.{tries}"), at)
            on = order.where
        b.died(on, at)
        assert b.due(at + 0.2 * tries - 0.011) == []
    assert (b.retried, b.lost) == (3, [])


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_tokens_of_a_request_that_ended_early_are_compared_too(reason: FinishReason) -> None:
    b = book()
    b.due(0.0)
    (order,) = b.told("P", prefilled("r1.1"), 0.0)
    b.told(order.where, ended("r1.1", RIGHT[:2], reason), 0.0)
    assert b.wrong == [] and b.retried == 1
    (again,) = b.due(1.0)
    b.told("P", ended(again.request.id, (0,), reason), 1.0)  # type: ignore[union-attr]
    assert [(w.id, w.where, w.got) for w in b.wrong] == [("r1.2", "P", (0,))]


def test_wrong_tokens_are_wrong_although_they_are_as_many() -> None:
    b = book()
    b.due(0.0)
    (order,) = b.told("P", prefilled("r1.1"), 0.0)
    b.told(order.where, ended("r1.1", (7, 8, 0)), 0.0)
    assert len(b.wrong) == 1 and b.done == 0


def test_what_is_stuck_keeps_nobody_else_from_coming_up_to_a_bound() -> None:
    b = book(concurrency=2, patience=100.0)
    assert [len(b.due(at)) for at in (0.0, 0.5, 1.5, 1.6, 3.0, 5.0, 7.0)] == [2, 0, 2, 0, 2, 2, 0]


def test_silence_is_lost_and_taken_back_and_a_word_is_not_silence() -> None:
    b = book(patience=10.0)
    b.due(0.0)
    b.told("P", FirstToken(id="r1.1", t=0.0), 9.0)
    assert b.judge(18.0) == [] and b.lost == []
    assert b.judge(19.1) == [Cut("P", "r1.1")]
    assert b.lost == ["r1.1: no word from P for 10 s"] and b.in_flight == 0


def test_what_never_ends_well_is_lost_in_the_end() -> None:
    b, at = book(), 0.0
    b.due(at)
    b.open = False
    for tries in range(1, TRIES + 1):
        b.told("P", ended(f"r1.{tries}", (), FinishReason.ERROR), at)
        at += 10.0
        b.due(at)
    assert b.lost == [f"r1.{TRIES}: not done after {TRIES} tries"]


def test_what_is_not_done_when_time_is_over_is_lost() -> None:
    b = book(concurrency=3)
    b.due(0.0)
    b.died("P", 0.0)
    b.give_up()
    assert len(b.lost) == 3 and b.in_flight == 0


@pytest.mark.parametrize("prank", PRANKS)
def test_a_prank_counts_when_it_was_played_and_as_survived_when_the_request_is_done(prank: str) -> None:
    b = book(prank)
    b.due(0.0)
    assert b.injected[prank] == 0
    b.open = False
    orders = b.told("P", prefilled("r1.1"), 0.0) + b.due(2.0 if prank == "read twice" else 0.0)
    assert b.injected[prank] == 1
    params = [order.request.kv_transfer_params for order in orders]  # type: ignore[union-attr]
    ports = {"nobody at the peer": NOBODY, "peer never answers": SILENT, "peer answers nonsense": FOOL}
    assert len(orders) == {"never read": 0, "read twice": 2}.get(prank, 1)
    assert all(p["remote_port"] == ports.get(prank, 1) for p in params)
    assert all((p["remote_block_ids"] == [[4, 4]]) is (prank == "params changed") for p in params)
    assert all((o.request.max_tokens == TOO_LONG) is (prank == "refused by D") for o in orders)  # type: ignore[union-attr]
    for order in orders:
        b.told(order.where, ended("r1.1", (), FinishReason.ERROR), 2.0)
    (again,) = b.due(5.0)
    (plain,) = b.told("P", prefilled(again.request.id), 5.0)  # type: ignore[union-attr]
    assert b.survived[prank] == 0
    b.told(plain.where, ended(again.request.id), 5.0)  # type: ignore[union-attr]
    assert (b.survived[prank], b.injected[prank], b.done) == (1, 1, 1)


@pytest.mark.parametrize("where", ["P", "D"])
def test_an_abort_that_came_too_late_is_given_to_the_next_request_and_comes_sooner(where: str) -> None:
    b = book(f"abort on {where}")
    b.due(0.0)
    b._shares = Shares(0.0, 0.0)
    (to_d,) = b.told("P", prefilled("r1.1"), 0.0)
    b.told(to_d.where, ended("r1.1"), 0.0)
    assert (b.done, b.drawn, b.injected) == (1, 1, {})
    orders = b.due(0.0)  # the next, which nobody drew an abort for
    if where == "D":
        orders += b.told("P", prefilled("r2.1"), 0.0)
    orders += b.due(ABORT_WITHIN / 2)
    (cut,) = [order for order in orders if isinstance(order, Cut)]
    assert cut.id == "r2.1"
    b.told(cut.where, ended("r2.1", RIGHT[:1], FinishReason.ABORT), 1.0)
    assert (b.drawn, b.injected[f"abort on {where}"]) == (1, 1)
    assert not b._owed


@pytest.mark.parametrize("where", ["P", "D"])
def test_an_abort_counts_when_the_engine_said_so(where: str) -> None:
    b = book(f"abort on {where}")
    b.due(0.0)
    on = "P"
    if where == "D":
        (order,) = b.told("P", prefilled("r1.1"), 0.0)
        on = order.where
    assert b.due(1.0) == [Cut(on, "r1.1")]
    b.told(on, ended("r1.1", (), FinishReason.ABORT), 1.0)
    assert b.injected[f"abort on {where}"] == 1


def test_two_readers_of_one_reference_are_both_compared_and_one_right_is_enough() -> None:
    b = book("read twice")
    b.due(0.0)
    b.told("P", prefilled("r1.1"), 0.0)
    b.told("D1", ended("r1.1"), 0.0)
    assert b.done == 0
    b.told("D2", ended("r1.1", (), FinishReason.ERROR), 0.0)
    assert b.done == 1


class TestDirector:
    KINDS = faults(read=2.0, lease=3.0)

    def played(self, seed: int) -> list[tuple[Fault, str]]:
        director, now, out = Director(self.KINDS, ("D1", "D2"), random.Random(seed), 0.0), 0.0, []
        served = dict.fromkeys(("P", "D1", "D2"), 0)
        while len(out) < 2 * len(self.KINDS):
            now += 0.1
            if (drawn := director.draw(now)) is not None:
                out.append(drawn)
            if director.ending(now) is not None:
                director.over(True, served, now)
                served = {name: count + 1 for name, count in served.items()}
            director.look(served)
        assert director.injected == director.survived == {fault.name: 2 for fault in self.KINDS} or director.busy
        return out

    def test_each_kind_comes_once_per_round_and_the_same_for_a_seed(self) -> None:
        rounds = self.played(1)
        assert {fault.name for fault, _ in rounds[: len(self.KINDS)]} == {fault.name for fault in self.KINDS}
        assert rounds == self.played(1) != self.played(2)
        assert all((where == "P") is (fault.where == "P") for fault, where in rounds)

    def test_one_at_a_time_and_the_next_when_every_engine_has_served_since(self) -> None:
        director = Director(self.KINDS, ("D1", "D2"), random.Random(0), 0.0)
        assert director.draw(0.5) is None and director.draw(2.0) is not None and director.draw(3.0) is None
        assert director.ending(100.0) is not None
        director.over(True, {"P": 5, "D1": 5}, 100.0)
        director.look({"P": 6, "D1": 6})
        assert director.busy and not director.survived and director.draw(200.0) is None
        director.look({"P": 6, "D1": 6, "D2": 1})
        assert not director.busy and sum(director.survived.values()) == 1
        assert director.draw(200.0) is not None

    def test_what_did_not_happen_does_not_count(self) -> None:
        director = Director(self.KINDS, ("D1", "D2"), random.Random(0), 0.0)
        director.draw(2.0)
        director.over(False, {}, 3.0)
        assert not director.busy and not director.injected
