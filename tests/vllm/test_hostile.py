"""What a client or a stranger sends ends no engine and never gives a wrong answer.

Under ``fail`` the request ends with an error, under ``recompute`` it has the tokens of a single engine; logged once,
counted. Each of these ends, stalls or fools the stock connector of vLLM 0.32.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from tests.vllm.conftest import QUICK, Fleet
from tests.vllm.engines import PRODUCER, Engine, EngineError, free_port, ours
from tests.vllm.prompts import prompt

Params = dict[str, Any]
#: changes to what the producer returned
EDITS: dict[str, Callable[[Params], Params]] = {
    "nothing but the flag": lambda p: {"do_remote_prefill": True},
    "too few block ids": lambda p: {**p, "remote_block_ids": [p["remote_block_ids"][0][:2]]},
    "no block ids": lambda p: {**p, "remote_block_ids": []},
    "one list too many": lambda p: {**p, "remote_block_ids": [*p["remote_block_ids"], [1]]},
    "block ids are words": lambda p: {**p, "remote_block_ids": [["one"] * 7]},
    "block ids are no list": lambda p: {**p, "remote_block_ids": 7},
    "block ids beyond 32 bits": lambda p: {**p, "remote_block_ids": [[1 << 40] * 7]},
    "block ids out of range": lambda p: {**p, "remote_block_ids": [[500_000 + k for k in range(7)]]},
    "a negative block id": lambda p: {**p, "remote_block_ids": [[-1, *p["remote_block_ids"][0][1:]]]},
    "no host": lambda p: {k: v for k, v in p.items() if k != "remote_host"},
    "a host that is no host": lambda p: {**p, "remote_host": "tcp://;x"},
    "the port is a word": lambda p: {**p, "remote_port": "http"},
    "the engine is a number": lambda p: {**p, "remote_engine_id": 5},
    "another engine": lambda p: {**p, "remote_engine_id": "not the one"},
    "unknown request id": lambda p: {**p, "remote_request_id": "nobody-knows-this-one"},
    "tp_size is a list": lambda p: {**p, "tp_size": [64]},
    "no fence": lambda p: {k: v for k, v in p.items() if k != "kvconn"},
    "a seal of somebody else": lambda p: {**p, "kvconn": {**p["kvconn"], "seal": "0" * 64}},
    "another slot": lambda p: {**p, "kvconn": {**p["kvconn"], "slot": p["kvconn"]["slot"] + 1}},
    "fewer tokens than blocks": lambda p: {**p, "remote_num_tokens": 10},
    "lone surrogates": lambda p: {**p, "remote_request_id": "\ud800"},
}


def prefilled(p: Engine, tokens: list[int]) -> Params:
    params: Params = p.ready().one(tokens, 1, params=PRODUCER)["params"]
    return params


def refused(answer: dict[str, Any]) -> bool:
    return bool(answer["reason"] == "error")


@pytest.mark.parametrize("name", EDITS)
def test_wrong_params_fail_or_recompute(
    name: str, producer: Engine, consumer: Engine, recomputer: Engine, alone: Engine
) -> None:
    tokens = prompt(200, 5000 + list(EDITS).index(name))
    expected = alone.ready().one(tokens, 4)["tokens"]
    refuse_or_recompute(tokens, EDITS[name](prefilled(producer, tokens)), expected, consumer, recomputer)


def test_nobody_listens_on_that_port(own_fleet: Fleet, producer: Engine, alone: Engine) -> None:
    """Told when the handshake's time is up; the engines of this test have little of it."""
    d = own_fleet.engine("fails", ours("kv_consumer", kv_connector_extra_config=QUICK))
    r = own_fleet.engine(
        "recomputes", ours("kv_consumer", kv_load_failure_policy="recompute", kv_connector_extra_config=QUICK)
    )
    tokens = prompt(200, 5800)
    expected = alone.ready().one(tokens, 4)["tokens"]
    params = {**prefilled(producer, tokens), "remote_port": free_port(), "remote_engine_id": "elsewhere"}
    refuse_or_recompute(tokens, params, expected, d, r)


def refuse_or_recompute(tokens: list[int], params: Params, expected: list[int], d: Engine, r: Engine) -> None:
    """An error from ``d``, counted there; the right tokens from ``r``; nothing is held on either."""
    before = d.ready().metrics()
    answer = d.one(tokens, 4, params=params)
    assert refused(answer), answer
    assert r.ready().one(tokens, 4, params=params)["tokens"] == expected
    after = d.metrics()
    counters = ("kvconn_params_refused_total", "kvconn_seals_refused_total", "vllm:nixl_num_failed_transfers_total")
    assert sum(after.get(c, 0.0) for c in counters) > sum(before.get(c, 0.0) for c in counters)
    for engine in (d, r):
        assert not engine.idle()["owed"]
        assert engine.state()["free"] == engine.state()["total"] - 1


def test_a_size_that_is_not_the_producers_changes_no_answer(producer: Engine, consumer: Engine, alone: Engine) -> None:
    tokens = prompt(200, 5900)
    params = {**prefilled(producer, tokens), "tp_size": 64, "pp_size": 2}
    answer = consumer.ready().one(tokens, 4, params=params)
    assert refused(answer) or answer["tokens"] == alone.ready().one(tokens, 4)["tokens"]


def test_blocks_of_another_prompt_are_not_read(
    producer: Engine, consumer: Engine, recomputer: Engine, alone: Engine
) -> None:
    mine, other = prompt(200, 6001), prompt(200, 6002)
    theirs = prefilled(producer, other)
    stolen = {**prefilled(producer, mine), "remote_block_ids": theirs["remote_block_ids"]}
    assert refused(consumer.ready().one(mine, 4, params=stolen))
    assert recomputer.ready().one(mine, 4, params=stolen)["tokens"] == alone.ready().one(mine, 4)["tokens"]
    # a good reference with another prompt would put wrong KV into the reader's prefix cache
    assert refused(consumer.one(mine, 4, params=theirs))


def test_a_reference_is_good_once(producer: Engine, consumer: Engine, recomputer: Engine, alone: Engine) -> None:
    """Read again after it was consumed, and again after the producer gave the blocks to other prompts."""
    tokens = prompt(200, 6100)
    expected = alone.ready().one(tokens, 4)["tokens"]
    first = producer.ready().one(tokens, 1, params=PRODUCER)
    params = first["params"]
    assert consumer.ready().one(tokens, 4, params=params)["tokens"] == expected
    producer.freed(first["id"])
    for reused in (False, True):
        if reused:
            producer.ask("overwrite", blocks=params["remote_block_ids"][0])
            producer.ask("reset")
        for d in (consumer, recomputer):
            assert d.ready().ask("reset")
        before = consumer.metrics()["kvconn_stale_reads_total"]
        assert refused(consumer.one(tokens, 4, params=params))
        assert consumer.metrics()["kvconn_stale_reads_total"] == before + 1
        assert recomputer.one(tokens, 4, params=params)["tokens"] == expected


def test_an_expired_lease_is_no_answer(own_fleet: Fleet, consumer: Engine, recomputer: Engine, alone: Engine) -> None:
    p = own_fleet.engine("short", ours("kv_producer", kv_connector_extra_config={"kv_lease_duration": 1.0}))
    tokens = prompt(200, 6200)
    params = prefilled(p, tokens)
    assert p.idle()["free"] == p.state()["total"] - 1  # nobody came; the lease ended
    assert refused(consumer.ready().one(tokens, 4, params=params))
    assert recomputer.ready().one(tokens, 4, params=params)["tokens"] == alone.ready().one(tokens, 4)["tokens"]
    assert p.metrics()["vllm:nixl_num_kv_expired_reqs_total"] == 1


def test_a_wrong_reference_is_logged_once(producer: Engine, consumer: Engine) -> None:
    consumer.ready().one(prompt(70, 6300), 4, params={"do_remote_prefill": True}, id="logged-once")
    lines = [line for line in consumer.said().splitlines() if "logged-once" in line and "kv_transfer_params" in line]
    assert len([line for line in lines if "refused" in line]) == 1


class TestSideChannel:
    def test_it_answers_after_garbage(self, producer: Engine) -> None:
        producer.ready()
        good = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
        bad = [
            [b"", b"\xc1\xff"],
            [b""],
            [b"", good, b"more"],
            [b"", msgspec.msgpack.encode((b"get_meta_msg", 1, 0))],
            [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 7))],
            [b"", msgspec.msgpack.encode((b"what", 0, 0))],
            [b"", msgspec.msgpack.encode({"a": "map"})],
            [b"", b"x" * 100_000],
        ]
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 10_000)
            socket.connect(f"tcp://127.0.0.1:{producer.port}")
            for frames in bad[:-1]:
                socket.send_multipart(frames)
            socket.send_multipart([b"", good])
            answer = socket.recv_multipart()
        assert len(answer) == 3 and b"compatibility_hash" in answer[1]

    def test_a_taken_port_is_named_at_start_up(self, own_fleet: Fleet) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            p = own_fleet.engine("taken", ours("kv_producer"), port=port)
            with pytest.raises(EngineError):
                p.ready()
        assert f"side channel: cannot listen on 127.0.0.1:{port}" in p.said()


REFUSED = {
    "NixlPushConnector": (
        {**ours("kv_producer"), "kv_connector": "NixlPushConnector"},
        {},
        "NixlPushConnector: this version reads (pull)",
    ),
    "an unknown key": (
        ours("kv_consumer", kv_connector_extra_config={"kv_leese_duration": 3}),
        {},
        "kv_leese_duration: unknown key (did you mean 'kv_lease_duration'?)",
    ),
    "what stock has and we do not": (
        ours("kv_producer", kv_connector_extra_config={"bidirectional_kv_xfer": True}),
        {},
        "bidirectional_kv_xfer: unknown key",
    ),
    "another layout than ours": (
        ours("kv_producer", enable_permute_local_kv=True),
        {},
        "enable_permute_local_kv: blocks are read as they lie",
    ),
    "a child that is nobody": (
        {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": "kvconn.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [ours("kv_consumer"), ours("kv_producer", kv_port=0)]},
        },
        {},
        "connectors[0].kv_role: expected kv_producer or kv_both",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_at_start_up(name: str, own_fleet: Fleet) -> None:
    transfer, more, text = REFUSED[name]
    engine = own_fleet.engine("refused", transfer, **more)
    with pytest.raises(EngineError):
        engine.ready(240)
    assert text in engine.said()
