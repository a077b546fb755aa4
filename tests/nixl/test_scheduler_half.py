"""The scheduler half alone: what it matches, opens, announces, lets through, and that every table empties."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvconn.base import Fact, FinishReason, GroupView, KVBlocks, KVCacheView, RequestView, StepRequest, StepView
from kvconn.config import ConnectorConfig, ModelView, NixlSettings, ParallelConfig, parse_kv_transfer_config
from kvconn.errors import ConfigError
from kvconn.ledger import Emit
from kvconn.metrics import Stats
from kvconn.nixl.metadata import NixlHandshake, NixlStep, SendSpec
from kvconn.nixl.scheduler import NixlScheduler
from kvconn.nixl.wire import HandshakePayload, WireCodec
from kvconn.params import PeerKey, RemoteRef, parse_remote, to_params
from tests.support import free_port

BLOCK = 16
CACHE = KVCacheView(64, BLOCK, (GroupView("full", ("l0",)),))
PAYLOAD = msgspec.msgpack.encode(HandshakePayload("hash", b"metadata"))


class Half(NixlScheduler):
    """The half with times that need not be said; a request that ends has been scheduled once, as in an engine."""

    def arrived(self, view: RequestView, now: float = 0.0) -> None:
        super().arrived(view, now)

    def match(self, view: RequestView, local_tokens: int, now: float = 0.0) -> tuple[int | None, bool]:
        return super().match(view, local_tokens, now)

    def step(self, now: float, *ids: str) -> NixlStep:  # type: ignore[override]
        return super().step(StepView(0, tuple(StepRequest(id, 0, 1) for id in ids)), now) or NixlStep(now)

    def finished(self, view: RequestView, blocks: Any, reason: FinishReason, now: float) -> Any:
        if self._serves:
            self.arrived(view, now)
        self._fence(StepView(0, (StepRequest(view.id, 0, 1),)))
        return super().finished(view, blocks, reason, now)


MAKE = Callable[..., Half]


@pytest.fixture
def make() -> Iterator[MAKE]:
    """Scheduler halves; producers serve an empty payload, as after start-up."""
    made: list[Half] = []

    def scheduler(
        role: str = "kv_consumer", *, policy: str = "fail", pcp: int = 1, serve: bool = True, cache: KVCacheView = CACHE
    ) -> Half:
        raw = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": policy}
        config = ConnectorConfig(
            parse_kv_transfer_config(raw), "E", ParallelConfig(pcp=pcp), ModelView("m", "u8", 1, 1, 8, BLOCK),
            port=free_port(),
        )  # fmt: skip
        half = Half(config, NixlSettings(), cache, WireCodec())
        made.append(half)
        if serve and role != "kv_consumer":
            half.serve({(0, 0): NixlHandshake(PAYLOAD)})
        return half

    yield scheduler
    for half in made:
        half.shutdown()


def ref(transfer: str = "t1", tokens: int = 48, engine: str = "P", port: int = 5600) -> RemoteRef:
    blocks = tuple(range(-(-tokens // BLOCK)))
    return RemoteRef(engine, transfer, "127.0.0.1", port, (blocks,), tokens)


def request(id: str = "r", n_prompt: int = 48, params: Any = None, n_total: int | None = None) -> RequestView:
    return RequestView(id, n_prompt, n_prompt if n_total is None else n_total, params)


def remote(id: str = "r", n_prompt: int = 48, **kwargs: Any) -> RequestView:
    """A request that was handed a good reference."""
    return request(id, n_prompt, to_params(ref(**kwargs)))


def blocks(ids: tuple[int, ...], hits: int = 0) -> KVBlocks:
    return KVBlocks((ids,), (hits,))


def word(id: str, n: int, rank: int, direction: Any = "send", state: Any = "done") -> Fact:
    return Fact(id, direction, n, rank, state)


def tables(half: Half) -> dict[str, int]:
    return {
        "incoming": len(half._incoming),
        "loading": len(half.loading),
        "lives": len(half.ledger),
        "queued": len(half._sends) + len(half._loads) + len(half._releases),
    }


EMPTY = {"incoming": 0, "loading": 0, "lives": 0, "queued": 0}


class TestState:
    """A state stands after exactly the tokens that were held (kvconn.nixl.blocks)."""

    GROUPS = msgspec.structs.replace(CACHE, groups=(*CACHE.groups, GroupView("state", ("l1",))))

    def test_it_is_read_where_a_token_is_left_to_compute(self, make: MAKE) -> None:
        half = make(cache=self.GROUPS)
        view = remote(n_prompt=49, tokens=48)
        assert half.match(view, 0) == (48, True)
        half.allocated(view, KVBlocks(((1, 2, 3), (7,)), (0, 0)), 48, 0.0)
        assert half.step(0.0).loads[0].local == ((1, 2, 3), (7,))

    @pytest.mark.parametrize(("policy", "answer"), [("fail", (48, True)), ("recompute", (0, False))])
    def test_elsewhere_it_is_refused_by_policy_and_its_producer_is_told(
        self, make: MAKE, policy: str, answer: tuple[int, bool]
    ) -> None:
        half = make(cache=self.GROUPS, policy=policy)
        assert half.match(remote(tokens=48), 0) == answer
        assert [ref.transfer_id for ref in half.step(0.0).releases] == ["t1"]
        assert half.meter.take() is not None


class TestMatching:
    @pytest.mark.parametrize(
        ("n_prompt", "held", "local", "answer"),
        [
            (48, 48, 0, (48, True)),
            (48, 48, 16, (32, True)),
            (48, 48, 48, (0, False)),
            (48, 40, 0, (40, True)),
            (48, 40, 32, (8, True)),
            (48, 16, 32, (0, False)),  # we have more than the producer
            (40, 48, 0, (40, True)),  # the producer holds more than we asked for
        ],
    )
    def test_what_the_producer_holds_beyond_the_local_hit(
        self, make: MAKE, n_prompt: int, held: int, local: int, answer: tuple[int, bool]
    ) -> None:
        assert make().match(remote(n_prompt=n_prompt, tokens=held), local) == answer

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}, "nonsense"])
    def test_a_request_without_a_reference_has_nothing(self, make: MAKE, params: Any) -> None:
        half = make()
        assert half.match(request(params=params), 0) == (0, False)
        assert tables(half) == EMPTY

    def test_asking_any_number_of_times_changes_nothing(self, make: MAKE) -> None:
        half = make()
        view = remote()
        half.arrived(view)
        before = tables(half)
        for local in (0, 16, 0, 32, 0):
            assert half.match(view, local) == (48 - local, True)
        assert tables(half) == before
        step = half.step(0.0)
        assert (step.sends, step.loads, step.releases) == ((), (), ())

    def test_a_producer_never_reads(self, make: MAKE) -> None:
        half = make("kv_producer")
        half.arrived(remote())
        assert half.match(remote(), 0) == (0, False)
        half.allocated(remote(), blocks((1, 2, 3)), 0, 0.0)
        half.finished(remote(), ((1, 2, 3),), FinishReason.ABORT, 0.0)
        assert tables(half) == EMPTY


class TestAllocation:
    def test_external_tokens_open_a_receive_life_and_name_the_blocks_to_fill(self, make: MAKE) -> None:
        half = make()
        view = remote()
        assert half.match(view, 16) == (32, True)
        half.allocated(view, blocks((9, 8, 7), hits=1), 32, now=1.0)
        (load,) = half.step(1.0).loads
        assert (load.id, load.ref, load.local, load.hits, load.refused) == ("r", ref(), ((8, 7),), (1,), None)
        pending = half.ledger.get("r", "recv")
        assert pending is not None
        assert (pending.n, pending.owed, pending.since) == (load.n, (((), (0,)),), 1.0)

    def test_blocks_beyond_the_external_tokens_are_not_asked_for(self, make: MAKE) -> None:
        half = make()
        view = remote(n_prompt=60, tokens=40)
        half.allocated(half_asked(half, view), blocks((9, 8, 7, 6)), 40, 0.0)
        (load,) = half.step(0.0).loads
        assert load.local == ((9, 8, 7),)

    def test_the_reference_is_consumed_by_the_first_allocation(self, make: MAKE) -> None:
        half = make()
        view = half_asked(half, remote())
        half.allocated(view, blocks((1, 2, 3)), 48, 0.0)
        assert len(half.step(0.0).loads) == 1
        assert half.match(view, 0) == (0, False)
        half.allocated(view, blocks((4, 5, 6)), 0, 1.0)
        step = half.step(1.0)
        assert (step.loads, step.releases) == ((), ())

    def test_after_preemption_the_second_life_asks_for_nothing(self, make: MAKE) -> None:
        half = make()
        view = half_asked(half, remote())
        half.allocated(view, blocks((1, 2, 3)), 48, 0.0)
        (load,) = half.step(0.0).loads
        assert half.reports([], ["r"], [], [word("r", load.n, 0, "recv")]).received == {"r"}
        assert half.match(view, 0) == (0, False)  # preempted, scheduled again
        half.allocated(view, blocks((4, 5, 6)), 0, 1.0)
        half.finished(view, ((4, 5, 6),), FinishReason.STOP, 2.0)
        assert half.step(2.0) == NixlStep(2.0)
        assert tables(half) == EMPTY

    def test_a_full_local_hit_tells_the_producer_to_let_go_once_and_opens_no_life(self, make: MAKE) -> None:
        half = make()
        view = half_asked(half, remote(), local=48)
        half.allocated(view, blocks((1, 2, 3), hits=3), 0, 0.0)
        step = half.step(0.0)
        assert (step.releases, step.loads) == ((ref(),), ())
        half.finished(view, ((1, 2, 3),), FinishReason.STOP, 1.0)
        assert half.step(1.0).releases == ()
        assert tables(half) == EMPTY

    def test_a_load_still_goes_out_when_the_request_ends_in_the_same_step(self, make: MAKE) -> None:
        half = make()
        view = half_asked(half, remote())
        half.allocated(view, blocks((1, 2, 3)), 48, 0.0)
        half.finished(view, ((1, 2, 3),), FinishReason.ABORT, 0.0)
        step = half.step(0.0)
        assert (len(step.loads), step.releases) == (1, ())  # the blocks are the life's, its end notifies the producer
        assert half.reports([], ["r"], [], [word("r", step.loads[0].n, 0, "recv")]).received == {"r"}
        assert tables(half) == EMPTY


def half_asked(half: Half, view: RequestView, local: int = 0) -> RequestView:
    """As an engine does before it allocates."""
    half.arrived(view)
    half.match(view, local)
    return view


class TestBeforeAdmission:
    @pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
    def test_a_request_that_ends_before_admission_releases_what_it_never_read(
        self, make: MAKE, reason: FinishReason
    ) -> None:
        half = make()
        view = half_asked(half, remote())
        assert half.finished(view, ((),), reason, 0.0) == (False, None)
        assert half.step(0.0).releases == (ref(),)
        assert tables(half) == EMPTY

    def test_a_rejected_request_that_was_only_announced_releases_too(self, make: MAKE) -> None:
        half = make()
        half.arrived(remote())
        half.finished(remote(), ((),), FinishReason.ERROR, 0.0)
        assert half.step(0.0).releases == (ref(),)

    def test_a_request_nobody_announced_leaves_nothing(self, make: MAKE) -> None:
        half = make()
        assert half.finished(remote(), ((),), FinishReason.ABORT, 0.0) == (False, None)
        assert half.step(0.0).releases == ()


BAD = {**to_params(ref()), "remote_port": "http"}


class TestWrongReferences:
    def test_policy_fail_makes_a_life_that_fails_with_the_reason(
        self, make: MAKE, caplog: pytest.LogCaptureFixture
    ) -> None:
        half = make(policy="fail")
        view = request(params=BAD)
        with caplog.at_level(logging.WARNING, "kvconn.nixl"):
            half.arrived(view)
            for _ in range(3):
                assert half.match(view, 16) == (32, True)
        assert [r.getMessage() for r in caplog.records] == [
            "request r: refused: kv_transfer_params.remote_port: expected an integer 1..65535, got 'http'"
        ]
        assert half.meter.take() == Stats({"params_refused": 1})
        half.allocated(view, blocks((1, 2, 3), hits=1), 32, 0.0)
        (load,) = half.step(0.0).loads
        assert (load.ref, load.local) == (None, ())
        assert load.refused is not None
        assert "remote_port" in load.refused
        facts = [word("r", load.n, 0, "recv", "failed"), word("r", load.n, 0, "recv", "quiet")]
        assert half.reports([], ["r"], ["r"], facts) == Emit(received=frozenset("r"), failed=frozenset("r"))
        half.finished(view, ((1, 2, 3),), FinishReason.ERROR, 1.0)
        assert tables(half) == EMPTY

    def test_policy_recompute_asks_for_nothing_and_opens_no_life(self, make: MAKE) -> None:
        half = make(policy="recompute")
        view = request(params=BAD)
        half.arrived(view)
        assert half.match(view, 0) == (0, False)
        half.allocated(view, blocks((1, 2, 3)), 0, 0.0)
        assert half.step(0.0) == NixlStep(0.0)
        half.finished(view, ((1, 2, 3),), FinishReason.STOP, 1.0)
        assert tables(half) == EMPTY

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_a_wrong_reference_that_ends_before_admission_releases_nobody(self, make: MAKE, policy: str) -> None:
        half = make(policy=policy)
        view = request(params=BAD)
        half.arrived(view)
        half.finished(view, ((),), FinishReason.ABORT, 0.0)
        assert half.step(0.0) == NixlStep(0.0)
        assert tables(half) == EMPTY

    @pytest.mark.parametrize(
        "key", ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "kvconn"]
    )
    def test_whatever_is_wrong_nothing_raises(self, make: MAKE, key: str) -> None:
        half = make()
        view = request(params={**to_params(ref()), key: ["\ud800", {}]})
        half.arrived(view)
        assert half.match(view, 0) == (48, True)


class TestSends:
    def hold(
        self, half: Half, id: str = "r", ids: tuple[int, ...] = (4, 5, 6), now: float = 10.0
    ) -> tuple[dict[str, Any], SendSpec]:
        view = request(id, 48, {"do_remote_decode": True}, n_total=49)
        delayed, params = half.finished(view, (ids,), FinishReason.LENGTH, now)
        assert delayed
        assert params is not None
        (send,) = half.step(now).sends
        return params, send

    def test_a_held_request_gives_the_client_a_reference_a_consumer_can_parse(self, make: MAKE) -> None:
        half = make("kv_producer")
        params, send = self.hold(half)
        got = parse_remote(params, BLOCK)
        assert got is not None
        assert (got.engine_id, got.block_ids, got.num_tokens) == ("E", ((4, 5, 6),), 48)
        assert (got.transfer_id, send.deadline) == (send.transfer_id, 40.0)
        assert got.kvconn is not None
        assert got.kvconn.deadline == 40.0

    def test_the_request_id_never_leaves_and_each_life_has_its_own_transfer_id(self, make: MAKE) -> None:
        half = make("kv_producer")
        seen = set()
        for _ in range(5):
            params, send = self.hold(half, "secret-id")
            assert "secret-id" not in repr(params)
            seen.add(params["remote_request_id"])
            half.reports(["secret-id"], [], [], [word("secret-id", send.n, 0)])
        assert len(seen) == 5

    def test_the_announcement_goes_out_with_the_next_step_and_once(self, make: MAKE) -> None:
        half = make("kv_producer")
        _, send = self.hold(half)
        assert (send.id, send.readers) == ("r", 1)
        assert half.step(11.0).sends == ()

    @pytest.mark.parametrize("pcp", [1, 2, 8])
    def test_a_send_is_let_through_once_when_every_rank_has_reported_that_life(self, make: MAKE, pcp: int) -> None:
        half = make("kv_producer", pcp=pcp)
        _, send = self.hold(half)
        for rank in range(1, pcp):
            assert half.reports([], [], [], [word("r", send.n, rank)]) == Emit()
        assert half.reports(["r"], [], [], [word("r", send.n, 0)]).sent == {"r"}
        assert half.reports(["r"], [], [], [word("r", send.n, 0)]).sent == frozenset()
        assert tables(half) == EMPTY

    def test_a_counting_engine_cannot_free_before_every_rank_has_reported(self, make: MAKE) -> None:
        half = make("kv_producer", pcp=2)
        _, send = self.hold(half)
        twice = [word("r", send.n, 1), word("r", send.n, 1)]
        assert half.reports(["r"], [], [], twice).sent == frozenset()  # its sets named it, a rank is missing
        assert half.explain(now=12.5) == [f"send of r (life {send.n}) owed by NixlConnector rank 0 for 2.5 s"]
        assert half.reports([], [], [], [word("r", send.n, 0)]).sent == {"r"}
        assert half.explain(now=13.0) == []

    def test_an_id_that_comes_back_is_a_new_life(self, make: MAKE) -> None:
        half = make("kv_producer")
        _, first = self.hold(half)
        half.reports(["r"], [], [], [word("r", first.n, 0)])
        _, second = self.hold(half)
        assert second.n > first.n
        assert half.reports(["r"], [], [], [word("r", first.n, 0)]).sent == frozenset()
        assert half.reports([], [], [], [word("r", second.n, 0)]).sent == {"r"}

    def test_the_last_sampled_token_has_no_kv_and_its_block_is_not_held(self, make: MAKE) -> None:
        half = make("kv_producer")
        params, _ = self.hold(half, ids=(4, 5, 6, 7))
        assert params["remote_block_ids"] == [[4, 5, 6]]

    @pytest.mark.parametrize(
        ("params", "reason", "n_total", "ids"),
        [
            ({"do_remote_decode": True}, FinishReason.ABORT, 49, (1, 2, 3)),
            ({"do_remote_decode": True}, FinishReason.ERROR, 49, (1, 2, 3)),
            ({"do_remote_decode": True}, FinishReason.STOP, 1, (1,)),
            ({"do_remote_decode": True}, FinishReason.STOP, 49, ()),
            ({"do_remote_decode": False}, FinishReason.STOP, 49, (1, 2, 3)),
            ({"do_remote_decode": "yes"}, FinishReason.STOP, 49, (1, 2, 3)),
            (None, FinishReason.STOP, 49, (1, 2, 3)),
            ([], FinishReason.STOP, 49, (1, 2, 3)),
        ],
    )
    def test_what_no_reader_can_use_is_freed_at_once(
        self, make: MAKE, params: Any, reason: FinishReason, n_total: int, ids: tuple[int, ...]
    ) -> None:
        half = make("kv_producer")
        assert half.finished(request("r", 48, params, n_total), (ids,), reason, 0.0) == (False, None)
        assert half.step(0.0).sends == ()
        assert tables(half) == EMPTY

    def test_a_consumer_holds_nothing(self, make: MAKE) -> None:
        view = request("r", 48, {"do_remote_decode": True}, 49)
        assert make("kv_consumer").finished(view, ((1, 2, 3),), FinishReason.STOP, 0.0) == (False, None)

    def test_without_a_side_channel_nobody_could_read_and_nothing_is_held(self, make: MAKE) -> None:
        view = request("r", 48, {"do_remote_decode": True}, 49)
        half = make("kv_producer", serve=False)
        half.serve({})
        assert half.finished(view, ((1, 2, 3),), FinishReason.STOP, 0.0) == (False, None)

    def test_an_engine_that_serves_and_reads_does_both_for_one_request(self, make: MAKE) -> None:
        half = make("kv_both")
        view = request("r", 48, {**to_params(ref()), "do_remote_decode": True}, 49)
        half_asked(half, view)
        half.allocated(view, blocks((1, 2, 3)), 48, 0.0)
        (load,) = half.step(0.0).loads
        assert half.reports([], ["r"], [], [word("r", load.n, 0, "recv")]).received == {"r"}
        delayed, params = half.finished(view, ((1, 2, 3),), FinishReason.STOP, 1.0)
        assert (delayed, params is not None) == (True, True)
        (send,) = half.step(1.0).sends
        assert half.reports(["r"], [], [], [word("r", send.n, 0)]).sent == {"r"}
        assert tables(half) == EMPTY

    def test_a_taken_port_is_a_config_error_at_start_up(self, make: MAKE) -> None:
        first, second = make("kv_producer"), make("kv_producer", serve=False)
        second._config = first._config
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{first._config.port}"):
            second.serve({(0, 0): NixlHandshake(PAYLOAD)})

    def test_serving_again_replaces_the_payloads_on_the_same_port(self, make: MAKE) -> None:
        half = make("kv_producer")
        server = half._server
        half.serve({(0, 0): NixlHandshake(PAYLOAD)})
        assert half._server is server


class TestHeartbeats:
    def test_waiting_and_loading_requests_are_grouped_by_peer(self, make: MAKE) -> None:
        half = make()
        for id, peer in (("a", "P"), ("b", "P"), ("c", "Q")):
            half.arrived(remote(id, transfer=f"t-{id}", engine=peer))
        half.allocated(half_asked(half, remote("d", transfer="t-d")), blocks((1, 2, 3)), 48, 0.0)
        beats = dict(half.step(100.0).heartbeats)
        p = PeerKey("P", "127.0.0.1", 5600)
        assert beats == {p: ("t-a", "t-b", "t-d"), p._replace(engine="Q"): ("t-c",)}

    def test_they_start_while_a_request_only_waits_and_come_six_times_a_lease(self, make: MAKE) -> None:
        half = make()
        half.arrived(remote())
        beats = [bool(half.step(float(t)).heartbeats) for t in range(100, 116)]
        assert [t for t, beat in enumerate(beats) if beat] == [0, 5, 10, 15]

    def test_they_end_when_the_load_is_over(self, make: MAKE) -> None:
        half = make()
        half.allocated(half_asked(half, remote()), blocks((1, 2, 3)), 48, 0.0)
        step = half.step(0.0)
        assert step.heartbeats != ()
        half.finished(remote(), ((1, 2, 3),), FinishReason.ABORT, 1.0)
        assert half.step(6.0).heartbeats != ()  # the client is gone, the read is not
        half.reports([], ["r"], [], [word("r", step.loads[0].n, 0, "recv")])
        assert half.step(12.0).heartbeats == ()

    @pytest.mark.parametrize("local", [48, 0])
    def test_a_reference_nobody_will_read_is_not_kept_alive(self, make: MAKE, local: int) -> None:
        half = make()
        view = half_asked(half, remote(), local)
        if local:
            half.allocated(view, blocks((1, 2, 3), hits=3), 0, 0.0)
        else:
            half.finished(view, ((),), FinishReason.ABORT, 0.0)
        assert half.step(0.0).heartbeats == ()


def test_a_siblings_ids_pass_untouched(make: MAKE) -> None:
    half = make("kv_both")
    assert half.reports(["x"], ["y"], ["y"], []) == Emit(frozenset("x"), frozenset("y"), frozenset("y"))


def test_shutdown_is_idempotent_and_repr_is_one_line(make: MAKE) -> None:
    half = make("kv_both")
    half.arrived(remote())
    assert repr(half) == (
        "NixlScheduler(kv_both CompletionLedger(send=0 recv=0 absorbed=0) incoming=1 loading=0 fences=0)"
    )  # fmt: skip
    half.shutdown()
    half.shutdown()
