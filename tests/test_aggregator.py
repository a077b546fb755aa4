"""C1 to C4 on the aggregator over ranks: tables, a naive model, and mutants the model has to catch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvconn.aggregator import KVOutputAggregator, Owed
from kvconn.base import Direction, Fact, KVConnector, KVConnectorOutput, WorkerFacts
from kvconn.errors import ConfigError
from kvconn.metrics import Stats


class Output:
    """A worker's output of one step: ``tokens`` stands for everything that is not the connector's."""

    def __init__(self, part: Any = None, tokens: tuple[int, ...] = ()) -> None:
        self.kv_connector_output = part
        self.tokens = tokens


def sent(*ids: str) -> Output:
    return Output(KVConnectorOutput(finished_sending=set(ids)))


def received(*ids: str, failed: tuple[str, ...] = ()) -> Output:
    return Output(KVConnectorOutput(finished_recving=set(ids), failed_recving=set(failed)))


def part(result: Any) -> Any:
    assert result is not None
    return result.kv_connector_output


class Connector(KVConnector):
    """A connector whose author narrowed the count."""

    def __init__(self, count: int | None) -> None:
        self.count = count

    def get_finished_count(self) -> int | None:
        return self.count

    def build_connector_meta(self, step: Any) -> Any:
        raise NotImplementedError

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        raise NotImplementedError


class TestEveryRank:
    @pytest.mark.parametrize("world", [1, 2, 8])
    def test_all_ranks_in_one_step(self, world: int) -> None:
        aggregator = KVOutputAggregator(world)
        assert part(aggregator.aggregate([sent("r") for _ in range(world)])).finished_sending == {"r"}
        assert aggregator.pending() == []

    @pytest.mark.parametrize("world", [2, 8])
    def test_replicated_ranks_first_leave_one_outstanding_and_rank_0_completes(self, world: int) -> None:
        aggregator = KVOutputAggregator(world)
        first = aggregator.aggregate([Output(), *(sent("r") for _ in range(1, world))], now=5.0)
        assert part(first).finished_sending is None
        assert aggregator.pending() == [Owed("send", "r", (0,), 5.0)]
        silent = [Output() for _ in range(world)]
        for _ in range(3):
            assert part(aggregator.aggregate(silent)).finished_sending is None
        last = aggregator.aggregate([sent("r"), *silent[1:]])
        assert part(last).finished_sending == {"r"}
        assert part(aggregator.aggregate(silent)).finished_sending is None
        assert (aggregator.pending(), aggregator.duplicates) == ([], 0)

    @pytest.mark.parametrize("world", [2, 8])
    def test_a_rank_that_repeats_itself_does_not_stand_in_for_another(self, world: int) -> None:
        aggregator = KVOutputAggregator(world)
        for _ in range(world + 1):
            outputs = [Output() for _ in range(world)]
            outputs[1] = sent("r")
            assert part(aggregator.aggregate(outputs)).finished_sending is None
        assert aggregator.duplicates == world
        (owed,) = aggregator.pending()
        assert owed.ranks == tuple(r for r in range(world) if r != 1)

    def test_ids_complete_each_on_its_own(self) -> None:
        aggregator = KVOutputAggregator(2)
        assert part(aggregator.aggregate([sent("a", "b"), sent("b")])).finished_sending == {"b"}
        assert part(aggregator.aggregate([sent("c"), sent("a")])).finished_sending == {"a"}
        assert [owed.id for owed in aggregator.pending()] == ["c"]

    def test_directions_are_apart(self) -> None:
        aggregator = KVOutputAggregator(2)
        result = part(aggregator.aggregate([sent("r"), received("r")]))
        assert (result.finished_sending, result.finished_recving) == (None, None)
        assert {(o.direction, o.ranks) for o in aggregator.pending()} == {("send", (1,)), ("recv", (0,))}

    def test_a_list_that_is_not_one_output_per_rank_is_our_callers_fault(self) -> None:
        with pytest.raises(ValueError, match="expected 2 outputs, one per rank, got 3"):
            KVOutputAggregator(2).aggregate([None, None, None])


class TestWhileTheOutputRankIsSilent:
    @pytest.mark.parametrize("nothing", [None, False])
    def test_everything_found_waits_for_the_next_call(self, nothing: Any) -> None:
        aggregator = KVOutputAggregator(2)
        facts = [Fact("r", "send", 1, rank, "done") for rank in range(2)]
        full = Output(
            KVConnectorOutput(
                finished_sending={"r"},
                finished_recving={"q"},
                failed_recving={"q"},
                invalid_block_ids={7},
                kv_connector_stats=Stats({"bytes": 3}),
                kv_cache_events=WorkerFacts(()),
                kv_connector_worker_meta=WorkerFacts((facts[1],)),
            )
        )
        assert aggregator.aggregate([nothing, full]) is None
        first = Output(
            KVConnectorOutput(
                finished_sending={"r"},
                finished_recving={"q"},
                kv_connector_stats=Stats({"bytes": 4, "reads": 1}),
                kv_connector_worker_meta=WorkerFacts((facts[0],)),
            )
        )
        result = part(aggregator.aggregate([first, None]))
        assert (result.finished_sending, result.finished_recving, result.failed_recving) == ({"r"}, {"q"}, {"q"})
        assert result.invalid_block_ids == {7}
        assert result.kv_connector_stats == Stats({"bytes": 7, "reads": 1})
        assert list(result.kv_connector_worker_meta.facts) == [msgspec.structs.replace(facts[1], more=0b11)]
        assert result.kv_cache_events == WorkerFacts(())

    def test_what_completed_meanwhile_is_emitted_once(self) -> None:
        aggregator = KVOutputAggregator(2)
        assert aggregator.aggregate([sent("r"), sent("r")], output_rank=0) is not None
        aggregator = KVOutputAggregator(3)
        assert aggregator.aggregate([sent("r"), sent("r"), None], output_rank=2) is None
        assert aggregator.aggregate([None, None, None], output_rank=2) is None
        assert aggregator.aggregate([None, None, sent("r")], output_rank=0) is None
        assert aggregator.pending() == []
        silent = [Output(), None, None]
        assert part(aggregator.aggregate(silent)).finished_sending == {"r"}
        assert part(aggregator.aggregate(silent)).finished_sending is None

    def test_a_failure_found_after_completion_still_marks_the_receive_that_waits(self) -> None:
        aggregator = KVOutputAggregator(2)
        assert aggregator.aggregate([received("r"), received("r")], output_rank=1) is not None
        aggregator = KVOutputAggregator(3, quorum=2)
        assert aggregator.aggregate([received("r"), received("r"), None], output_rank=2) is None
        late = Output(KVConnectorOutput(failed_recving={"r"}))
        result = part(aggregator.aggregate([None, None, late], output_rank=2))
        assert (result.finished_recving, result.failed_recving) == ({"r"}, {"r"})

    def test_another_output_rank_may_carry_it(self) -> None:
        aggregator = KVOutputAggregator(2)
        assert part(aggregator.aggregate([None, sent("r")], output_rank=1)).finished_sending is None
        assert part(aggregator.aggregate([sent("r"), Output()], output_rank=1)).finished_sending == {"r"}


class TestFailures:
    def test_failed_leaves_with_the_completed_receive_and_not_before(self) -> None:
        aggregator = KVOutputAggregator(2)
        early = part(aggregator.aggregate([received("r", failed=("r",)), Output()]))
        assert (early.finished_recving, early.failed_recving) == (None, None)
        late = part(aggregator.aggregate([Output(), received("r")]))
        assert (late.finished_recving, late.failed_recving) == ({"r"}, {"r"})

    def test_a_failure_said_before_the_receive_is_remembered(self) -> None:
        aggregator = KVOutputAggregator(1)
        only_failed = Output(KVConnectorOutput(failed_recving={"r"}))
        assert part(aggregator.aggregate([only_failed])).failed_recving is None
        result = part(aggregator.aggregate([received("r")]))
        assert (result.finished_recving, result.failed_recving) == ({"r"}, {"r"})

    def test_one_life_s_failure_is_not_the_next_one_s(self) -> None:
        aggregator = KVOutputAggregator(1)
        assert part(aggregator.aggregate([received("r", failed=("r",))])).failed_recving == {"r"}
        assert part(aggregator.aggregate([received("r")])).failed_recving is None

    def test_expect_forgets_a_failure_of_an_earlier_life(self) -> None:
        aggregator = KVOutputAggregator(1)
        aggregator.aggregate([Output(KVConnectorOutput(failed_recving={"r"}))])
        aggregator.expect("recv", "r")
        assert part(aggregator.aggregate([received("r")])).failed_recving is None

    def test_failures_nobody_completes_are_bounded(self) -> None:
        aggregator = KVOutputAggregator(2, memory=4)
        for index in range(50):
            aggregator.aggregate([Output(KVConnectorOutput(failed_recving={f"r{index}"})), None])
        assert (len(aggregator.pending()), aggregator.dropped) == (4, 46)


class TestExpect:
    def test_an_expected_id_is_owed_by_the_whole_world_at_once(self) -> None:
        aggregator = KVOutputAggregator(3)
        aggregator.expect("send", "r", now=2.0)
        assert aggregator.pending() == [Owed("send", "r", (0, 1, 2), 2.0)]

    def test_expect_opens_a_fresh_entry(self) -> None:
        aggregator = KVOutputAggregator(2)
        aggregator.aggregate([sent("r"), None])
        aggregator.expect("send", "r")
        assert part(aggregator.aggregate([Output(), sent("r")])).finished_sending is None
        assert part(aggregator.aggregate([sent("r"), None])).finished_sending == {"r"}

    def test_expect_takes_a_completed_send_out_of_the_memory(self) -> None:
        aggregator = KVOutputAggregator(1)
        assert part(aggregator.aggregate([sent("r")])).finished_sending == {"r"}
        assert part(aggregator.aggregate([sent("r")])).finished_sending is None
        aggregator.expect("send", "r")
        assert part(aggregator.aggregate([sent("r")])).finished_sending == {"r"}

    def test_expect_forgets_a_completion_that_nobody_fetched(self) -> None:
        aggregator = KVOutputAggregator(2)
        aggregator.aggregate([sent("r"), None])
        aggregator.aggregate([received("q", failed=("q",)), None])
        assert aggregator.aggregate([None, sent("r")]) is None
        assert aggregator.aggregate([None, received("q")]) is None
        assert aggregator.pending() == []
        aggregator.expect("send", "r")
        aggregator.expect("recv", "q")
        result = part(aggregator.aggregate([sent("r"), None]))
        assert (result.finished_sending, result.finished_recving, result.failed_recving) == (None, None, None)
        again = part(aggregator.aggregate([received("q"), received("q")]))
        assert (again.finished_recving, again.failed_recving) == ({"q"}, None)

    def test_what_is_said_again_of_an_expected_receive_opens_nothing_until_the_next_is_expected(self) -> None:
        aggregator = KVOutputAggregator(2, memory=4)
        aggregator.expect("recv", "r")
        assert part(aggregator.aggregate([received("r"), received("r", failed=("r",))])).failed_recving == {"r"}
        again = part(aggregator.aggregate([received("r", failed=("r",)), Output()]))
        assert (again.finished_recving, again.failed_recving) == (None, None)
        assert (aggregator.pending(), aggregator.duplicates) == ([], 1)
        aggregator.expect("recv", "r")
        result = part(aggregator.aggregate([received("r"), received("r")]))
        assert (result.finished_recving, result.failed_recving) == ({"r"}, None)
        for index in range(9):
            aggregator.expect("recv", f"r{index}")
            aggregator.aggregate([received(f"r{index}"), received(f"r{index}")])
        assert len(aggregator._received) == 4

    def test_expected_entries_are_not_dropped_to_stay_bounded(self) -> None:
        aggregator = KVOutputAggregator(2, memory=3)
        aggregator.aggregate([sent("r0"), None])  # nobody expected it yet
        for index in range(10):
            aggregator.expect("send", f"r{index}")
        for index in range(20):
            aggregator.aggregate([sent(f"stray{index}"), None])
        owed = [o.id for o in aggregator.pending()]
        assert owed == [*(f"r{i}" for i in range(10)), "stray17", "stray18", "stray19"]


class TestStockRule:
    def test_a_completed_send_is_absorbed(self) -> None:
        aggregator = KVOutputAggregator(2)
        assert part(aggregator.aggregate([sent("r"), sent("r")])).finished_sending == {"r"}
        for _ in range(3):
            assert part(aggregator.aggregate([sent("r"), sent("r")])).finished_sending is None
        assert (aggregator.duplicates, aggregator.pending()) == (6, [])

    def test_a_receive_after_completion_opens_a_new_life(self) -> None:
        aggregator = KVOutputAggregator(2)
        for _ in range(3):
            assert part(aggregator.aggregate([received("r"), received("r")])).finished_recving == {"r"}
        assert part(aggregator.aggregate([received("r"), Output()])).finished_recving is None
        assert [o.ranks for o in aggregator.pending()] == [(1,)]

    def test_the_memory_of_completed_sends_is_bounded_and_keeps_what_is_still_heard_of(self) -> None:
        aggregator = KVOutputAggregator(1, memory=2)
        for id in ("a", "b"):
            aggregator.aggregate([sent(id)])
        aggregator.aggregate([sent("a")])  # heard of again: b is the oldest now
        aggregator.aggregate([sent("c")])
        assert part(aggregator.aggregate([sent("a")])).finished_sending is None
        assert part(aggregator.aggregate([sent("b")])).finished_sending == {"b"}

    def test_entries_nobody_expects_are_bounded_oldest_first(self) -> None:
        aggregator = KVOutputAggregator(2, memory=2)
        for id in ("a", "b", "c"):
            aggregator.aggregate([sent(id), None])
        assert ([o.id for o in aggregator.pending()], aggregator.dropped) == (["b", "c"], 1)


class TestTheCount:
    def test_a_connector_that_leaves_the_count_alone_is_taken(self) -> None:
        aggregator = KVOutputAggregator.from_connector(Connector(None), 8)
        assert (aggregator.world, aggregator.need) == (8, 8)

    @pytest.mark.parametrize("count", [1, 8])
    def test_a_connector_that_sets_the_count_is_refused_by_name(self, count: int) -> None:
        with pytest.raises(ConfigError) as caught:
            KVOutputAggregator.from_connector(Connector(count), 8)
        message = str(caught.value)
        assert "Connector.get_finished_count(): expected None" in message
        assert f"got {count}" in message
        assert "quorum" in message

    def test_a_quorum_named_by_the_operator_is_of_distinct_ranks(self) -> None:
        aggregator = KVOutputAggregator.from_connector(Connector(1), 4, quorum=2)
        outputs = [Output(), Output(), sent("r"), Output()]
        assert part(aggregator.aggregate(outputs)).finished_sending is None
        assert part(aggregator.aggregate(outputs)).finished_sending is None
        assert part(aggregator.aggregate([sent("r"), None, None, None])).finished_sending == {"r"}
        assert part(aggregator.aggregate([Output(), sent("r"), None, None])).finished_sending is None

    def test_ranks_beyond_a_quorum_in_its_step_come_after_it(self) -> None:
        aggregator = KVOutputAggregator(4, quorum=2)
        result = part(aggregator.aggregate([sent("r"), sent("r"), sent("r", "q"), Output()]))
        assert (result.finished_sending, aggregator.duplicates) == ({"r"}, 1)
        result = part(aggregator.aggregate([received("p"), received("p"), received("p"), Output()]))
        assert result.finished_recving == {"p"}
        assert [(o.id, o.ranks) for o in aggregator.pending()] == [("q", (0, 1, 3)), ("p", (0, 1, 3))]

    @pytest.mark.parametrize(("world", "quorum"), [(0, None), (2, 0), (2, 3), (-1, None)])
    def test_impossible_numbers_are_refused(self, world: int, quorum: int | None) -> None:
        with pytest.raises(ConfigError, match=f"quorum={quorum} world={world}"):
            KVOutputAggregator(world, quorum=quorum)


class TestTheResult:
    def test_it_is_a_shallow_copy_of_the_output_ranks_object(self) -> None:
        base = Output(KVConnectorOutput(finished_sending={"r"}), tokens=(1, 2))
        result = KVOutputAggregator(1).aggregate([base])
        assert type(result) is Output
        assert result is not base
        assert result.tokens is base.tokens
        assert result.kv_connector_output is not base.kv_connector_output
        assert type(result.kv_connector_output) is KVConnectorOutput

    def test_objects_that_are_more_than_their_attributes_are_copied_whole(self) -> None:
        class Slotted(KVConnectorOutput):
            __slots__ = ("mark",)

        theirs = Slotted(finished_sending={"r"})
        theirs.mark = 7
        result = part(KVOutputAggregator(1).aggregate([Output(theirs)]))
        assert type(result) is Slotted
        assert (result.mark, result.finished_sending) == (7, {"r"})

    def test_an_object_that_says_how_it_is_copied_is_copied_so(self) -> None:
        class Made(KVConnectorOutput):
            def __reduce__(self) -> tuple[object, ...]:
                return Made, (), {**vars(self), "copied": True}

        result = part(KVOutputAggregator(1).aggregate([Output(Made(finished_sending={"r"}))]))
        assert (result.copied, result.finished_sending) == (True, {"r"})

    def test_inputs_are_never_mutated(self) -> None:
        aggregator = KVOutputAggregator(2)
        outputs = [
            Output(
                KVConnectorOutput(
                    finished_sending={"a", "b"},
                    finished_recving={"c"},
                    failed_recving={"c"},
                    invalid_block_ids={rank},
                    kv_connector_stats=Stats({"bytes": rank + 1}),
                    kv_connector_worker_meta=WorkerFacts((Fact("a", "send", 1, rank, "done"),)),
                )
            )
            for rank in range(2)
        ]
        before = copy.deepcopy([vars(o.kv_connector_output) for o in outputs])
        results = [part(aggregator.aggregate(outputs)) for _ in range(2)]
        for result in results:
            for values in (result.finished_sending, result.finished_recving, result.failed_recving):
                if values is not None:
                    values.add("scribble")
            result.invalid_block_ids.add(99)
        assert [vars(o.kv_connector_output) for o in outputs] == before

    def test_it_has_the_output_ranks_class_and_keeps_what_we_do_not_know(self) -> None:
        theirs = SimpleNamespace(finished_sending={"r"}, expected_finished_count=3)
        result = part(KVOutputAggregator(2).aggregate([Output(theirs), sent("r")]))
        assert type(result) is SimpleNamespace
        assert result.expected_finished_count == 3
        assert (result.finished_sending, result.finished_recving, result.failed_recving) == ({"r"}, None, None)

    def test_attributes_that_are_missing_count_as_none(self) -> None:
        bare = Output(SimpleNamespace())
        result = part(KVOutputAggregator(1).aggregate([bare]))
        assert (result.finished_sending, result.finished_recving, result.failed_recving) == (None, None, None)
        assert (result.kv_connector_stats, result.kv_cache_events, result.kv_connector_worker_meta) == (None,) * 3
        assert result.invalid_block_ids == set()

    def test_a_rank_without_a_connector_output_says_nothing(self) -> None:
        aggregator = KVOutputAggregator(3)
        assert part(aggregator.aggregate([SimpleNamespace(tokens=1), sent("r"), Output()])).finished_sending is None
        assert [o.ranks for o in aggregator.pending()] == [(0, 2)]

    def test_an_output_rank_without_a_part_gets_another_ranks_class(self) -> None:
        result = part(KVOutputAggregator(2, quorum=1).aggregate([Output(), sent("r")]))
        assert type(result) is KVConnectorOutput
        assert result.finished_sending == {"r"}

    def test_empty_sets_are_none(self) -> None:
        result = part(KVOutputAggregator(1).aggregate([Output(KVConnectorOutput(set(), set(), set()))]))
        assert (result.finished_sending, result.finished_recving, result.failed_recving) == (None, None, None)

    def test_what_merges_is_joined_in_rank_order_and_handed_over_once(self) -> None:
        aggregator = KVOutputAggregator(3)
        facts = [Fact("r", "send", 1, rank, "done") for rank in range(3)]
        outputs = [Output(KVConnectorOutput(kv_connector_worker_meta=WorkerFacts((f,)))) for f in facts]
        joined = part(aggregator.aggregate(outputs)).kv_connector_worker_meta
        assert list(joined.facts) == [msgspec.structs.replace(facts[0], more=0b111)]
        assert part(aggregator.aggregate([Output()] * 3)).kv_connector_worker_meta is None

    def test_ages_are_unknown_without_a_clock(self) -> None:
        aggregator = KVOutputAggregator(2)
        aggregator.aggregate([sent("r"), None])
        aggregator.expect("recv", "q")
        assert [o.since for o in aggregator.pending()] == [None, None]

    def test_repr_is_one_line(self) -> None:
        aggregator = KVOutputAggregator(8, quorum=3)
        aggregator.aggregate([sent("r"), *[None] * 7])
        aggregator.aggregate([sent("r"), *[None] * 7])
        assert repr(aggregator) == "KVOutputAggregator(world=8 need=3 pending=1 duplicates=1)"


# --- the model ----------------------------------------------------------------------------------------------------

IDS = st.sets(st.sampled_from("abc"), max_size=3)
#: one step: per rank what it reports (None: nothing at all), and whether the output rank has an output.
STEP = st.tuples(st.lists(st.none() | st.tuples(IDS, IDS), min_size=3, max_size=3), st.booleans())


class _Model:
    """Stock's rule, written as naively as it reads (C4)."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.heard: dict[tuple[str, str], set[int]] = {}
        self.sent: set[str] = set()
        self.ready: dict[str, set[str]] = {"send": set(), "recv": set()}

    def hear(self, direction: str, id: str, rank: int) -> None:
        if direction == "send" and id in self.sent:
            return
        ranks = self.heard.setdefault((direction, id), set())
        ranks.add(rank)
        if len(ranks) == self.world:
            del self.heard[direction, id]
            self.ready[direction].add(id)
            if direction == "send":
                self.sent.add(id)

    def take(self, direction: str) -> set[str]:
        ready, self.ready[direction] = self.ready[direction], set()
        return ready


def check_against_the_model(
    make: Callable[[int], KVOutputAggregator], phases: tuple[Phase, ...] = tuple(Phase)
) -> None:
    """AssertionError when ``make(world)`` ever emits what the model does not."""

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=200,
        report_multiple_bugs=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(steps=st.lists(STEP, min_size=1, max_size=12))
    def check(steps: list[Any]) -> None:
        aggregator, model = make(3), _Model(3)
        for reports, speaks in steps:
            outputs: list[Output | None] = []
            for rank, report in enumerate(reports):
                for direction, ids in zip(("send", "recv"), report or (), strict=False):
                    for id in ids:
                        if rank or speaks:
                            model.hear(direction, id, rank)
                said = None if report is None else KVConnectorOutput(set(report[0]), set(report[1]))
                outputs.append(None if rank == 0 and not speaks else Output(said))
            result = aggregator.aggregate(outputs)
            if not speaks:
                assert result is None
                continue
            for direction, ids in (("send", part(result).finished_sending), ("recv", part(result).finished_recving)):
                assert (ids or set()) == model.take(direction)
        assert {(o.direction, o.id): set(range(3)) - set(o.ranks) for o in aggregator.pending()} == model.heard

    check()


def test_the_aggregator_behaves_as_the_naive_model() -> None:
    check_against_the_model(KVOutputAggregator)


class CountsReports(KVOutputAggregator):
    """Mutant: every report counts, whoever it is from: the bug class this project exists for."""

    def _report(self, direction: Direction, id: str, ranks: int, now: float | None) -> None:
        entry = self._entries.get((direction, id))
        others = 0 if entry is None else entry.ranks.bit_count()
        super()._report(direction, id, (1 << ranks.bit_count()) - 1 << others, now)


class LosesWhileSilent(KVOutputAggregator):
    """Mutant: reads nothing of a step in which the output rank has no output."""

    def aggregate(self, outputs: Any, output_rank: int = 0, now: float | None = None) -> Any:
        return super().aggregate(outputs, output_rank, now) if outputs[output_rank] else None


class ForgetsSends(KVOutputAggregator):
    """Mutant: a late duplicate of a completed send opens it again."""

    def _complete(self, key: tuple[Direction, str], entry: Any) -> None:
        super()._complete(key, entry)
        self._sent.clear()


class RemembersReceives(KVOutputAggregator):
    """Mutant: a second receive of an id is taken for a duplicate."""

    def _report(self, direction: Direction, id: str, ranks: int, now: float | None) -> None:
        if direction == "recv" and id in self._sent:
            return
        super()._report(direction, id, ranks, now)
        if direction == "recv" and id in self._done["recv"]:
            self._sent[id] = None


@pytest.mark.parametrize("mutant", [CountsReports, LosesWhileSilent, ForgetsSends, RemembersReceives])
def test_the_model_catches(mutant: type[KVOutputAggregator]) -> None:
    with pytest.raises(AssertionError):
        check_against_the_model(mutant, phases=(Phase.generate,))  # found, not explained
