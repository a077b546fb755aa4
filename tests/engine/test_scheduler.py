"""The scheduler against a scripted connector: order of calls, who owns which block when, and that everything ends.

longer than 600 lines because one scripted connector and one hand-driven scheduler serve all of it.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import NO_BLOCK, FinishReason, KVConnectorOutput, RequestView
from kvconn.engine.blocks import BlockPool
from kvconn.engine.config import ModelSpec
from kvconn.engine.request import EngineRequest, Finished, FirstToken, Status
from kvconn.engine.scheduler import Step
from kvconn.engine.tables import present
from kvconn.geometry import blocks_for
from tests.engine.driving import Answer, Bench, ScriptedConnector, unique_tokens


def loads(*ids: str, n: int = 8) -> dict[str, list[Answer]]:
    """A script: each of ``ids`` is loaded asynchronously, ``n`` tokens."""
    return {id: [(n, True)] for id in ids}


def parked(*, holds: bool = False, policy: str = "fail", n: int = 8, **sizes: int) -> tuple[Bench, ScriptedConnector]:
    """A request ``a`` of 9 tokens that waits for ``n`` of them from the connector."""
    connector = ScriptedConnector(loads("a", n=n), {"a": {"by": "us"}} if holds else None)
    bench = Bench(connector, policy, **sizes)
    bench.add("a", 9)
    assert bench.step() == {}
    assert bench.scheduler.parked.keys() == {"a"} and bench.used == 2 + (n == 9)
    return bench, connector


class TestCalls:
    def test_a_connector_is_called_in_vllms_order(self) -> None:
        connector = ScriptedConnector({"a": [(None, False), (8, True)]}, {"a": None})
        bench = Bench(connector)
        bench.add("a", 9)
        bench.step()
        bench.step()
        bench.step(received=["a"])
        bench.step()
        bench.step(sent=["a"])
        names = [call[0] for call in connector.calls]
        assert names == [
            *("new", "match", "meta", "output"),  # not yet
            *("match", "allocated", "meta", "output"),  # parked
            *("meta", "output"),  # received
            *("allocated", "meta", "finished", "output"),  # promoted, computed, finished
            *("meta", "output"),  # released
        ]

    def test_blocks_and_external_tokens_are_told_at_every_allocation(self) -> None:
        bench, connector = parked()
        bench.step(received=["a"])
        bench.step()
        first, second = (call[2:] for call in connector.named("allocated"))
        assert (first[0].ids, first[0].hashed, first[1]) == (((0, 1),), (0,), 8)
        assert (second[0].ids, second[0].hashed, second[1]) == (((0, 1, 2),), (2,), 0)

    def test_a_synchronous_load_is_told_once_with_the_first_chunks_blocks(self) -> None:
        connector = ScriptedConnector({"a": [(8, False)]})
        bench = Bench(connector)
        bench.add("a", 11)
        assert bench.step() == {"a": (8, 3)}
        told = [(call[2].ids, call[2].hashed, call[3]) for call in connector.named("allocated")]
        assert told == [(((0, 1, 2),), (0,), 8)]
        assert bench.expected == [] and bench.scheduler.external_tokens == 8

    def test_a_synchronous_load_of_everything_leaves_the_last_token_to_compute(self) -> None:
        bench = Bench(ScriptedConnector({"a": [(8, False)]}))
        bench.add("a", 8)
        assert bench.step() == {"a": (7, 1)}

    def test_an_admission_that_does_not_stand_is_told_to_nobody(self) -> None:
        connector = ScriptedConnector(lambda view, local: (4, False) if view.id == "b" else (0, False))
        bench = Bench(connector, num_blocks=4)
        bench.add("a", 11, 2)
        bench.add("b", 9)
        assert bench.step().keys() == {"a"}
        assert [call[1] for call in connector.named("allocated")] == ["a"]
        bench.step()
        assert bench.step() == {"b": (4, 5)}
        assert [call[1] for call in connector.named("allocated")] == ["a", "b"]
        assert bench.scheduler.external_tokens == 4

    def test_the_metadata_names_what_ended_and_what_was_preempted_since_the_last_step(self) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector, num_blocks=3)
        bench.add("a", 7, 3)
        bench.add("b", 4, 2)
        for _ in range(6):
            bench.step()
        views = [call[1] for call in connector.named("meta")]
        assert [view.seq for view in views] == [1, 2, 3, 4, 5, 6]
        assert [(v.preempted, v.finished) for v in views] == [
            ((), ()),
            (("b",), ()),
            ((), ()),
            ((), ("a",)),
            ((), ("b",)),
            ((), ()),
        ]

    def test_the_connector_may_veto_before_the_sets_are_read(self) -> None:
        bench, connector = parked()

        def veto(output: KVConnectorOutput) -> None:
            output.finished_recving = set()

        connector.veto = veto
        bench.step(received=["a"])
        assert "a" in bench.scheduler.parked

    def test_without_a_connector_blocks_are_free_at_once(self) -> None:
        bench = Bench()
        bench.add("a", 9, 2)
        bench.step()
        bench.step()
        assert bench.ending("a").reason is FinishReason.LENGTH
        assert bench.used == 0
        bench.step()
        assert not bench.scheduler.has_work()


class TestChunks:
    def test_a_long_prompt_is_computed_over_several_steps(self) -> None:
        bench = Bench(max_num_batched_tokens=8)
        bench.add("a", 21, 2)
        assert [bench.step() for _ in range(4)] == [{"a": (0, 8)}, {"a": (8, 8)}, {"a": (16, 5)}, {"a": (21, 1)}]
        first, last = bench.told("a")
        assert isinstance(first, FirstToken) and first.t == 3.0
        assert isinstance(last, Finished) and last.t == 4.0 and last.tokens == (1000, 1001)

    def test_only_the_last_chunk_samples_and_only_single_new_tokens_decode(self) -> None:
        bench = Bench(max_num_batched_tokens=8)
        bench.add("a", 9, 2)
        flags = []
        for _ in range(3):
            bench.step()
            assert bench.last is not None
            flags += [(s.sample, s.decode) for s in bench.last.requests]
        assert flags == [(False, False), (True, False), (True, True)]

    def test_blocks_are_taken_chunk_by_chunk_and_told_as_new(self) -> None:
        bench = Bench(max_num_batched_tokens=8)
        bench.add("a", 13)
        new = []
        for _ in range(2):
            bench.step()
            assert bench.last is not None
            new += [share.new_blocks for share in bench.last.view.requests]
        assert new == [((0, 1),), ((2, 3),)]

    def test_decodes_come_before_new_prefill_in_one_batch(self) -> None:
        bench = Bench(max_num_batched_tokens=8)
        bench.add("a", 4, 3)
        bench.step()
        bench.add("b", 12)
        assert list(bench.step().items()) == [("a", (4, 1)), ("b", (0, 7))]
        assert list(bench.step().items()) == [("a", (5, 1)), ("b", (7, 5))]

    def test_workers_get_all_tokens_at_admission_and_only_new_ones_later(self) -> None:
        bench = Bench(max_num_batched_tokens=8)
        bench.add("a", range(10), 2)
        shares = []
        for _ in range(3):
            bench.step()
            assert bench.last is not None
            shares += [(s.token_start, s.tokens) for s in bench.last.requests]
        assert shares == [(0, tuple(range(8))), (8, (8, 9)), (10, (1000,))]


class TestPrefixHits:
    @pytest.mark.parametrize(("length", "start"), [(8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
    def test_hits_never_include_the_last_token(self, length: int, start: int) -> None:
        bench = Bench()
        bench.add("a", range(length))
        bench.step()
        bench.add("b", range(length))
        assert bench.step() == {"b": (start, length - start)}
        assert bench.scheduler.prefix_hit_tokens == start

    def test_a_hit_shares_the_block_itself(self) -> None:
        bench = Bench()
        bench.add("a", range(9), 3)
        bench.step()
        bench.add("b", range(9), 3)
        bench.step()
        assert bench.blocks("a")[:2] == bench.blocks("b")[:2]
        assert bench.blocks("a")[2] != bench.blocks("b")[2]
        assert bench.used == 4

    def test_output_tokens_are_found_too(self) -> None:
        bench = Bench()
        bench.add("a", range(3), 6)
        for _ in range(6):
            bench.step()
        bench.add("b", [0, 1, 2, *bench.ending("a").tokens])
        assert bench.step() == {"b": (8, 1)}

    def test_hits_are_counted_once_per_admission_that_stands(self) -> None:
        """An admission undone for want of room is asked again at every step; it must not count again."""
        bench = Bench(num_blocks=5)
        bench.add("seed", range(9))
        bench.step()
        bench.add("long", 8, 4)
        bench.step()
        bench.add("b", range(16))
        for _ in range(3):
            assert bench.scheduler.prefix_hit_tokens == 0
            bench.step()
        assert bench.ending("long").reason is FinishReason.LENGTH
        assert bench.step() == {"b": (8, 8)}
        assert bench.scheduler.prefix_hit_tokens == 8

    def test_the_connector_is_told_how_many_tokens_are_here(self) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector)
        bench.add("a", range(9))
        bench.step()
        bench.add("b", range(9))
        bench.step()
        assert connector.named("match") == [("match", "a", 0), ("match", "b", 8)]
        assert connector.named("allocated")[-1][2].hashed == (2,)

    def test_external_tokens_follow_local_hits(self) -> None:
        connector = ScriptedConnector({"b": [(5, True)]})
        bench = Bench(connector)
        bench.add("a", range(5))
        bench.step()
        bench.add("b", range(9))
        bench.step()
        told = connector.named("allocated")[-1]
        assert told[2].ids == ((0, 2, 3),) and told[2].hashed == (1,) and told[3] == 5
        bench.step(received=["b"])
        assert bench.step() == {"b": (8, 1)}
        assert (bench.scheduler.prefix_hit_tokens, bench.scheduler.external_tokens) == (4, 5)


class TestAdmission:
    def test_first_come_is_first_served_and_nobody_overtakes_for_room(self) -> None:
        bench = Bench(num_blocks=4)
        bench.add("a", 12, 2)
        bench.add("big", 12)
        bench.add("small", 2)
        assert bench.step().keys() == {"a"}
        assert [request.id for request in bench.scheduler.waiting] == ["big", "small"]
        bench.step()
        assert list(bench.step()) == ["big", "small"]

    def test_at_most_max_num_seqs_run(self) -> None:
        bench = Bench(max_num_seqs=2)
        for id in "abc":
            bench.add(id, 3, 2)
        assert bench.step().keys() == {"a", "b"}
        assert bench.step().keys() == {"a", "b"}
        assert bench.step().keys() == {"c"}

    def test_not_yet_is_asked_again_and_keeps_its_place(self) -> None:
        connector = ScriptedConnector({"a": [(None, False)] * 2, "c": [(None, False)]})
        bench = Bench(connector)
        for id in "abcd":
            bench.add(id, 5, 3)
        assert list(bench.step()) == ["b", "d"]
        assert [request.id for request in bench.scheduler.waiting] == ["a", "c"]
        assert list(bench.step()) == ["b", "d", "c"]
        assert list(bench.step()) == ["b", "d", "c", "a"]
        assert Counter(call[1] for call in connector.named("match")) == {"a": 3, "b": 1, "c": 2, "d": 1}

    def test_not_yet_keeps_its_place_when_the_one_behind_finds_no_room(self) -> None:
        bench = Bench(ScriptedConnector({"a": [(None, False)]}), num_blocks=2)
        bench.add("run", 4, 2)
        bench.step()
        bench.add("a", 2)
        bench.add("b", 8)
        bench.step()
        assert [request.id for request in bench.scheduler.waiting] == ["a", "b"]

    @pytest.mark.parametrize(("prompt", "max_tokens"), [(16, 2), (1, 17), (17, 1), (0, 1), (4, 0)], ids=str)
    def test_what_can_never_fit_is_refused_with_an_error(self, prompt: int, max_tokens: int) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector, num_blocks=4)
        bench.add("a", prompt, max_tokens)
        assert bench.scheduler.has_work(), "the driver has not heard of it"
        assert bench.step() == {}
        ending = bench.ending("a")
        assert ending.reason is FinishReason.ERROR and ending.tokens == ()
        assert ending.error == (
            f"request refused: {prompt} prompt and {max_tokens} new tokens: expected 1.. and at most 16"
        )
        # whoever holds KV for it hears that nobody will read it
        assert connector.named("finished") == [("finished", "a", ((),), FinishReason.ERROR)]
        assert not bench.scheduler.has_work()

    def test_what_just_fits_runs_alone_to_its_end(self) -> None:
        bench = Bench(num_blocks=4)
        bench.add("a", 4, 13)
        for _ in range(13):
            bench.step()
        assert len(bench.ending("a").tokens) == 13

    def test_an_id_in_use_is_refused_and_the_first_one_runs_on(self) -> None:
        bench = Bench()
        bench.add("a", 4, 2)
        bench.add("a", 4, 2)
        bench.step()
        bench.step()
        refused, first, ended = bench.told("a")
        assert isinstance(refused, Finished) and refused.error == "request refused: id a is in use"
        assert isinstance(first, FirstToken)
        assert isinstance(ended, Finished) and ended.reason is FinishReason.LENGTH

    def test_an_id_may_come_back_after_its_release(self) -> None:
        bench = Bench(ScriptedConnector(holds={"a": None}))
        for _ in range(2):
            bench.add("a", 4)
            bench.step()
            bench.step(sent=["a"])
            assert bench.used == 0
        assert [event.reason for event in bench.events if isinstance(event, Finished)] == [FinishReason.LENGTH] * 2


class TestLoads:
    def test_a_load_parks_and_is_promoted_when_received(self) -> None:
        bench, _ = parked()
        assert bench.expected == [("recv", "a")]
        assert bench.step() == {} and bench.scheduler.has_work()
        bench.step(received=["a"])
        assert bench.scheduler.requests["a"].status is Status.WAITING
        assert bench.step() == {"a": (8, 1)}
        assert bench.ending("a").reason is FinishReason.LENGTH and bench.used == 0

    def test_the_last_token_is_computed_even_when_its_kv_came(self) -> None:
        bench, _ = parked(n=9)
        bench.step(received=["a"])
        assert bench.step() == {"a": (8, 1)}

    def test_what_was_received_goes_before_what_waits(self) -> None:
        bench, _ = parked(max_num_seqs=1)
        bench.add("b", 4)
        bench.add("c", 4)
        assert bench.step().keys() == {"b"}
        bench.step(received=["a"])
        assert bench.ending("c").reason is FinishReason.LENGTH
        bench.add("d", 4)
        assert bench.step().keys() == {"a"}

    def test_received_kv_is_a_prefix_hit_for_the_next_request(self) -> None:
        connector = ScriptedConnector(loads("a", n=8))
        bench = Bench(connector)
        bench.add("a", range(9))
        bench.step()
        bench.add("early", range(9))
        assert bench.step() == {"early": (0, 9)}, "nothing was there yet"
        bench.step(received=["a"])
        bench.step()
        bench.add("late", range(9))
        assert bench.step() == {"late": (8, 1)}

    def test_a_second_request_finds_wholly_here_what_the_first_one_loaded(self) -> None:
        """External load, then a full local hit: the connector is asked, answers 0, and is told of the allocation."""
        connector = ScriptedConnector(lambda view, local: (max(0, 8 - local), local < 8))
        bench = Bench(connector)
        bench.add("a", range(9))
        bench.step()
        bench.step(received=["a"])
        bench.step()
        bench.add("b", range(9))
        assert bench.step() == {"b": (8, 1)}
        assert connector.named("match") == [("match", "a", 0), ("match", "b", 8)]
        assert connector.named("allocated")[-1][3] == 0
        assert bench.expected == [("recv", "a")] and bench.scheduler.external_tokens == 8

    def test_a_load_without_room_waits_unasked_for_blocks_and_is_asked_again(self) -> None:
        connector = ScriptedConnector(lambda view, local: (8, True) if view.id == "a" else (0, False))
        bench = Bench(connector, num_blocks=3)
        bench.add("run", 8, 2)
        bench.step()
        bench.add("a", 9)
        bench.step()
        assert bench.scheduler.parked == {} and bench.expected == []
        bench.step()
        assert bench.scheduler.parked.keys() == {"a"}
        assert [call[1] for call in connector.named("match")] == ["run", "a", "a"]

    def test_recompute_computes_a_failed_load_here(self) -> None:
        bench, connector = parked(policy="recompute")
        bench.step(failed=["a"])
        assert bench.used == 0 and bench.scheduler.requests["a"].n_computed == 0
        assert bench.step() == {"a": (0, 9)}
        assert connector.named("match")[-1] == ("match", "a", 0), "the connector is asked again"
        assert bench.ending("a").reason is FinishReason.LENGTH and bench.used == 0

    def test_fail_ends_a_failed_load_with_an_error_and_frees_it(self) -> None:
        bench, connector = parked()
        bench.step(failed=["a"])
        ending = bench.ending("a")
        assert (ending.reason, ending.error, ending.tokens) == (FinishReason.ERROR, "KV load failed", ())
        assert connector.named("finished")[0][3] is FinishReason.ERROR
        assert bench.used == 0
        bench.step()
        assert not bench.scheduler.has_work()

    def test_what_a_failed_load_wrote_is_never_a_prefix_hit(self) -> None:
        connector = ScriptedConnector(loads("a", n=8))
        bench = Bench(connector)
        bench.add("a", range(9))
        bench.step()
        bench.step(failed=["a"])
        bench.add("b", range(9))
        assert bench.step() == {"b": (0, 9)}

    def test_a_failed_load_that_is_also_owed_a_send_stays_until_that_is_emitted(self) -> None:
        bench, _ = parked(holds=True)
        bench.step(failed=["a"])
        assert bench.ending("a").reason is FinishReason.ERROR and bench.used == 2
        bench.step(sent=["a"])
        assert bench.used == 0


class TestAbort:
    def test_waiting(self) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector, max_num_seqs=1)
        bench.add("run", 4, 3)
        bench.add("a", 4)
        bench.step()
        bench.scheduler.abort("a", bench.now)
        bench.step()
        assert bench.ending("a").reason is FinishReason.ABORT
        assert connector.named("finished") == [("finished", "a", ((),), FinishReason.ABORT)]
        assert bench.used == 2

    def test_waiting_alone_is_told_although_nothing_else_runs(self) -> None:
        bench = Bench(ScriptedConnector())
        bench.add("a", 4)
        bench.scheduler.abort("a", bench.now)
        assert bench.scheduler.has_work()
        bench.step()
        assert bench.ending("a").reason is FinishReason.ABORT and not bench.scheduler.has_work()

    def test_running_keeps_the_tokens_so_far_and_frees_at_once(self) -> None:
        bench = Bench()
        bench.add("a", 9, 5)
        bench.step()
        bench.step()
        bench.scheduler.abort("a", bench.now)
        assert bench.used == 0
        bench.step()
        assert bench.ending("a").tokens == (1000, 1001)

    def test_between_scheduling_and_its_outcome_the_outcome_is_dropped(self) -> None:
        bench = Bench()
        bench.add("a", 4, 5)
        step = bench.schedule()
        bench.scheduler.abort("a", bench.now)
        bench.finish(step)
        assert bench.ending("a").tokens == () and bench.used == 0

    def test_running_that_is_held_stays_until_its_emission(self) -> None:
        bench = Bench(ScriptedConnector(holds={"a": None}))
        bench.add("a", 9, 5)
        bench.step()
        bench.scheduler.abort("a", bench.now)
        bench.step()
        assert bench.ending("a").reason is FinishReason.ABORT
        assert bench.used == 3 and bench.expected == [("send", "a")]
        bench.step(sent=["a"])
        assert bench.used == 0

    def test_parked_is_told_at_once_and_its_blocks_come_back_at_the_emission(self) -> None:
        bench, _ = parked()
        bench.scheduler.abort("a", bench.now)
        bench.step()
        assert bench.ending("a").reason is FinishReason.ABORT
        for _ in range(3):
            bench.step()
            assert bench.used == 2 and bench.scheduler.has_work()
        bench.step(received=["a"])
        assert bench.used == 0 and len(bench.told("a")) == 1
        assert bench.scheduler.absorbed == 0

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_parked_whose_load_fails_later_frees_once_and_says_no_more(self, policy: str) -> None:
        bench, _ = parked(policy=policy)
        bench.scheduler.abort("a", bench.now)
        bench.step(failed=["a"])
        assert bench.used == 0 and len(bench.told("a")) == 1
        bench.step()
        assert not bench.scheduler.has_work()

    def test_received_but_not_yet_running(self) -> None:
        bench, _ = parked()
        bench.step(received=["a"])
        bench.scheduler.abort("a", bench.now)
        assert bench.used == 0
        bench.step()
        assert bench.ending("a").reason is FinishReason.ABORT

    def test_preempted(self) -> None:
        bench = Bench(num_blocks=3)
        bench.add("a", 7, 4)
        bench.add("b", 4, 3)
        bench.step()
        bench.step()
        assert bench.scheduler.requests["b"].status is Status.WAITING
        bench.scheduler.abort("b", bench.now)
        bench.step()
        assert bench.ending("b").tokens == (1001,)

    def test_delayed_and_unknown_change_nothing(self) -> None:
        connector = ScriptedConnector(holds={"a": None})
        bench = Bench(connector)
        bench.add("a", 4)
        bench.step()
        bench.scheduler.abort("a", bench.now)
        bench.scheduler.abort("nobody", bench.now)
        bench.step()
        assert bench.ending("a").reason is FinishReason.LENGTH
        assert bench.used == 1 and len(connector.named("finished")) == 1


class TestReleases:
    def test_a_delayed_send_frees_exactly_once(self) -> None:
        bench = Bench(ScriptedConnector(holds={"a": {"remote": 1}}))
        bench.add("a", 9)
        bench.step()
        assert bench.ending("a").kv_transfer_params == {"remote": 1}
        assert bench.expected == [("send", "a")]
        assert bench.used == 3
        bench.step(sent=["a"])
        assert bench.used == 0
        bench.add("b", 64)
        bench.step(sent=["a"])
        assert bench.scheduler.absorbed == 1

    def test_there_is_work_while_anything_is_delayed(self) -> None:
        bench = Bench(ScriptedConnector(holds={"a": None}))
        bench.add("a", 4)
        for _ in range(5):
            assert bench.scheduler.has_work()
            bench.step()
        bench.step(sent=["a"])
        assert not bench.scheduler.has_work()

    def test_a_connectors_own_pending_work_is_work(self) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector)
        assert not bench.scheduler.has_work()
        connector.pending = True
        assert bench.scheduler.has_work()

    def test_the_finished_id_is_announced_before_the_engine_rests(self) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector)
        bench.add("a", 4)
        bench.step()
        assert bench.scheduler.has_work()
        bench.step()
        assert connector.named("meta")[-1][1].finished == ("a",)
        assert not bench.scheduler.has_work()

    def test_unknown_and_repeated_emissions_are_absorbed_and_counted(self) -> None:
        bench = Bench(ScriptedConnector(holds={"a": None}))
        bench.add("a", 4)
        bench.add("run", 4, 9)
        bench.step(sent=["nobody"], received=["no one"])
        assert bench.scheduler.absorbed == 2
        bench.step(sent=["a", "run"])
        assert bench.scheduler.absorbed == 3, "a running request owes nothing"
        assert bench.scheduler.requests["run"].status is Status.RUNNING and bench.used == 2
        bench.step(sent=["a"], received=["a"])
        assert bench.scheduler.absorbed == 5 and bench.used == 2

    @pytest.mark.parametrize("how", ["sent", "received"])
    def test_owing_a_receive_and_a_send_is_freed_at_the_one_emission(self, how: str) -> None:
        """C13: the connector holds the earlier back and emits once, in either set."""
        bench, _ = parked(holds=True)
        bench.scheduler.abort("a", bench.now)
        bench.step()
        assert bench.expected == [("recv", "a"), ("send", "a")]
        assert bench.used == 2
        bench.step(**{how: ["a"]})
        assert bench.used == 0 and bench.scheduler.absorbed == 0
        assert "a" not in bench.scheduler.requests

    def test_held_blocks_are_given_to_nobody(self) -> None:
        bench = Bench(ScriptedConnector(holds={"a": None}), num_blocks=4)
        bench.add("a", 9)
        bench.step()
        bench.add("b", 5)
        assert bench.step() == {}
        bench.step(sent=["a"])
        assert bench.step() == {"b": (0, 5)}


class TestPreemption:
    def test_the_last_comer_gives_its_blocks_back_and_keeps_its_output(self) -> None:
        connector = ScriptedConnector()
        bench = Bench(connector, num_blocks=4)
        bench.add("a", 7, 6)
        bench.add("b", 7, 6)
        bench.step()
        bench.step()
        assert bench.used == 4 and len(bench.scheduler.running) == 2
        assert bench.step() == {"a": (8, 1)}
        b = bench.scheduler.requests["b"]
        assert (b.status, b.blocks, b.n_computed) == (Status.WAITING, [], 0)
        assert b.output == [1001, 1003]
        for _ in range(12):
            bench.step()
        assert len(bench.ending("a").tokens) == 6
        assert bench.ending("b").tokens[:2] == (1001, 1003) and len(bench.ending("b").tokens) == 6
        assert Counter(type(event) for event in bench.told("b")) == {FirstToken: 1, Finished: 1}

    def test_its_second_admission_asks_the_connector_again(self) -> None:
        asked: list[tuple[str, int, int]] = []

        def match(view: RequestView, local: int) -> Answer:
            asked.append((view.id, view.n_total, local))
            return 0, False

        bench = Bench(ScriptedConnector(match), num_blocks=4)
        bench.add("a", 7, 3)
        bench.add("b", 7, 3)
        for _ in range(5):
            bench.step()
        assert asked == [("a", 7, 0), ("b", 7, 0), ("b", 9, 4)]
        told = bench.connector.named("allocated")  # type: ignore[union-attr]
        assert [(call[1], call[2].hashed, call[3]) for call in told] == [("a", (0,), 0), ("b", (0,), 0), ("b", (1,), 0)]

    def test_several_preempted_ones_keep_their_order(self) -> None:
        bench = Bench(num_blocks=4)
        bench.add("a", 8, 9)
        bench.add("b", 3, 9)
        bench.add("c", 3, 9)
        bench.step()
        bench.step()
        assert [request.id for request in bench.scheduler.running] == ["a", "b"]
        for _ in range(2):
            bench.step()
        assert [request.id for request in bench.scheduler.waiting][-1] == "c"

    def test_a_preempted_one_is_not_stuck_behind_loaded_ones_that_hold_the_rest(self) -> None:
        """``a`` runs alone; ``b``, loaded, waits for a seat and holds the blocks that ``a`` lacks."""
        bench = Bench(ScriptedConnector(loads("b", n=8)), num_blocks=4, max_num_seqs=1)
        bench.add("b", 9)
        bench.add("a", 7, 8)
        bench.step()
        bench.step(received=["b"])
        assert bench.used == 4 and [request.id for request in bench.scheduler.waiting] == ["b"]
        assert bench.step() == {"a": (8, 1)}
        assert bench.last is not None and bench.last.view.preempted == ("b",)
        for _ in range(20):
            bench.step()
        assert bench.ending("a").reason is bench.ending("b").reason is FinishReason.LENGTH
        assert len(bench.ending("a").tokens) == 8 and bench.used == 0

    def test_a_preempted_one_behind_which_a_loaded_one_waits_takes_its_blocks_when_it_comes_back(self) -> None:
        """As before, but another load is under way when ``a`` cannot grow: it has to preempt itself."""
        bench = Bench(ScriptedConnector(loads("b", "c", n=4)), num_blocks=4, max_num_seqs=1)
        bench.add("b", 5)
        bench.add("c", 5)
        bench.add("a", 7, 8)
        bench.step()
        bench.step(received=["b"])
        bench.step()
        assert bench.last is not None and bench.last.view.preempted == ("a",)
        assert [request.id for request in bench.scheduler.waiting] == ["a", "b"]
        bench.step(received=["c"])
        for _ in range(30):
            bench.step()
        assert [bench.ending(id).reason for id in "abc"] == [FinishReason.LENGTH] * 3
        assert len(bench.ending("a").tokens) == 8 and bench.used == 0

    def test_a_loaded_one_that_finds_no_budget_does_not_keep_a_running_one_from_its_last_block(self) -> None:
        """``a`` takes every step's whole budget, so that ``b`` never runs, and needs the block that ``b`` holds."""
        bench = Bench(ScriptedConnector(loads("b", n=3)), num_blocks=4, block_size=3, max_num_batched_tokens=2)
        bench.add("b", 4)
        bench.add("a", 12)
        bench.step()
        bench.step(received=["b"])
        for _ in range(20):
            bench.step()
        assert bench.ending("a").reason is bench.ending("b").reason is FinishReason.LENGTH
        assert bench.used == 0

    def test_loaded_ones_that_hold_everything_do_not_wait_for_each_other(self) -> None:
        bench = Bench(ScriptedConnector(loads("a", "b", n=8)), num_blocks=4)
        bench.add("a", 9)
        bench.add("b", 9)
        bench.step()
        assert bench.used == 4
        bench.step(received=["a", "b"])
        for _ in range(4):
            bench.step()
        assert bench.ending("a").reason is bench.ending("b").reason is FinishReason.LENGTH
        assert bench.used == 0


def test_repr_is_one_readable_line() -> None:
    bench, _ = parked()
    bench.add("b", 4, 2)
    bench.step()
    assert repr(bench.scheduler) == ("Scheduler(running=1 waiting=0 parked=1 delayed=0 BlockPool(used=3/16 cached=1))")
    assert repr(bench.scheduler.requests["b"]) == "Request(b running computed=4/5)"


# --- whatever comes -----------------------------------------------------------------------------------------------


class Whim(ScriptedConnector):
    """Answers by chance; owns what it was given until it is emitted, exactly once (C13)."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(self._answer)
        self._data = data
        self.receives: set[str] = set()
        self.sends: set[str] = set()
        self.consumed: set[str] = set()
        self._given: dict[str, Answer] = {}

    def _answer(self, view: RequestView, local: int) -> Answer:
        if view.id in self.consumed:
            return 0, False
        lack = view.n_prompt - local
        kind = self._data.draw(st.sampled_from(["nothing", "not yet", "now", "later"]))
        if kind == "not yet":
            return None, False
        n = 0 if kind == "nothing" or lack <= 0 else self._data.draw(st.integers(1, lack))
        self._given[view.id] = n, kind == "later"
        return self._given[view.id]

    def update_state_after_alloc(self, request: RequestView, blocks: object, num_external_tokens: int) -> None:
        first = request.id not in self.consumed
        n, later = self._given.get(request.id, (0, False))
        assert num_external_tokens == (n if first else 0)
        self.consumed.add(request.id)
        if num_external_tokens and later:
            self.receives.add(request.id)

    def request_finished(self, request: RequestView, blocks: object, reason: FinishReason) -> tuple[bool, None]:
        if self._data.draw(st.booleans()):
            self.sends.add(request.id)
            return True, None
        return False, None

    def emit(self, everything: bool) -> dict[str, set[str]]:
        """What is emitted in this step. What owes both is emitted at the later one only."""
        chosen: dict[str, set[str]] = {"sent": set(), "received": set(), "failed": set()}
        for owed, name in ((self.receives, "received"), (self.sends, "sent")):
            for id in sorted(owed):
                if everything or self._data.draw(st.booleans()):
                    owed.discard(id)
                    other = self.sends if name == "received" else self.receives
                    if id not in other:
                        failed = name == "received" and self._data.draw(st.booleans())
                        chosen["failed" if failed else name].add(id)
        return chosen


def assert_blocks_add_up(bench: Bench) -> None:
    """Every reference is some table's, and no table holds a block twice."""
    tables, requests = bench.scheduler.tables, bench.scheduler.requests.values()
    for number, group in enumerate(tables.groups):
        held = [present(request.tables[number]) for request in requests]
        holders = Counter(block for blocks in held for block in blocks)
        assert group.pool.num_used == len(holders)
        assert all(len(set(blocks)) == len(blocks) for blocks in held)
        for block, count in holders.items():
            assert group.pool._references[block] == count


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_comes_everything_ends_and_the_pool_is_empty(data: st.DataObject) -> None:
    connector = Whim(data)
    num_blocks, size = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 4))
    bench = Bench(
        connector,
        data.draw(st.sampled_from(["fail", "recompute"])),
        num_blocks=num_blocks,
        block_size=size,
        max_num_batched_tokens=data.draw(st.integers(1, 12)),
        max_num_seqs=data.draw(st.integers(1, 4)),
        model=ModelSpec(window=data.draw(st.integers(0, 6))),
    )
    added: list[str] = []
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 2))):
            id = f"r{len(added)}"
            prompt = unique_tokens(data.draw(st.sampled_from("xy")), data.draw(st.integers(1, num_blocks * size)))
            room = num_blocks * size - len(prompt) + 1
            bench.scheduler.add(EngineRequest(id, prompt, data.draw(st.integers(1, room))), bench.now)
            added.append(id)
        if added and data.draw(st.integers(0, 4)) == 0:
            bench.scheduler.abort(data.draw(st.sampled_from(added)), bench.now)
        step_and_check(bench, connector.emit(everything=False))
    for _ in range(2000):
        if not bench.scheduler.has_work():
            break
        step_and_check(bench, connector.emit(everything=True))
    assert not bench.scheduler.has_work(), repr(bench.scheduler)
    assert bench.used == 0
    assert Counter(event.id for event in bench.events if isinstance(event, Finished)) == Counter(added)
    assert bench.scheduler.absorbed == 0
    assert connector.receives == connector.sends == set()


def step_and_check(bench: Bench, emitted: dict[str, set[str]]) -> None:
    scheduler = bench.scheduler
    before = {id: request.block_ids() for id, request in scheduler.delayed.items()}
    step = bench.schedule()
    for number, group in enumerate(scheduler.tables.groups):
        assert_written_blocks_are_ours(bench, step, number, group.pool)
        for s in step.requests:
            seen = s.tables[number][group.first(s.start) : blocks_for(s.start + s.n, bench.config.block_size)]
            assert NO_BLOCK not in seen, "a token sees a block that is not here"
    assert sum(s.n for s in step.requests) <= bench.config.max_num_batched_tokens
    assert len(scheduler.running) <= bench.config.max_num_seqs
    assert all(scheduler.requests[id].block_ids() == blocks for id, blocks in before.items())
    assert_blocks_add_up(bench)
    bench.finish(step, **emitted)
    assert_blocks_add_up(bench)


def assert_written_blocks_are_ours(bench: Bench, step: Step, number: int, pool: BlockPool) -> None:
    size = bench.config.block_size
    writes = Counter(
        block for s in step.requests for block in s.tables[number][s.start // size : blocks_for(s.start + s.n, size)]
    )
    assert all(count == 1 for count in writes.values()), "two requests write one block"
    assert all(pool._references[block] == 1 for block in writes), "a shared block is written"
    held = [*bench.scheduler.delayed.values(), *bench.scheduler.parked.values()]
    owned = {block for request in held for block in present(request.tables[number])}
    assert not owned & set(writes), "a block that a connector owns is written"
