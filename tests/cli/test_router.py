"""The router against a scripted engine: what is sent where, what is measured, and that everything wrong is named."""

import msgspec
import pytest

from kvconn.base import FinishReason
from kvconn.engine.client import Finished
from kvconn.engine.router import (
    POLL,
    Book,
    Failure,
    Leak,
    Mismatch,
    Offloaded,
    Router,
    Watchdog,
    decode_blocks,
    make_report,
    percentile,
    prefill_blocks,
    run_monolithic,
)
from kvconn.engine.trace import TraceRequest
from kvconn.errors import ContractError
from tests.cli.fakes import Clock, FakeEngine, pair, tokens_for, trace_requests


def run(prefill, decode, requests, concurrency=4, looks=None):
    return Router(
        prefill,
        decode,
        requests,
        concurrency=concurrency,
        stall_limit=10.0,
        drain_limit=10.0,
        on_progress=(looks if looks is not None else []).append,
        clock=prefill.clock,
    ).run()


def expected(requests):
    return {request.id: tokens_for(request.prompt, request.output_length) for request in requests}


class TestSound:
    def test_every_request_goes_through_both_engines_and_its_tokens_are_compared(self):
        requests = trace_requests(20)
        prefill, decode = pair(Clock())
        decode.connector = {"nixl_bytes_transferred": 4e9, "nixl_xfer_seconds": 2.0, "duplicates_absorbed": 1}
        prefill.connector = {"offload_blocks_stored": 40, "duplicates_absorbed": 2, "nixl_num_kv_expired_reqs": 3}
        report = make_report(run(prefill, decode, requests), expected(requests))
        assert (report.finished, report.total, report.compared) == (20, 20, 20)
        assert not report.failures and not report.mismatches and not report.leaks and report.stall is None
        assert (report.prefill_blocks_used, report.decode_blocks_used) == (0, 0)
        assert (report.bytes_moved, report.gb_per_s) == (4_000_000_000, 2.0)
        assert (report.blocks_stored, report.duplicates_absorbed, report.leases_expired) == (40, 3, 3)
        assert msgspec.json.decode(msgspec.json.encode(report))["finished"] == 20

    def test_what_offloading_did_is_told_of_each_engine(self):
        requests = trace_requests(2)
        prefill, decode = pair(Clock())
        prefill.connector = {
            "offload_blocks_asked": 10,
            "offload_hit_blocks_host": 4,
            "offload_hit_blocks_secondary": 3,
            "offload_tokens_loaded": 112,
            "kv_offload_store_bytes": 900.0,
            "kv_offload_load_bytes": 700.0,
            "kv_offload_stores_skipped": 1,
        }
        report = make_report(run(prefill, decode, requests), expected(requests))
        assert report.offload == {"P": Offloaded(10, 4, 3, 112, 900, 700, 1), "D": Offloaded(0, 0, 0, 0, 0, 0, 0)}

    def test_what_each_engine_is_sent(self):
        (request,) = requests = trace_requests(1)
        prefill, decode = pair(Clock())
        run(prefill, decode, requests)
        (to_p,), (to_d,) = prefill.submitted, decode.submitted
        assert (to_p.prompt_tokens, to_p.max_tokens, to_p.kv_transfer_params) == (
            request.prompt,
            1,
            {"do_remote_decode": True},
        )
        assert (to_d.prompt_tokens, to_d.max_tokens) == (request.prompt, request.output_length)
        assert to_d.kv_transfer_params == {"do_remote_prefill": True, "from": "line-1"}

    def test_no_more_than_concurrency_are_in_flight(self):
        requests = trace_requests(30)
        prefill, decode = pair(Clock())
        looks = []
        replayed = run(prefill, decode, requests, concurrency=3, looks=looks)
        assert len(replayed.tokens) == 30
        assert prefill.most_held <= 3
        assert max(look.prefill.waiting + look.decode.waiting for look in looks) <= 3
        assert looks[-1].finished == 30

    def test_an_engine_with_nothing_in_flight_is_not_waited_for(self):
        prefill, decode = pair(Clock())
        decode.silent = {"line-1"}
        waits = {"P": set(), "D": set()}
        for side, engine in (("P", prefill), ("D", decode)):

            def poll(timeout, side=side, real=engine.poll):
                if "line-1" in {request.id for request in decode.submitted} and not decode.aborted:
                    waits[side].add(timeout)
                return real(timeout)

            engine.poll = poll
        run(prefill, decode, trace_requests(1))
        assert waits == {"P": {0.0}, "D": {POLL}}

    def test_handoff_is_from_prefills_finish_to_decodes_first_token_by_the_engines_clocks(self):
        book = Book(trace_requests(1), 1)
        (to_p,) = book.admit()
        prefill, decode = pair(Clock())
        prefill.submit(to_p)
        for event in prefill.poll(0):
            to_d = book.from_prefill(event) or None
        decode.submit(to_d)
        for event in decode.poll(0):
            book.from_decode(event)
        assert book.handoffs == [0.5 - 1.25]  # the fake finishes one second after its first token
        assert repr(book) == "Book(queued=0 P=0 D=0 tokens=1 failed=0 of=1)"


class TestWrong:
    def test_a_mismatch_names_request_and_position(self):
        requests = trace_requests(5)
        prefill, decode = pair(Clock())
        decode.wrong = {"line-3"}
        report = make_report(run(prefill, decode, requests), expected(requests))
        right = expected(requests)["line-3"][3]
        assert report.mismatches == (Mismatch("line-3", "D", 3, right, right + 1),)

    def test_a_wrong_first_token_of_prefill_is_a_mismatch_too(self):
        requests = trace_requests(2)
        prefill, decode = pair(Clock())
        prefill.wrong = {"line-2"}
        (wrong,) = make_report(run(prefill, decode, requests), expected(requests)).mismatches
        assert (wrong.id, wrong.side, wrong.position) == ("line-2", "P", 0)

    def test_a_prefill_that_says_no_token_claims_nothing(self):
        requests = trace_requests(2)
        replayed = run(*pair(Clock()), requests)
        silent = msgspec.structs.replace(replayed, first_tokens=dict.fromkeys(replayed.first_tokens, ()))
        assert make_report(silent, expected(requests)).mismatches == ()

    def test_tokens_that_stop_early_differ_where_they_stop(self):
        requests = trace_requests(1)
        longer = {id: (*tokens, 9) for id, tokens in expected(requests).items()}
        (wrong,) = make_report(run(*pair(Clock()), requests), longer).mismatches
        assert (wrong.position, wrong.expected, wrong.got) == (4, 9, None)

    def test_failures_on_either_side_are_named_and_the_rest_goes_on(self):
        requests = trace_requests(6)
        prefill, decode = pair(Clock())
        prefill.errors = {"line-1": "params refused"}
        decode.errors = {"line-2": "load failed"}
        decode.reasons = {"line-3": FinishReason.ABORT}
        replayed = run(prefill, decode, requests)
        assert set(replayed.failures) == {
            Failure("line-1", "P", "params refused"),
            Failure("line-2", "D", "load failed"),
            Failure("line-3", "D", "reason abort"),
        }
        assert len(replayed.tokens) == 3
        assert replayed.leaks == (Leak("P", 2, 1, ()),)  # nobody released line-2, and that is said

    def test_prefill_without_params_is_a_failure(self):
        book = Book(trace_requests(1), 1)
        book.admit()
        done = Finished(id="line-1", tokens=(1,), reason=FinishReason.LENGTH, kv_transfer_params=None, t=0.0)
        assert book.from_prefill(done) is None
        assert book.failures == [Failure("line-1", "P", "no kv_transfer_params came back")]

    def test_a_second_word_on_a_request_changes_nothing(self):
        book = Book(trace_requests(1), 1)
        book.admit()
        done = Finished(id="line-1", tokens=(1,), reason=FinishReason.LENGTH, kv_transfer_params={}, t=0.0)
        assert book.from_prefill(done) is not None
        assert book.from_prefill(done) is None
        for _ in range(2):
            book.from_decode(done)
        assert (book.ended, book.on) == (1, {})


class TestStall:
    def test_releases_that_never_come_are_a_stall_with_the_engines_words_and_in_flight_is_aborted(self):
        requests = trace_requests(12)
        prefill, decode = pair(Clock(), prefill_blocks=10)
        prefill.releases = False
        prefill.stalls = ("send of line-1 owed by NixlConnector ranks 1..7 for 12.0 s",)
        replayed = run(prefill, decode, requests)
        stall = replayed.stall
        assert len(replayed.tokens) == 5
        assert stall.idle >= 10.0
        assert stall.in_flight == {f"line-{i}": "P" for i in (6, 7, 8, 9)}
        assert stall.lines == ("P: send of line-1 owed by NixlConnector ranks 1..7 for 12.0 s",)
        assert prefill.aborted == list(stall.in_flight)
        assert replayed.leaks == ()

    def test_a_request_decode_never_ends_is_a_stall_on_decode(self):
        prefill, decode = pair(Clock())
        decode.silent = {"line-2"}
        replayed = run(prefill, decode, trace_requests(3))
        assert replayed.stall.in_flight == {"line-2": "D"}
        assert decode.aborted == ["line-2"]

    def test_what_is_held_after_the_drain_is_a_leak(self):
        prefill, decode = pair(Clock())
        prefill.releases = False
        prefill.stalls = ("who",)
        began = prefill.clock.now
        replayed = run(prefill, decode, trace_requests(3))
        assert replayed.leaks == (Leak("P", 6, 3, ("who",)),)
        assert prefill.clock.now - began >= 10.0

    def test_watchdog(self):
        dog = Watchdog(5.0, 100.0)
        assert not dog.expired((1,), 103.0)
        assert not dog.expired((1,), 107.9)
        assert dog.expired((1,), 108.0)
        assert not dog.expired((2,), 109.0)


class TestMonolithic:
    def test_tokens_by_id(self):
        requests = trace_requests(5)
        assert run_monolithic(FakeEngine(clock := Clock()), requests, stall_limit=9, clock=clock) == expected(requests)

    def test_an_error_or_a_stall_of_the_yardstick_is_raised(self):
        for fault in ("errors", "silent"):
            engine = FakeEngine(clock := Clock())
            setattr(engine, fault, {"line-2": "broken"})
            with pytest.raises(ContractError, match="line-2"):
                run_monolithic(engine, trace_requests(3), stall_limit=9, clock=clock)


class TestSizes:
    def test_prefill_pool_is_the_largest_request_and_half_of_what_is_in_flight(self):
        requests = [TraceRequest(f"line-{i}", (0,) * n, 1) for i, n in enumerate([159, 15, 15, 15])]
        assert prefill_blocks(requests, concurrency=2, block_size=16) == 10 + 4  # 13 blocks / 4 * 2 / 2, rounded up
        assert prefill_blocks(requests, concurrency=2, block_size=16) < 10 + 10

    def test_decode_pool_holds_any_neighbours_in_flight(self):
        requests = [TraceRequest(f"line-{i}", (0,) * n, 16) for i, n in enumerate([16, 160, 160, 16])]
        assert decode_blocks(requests, concurrency=2, block_size=16) == 24
        assert decode_blocks(requests, concurrency=9, block_size=16) == 30

    def test_percentile(self):
        assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 4.0, 4.0]
        assert percentile([], 0.5) == 0.0
