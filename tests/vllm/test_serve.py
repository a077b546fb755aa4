"""Two ``vllm serve`` and the example proxy: a single engine's tokens, KV moved, nothing held; wrong params fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.vllm.conftest import PATIENT, Fleet
from tests.vllm.engines import PRODUCER, ROOT, Engine, Server, end, ours
from tests.vllm.prompts import prompt, twenty


@pytest.fixture(scope="module")
def servers(fleet: Fleet) -> Iterator[tuple[Server, Server]]:
    p = fleet.server("serve-P", ours("kv_producer"))
    d = fleet.server("serve-D", ours("kv_consumer", kv_connector_extra_config=PATIENT))
    yield p.ready(), d.ready()
    for one in (p, d):
        one.close()


@pytest.fixture(scope="module")
def proxy(servers: tuple[Server, Server]) -> Iterator[Server]:
    """The example, dressed as a server."""
    p, d = servers
    command = [sys.executable, str(ROOT / "examples" / "pd_proxy.py"), "--port", "0"]
    command += ["--prefill", f"http://127.0.0.1:{p.http}", "--decode", f"http://127.0.0.1:{d.http}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    front = Server.__new__(Server)
    front.name, front.http = "proxy", int(line.rsplit(":", 1)[1])
    yield front
    end(process)
    process.stdout.close()


def usage(server: Server, timeout: float = 20) -> float:
    """KV cache in use, once it is 0 or after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while (value := server.metrics()["vllm:kv_cache_usage_perc"]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return value


def tokens(answer: tuple[int, dict[str, Any]]) -> list[int]:
    status, body = answer
    assert status == 200, body
    ids: list[int] = body["choices"][0]["token_ids"]
    return ids


def test_twenty_prompts_through_the_proxy(servers: tuple[Server, Server], proxy: Server, alone: Engine) -> None:
    p, d = servers
    prompts = twenty()
    expected = [alone.ready().one(one)["tokens"] for one in prompts]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(proxy.complete, prompts))
    assert [tokens(answer) for answer in answers] == expected
    seen = d.metrics()
    assert seen["vllm:nixl_bytes_transferred_sum"] > 0
    assert seen["vllm:nixl_xfer_time_seconds_count"] == seen["vllm:nixl_bytes_transferred_count"] > 0
    assert seen["vllm:external_prefix_cache_hits_total"] > 0
    assert seen["kvconn_stale_reads_total"] == 0
    assert usage(p) == 0 and usage(d) == 0


def test_an_answer_may_be_streamed(servers: tuple[Server, Server], proxy: Server) -> None:
    """Events, their end, and together the tokens of the same answer in one piece. How many events there are is vLLM's
    affair: it joins what a client has not yet taken."""
    ids = prompt(70, 7000)
    body = {"model": "tiny", "prompt": ids, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{proxy.http}/v1/completions",
        json.dumps({**body, "stream": True, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.read().decode().splitlines() if line]
    assert events.pop() == "[DONE]"
    streamed = [json.loads(event)["choices"][0] for event in events]
    assert [id for choice in streamed for id in choice["token_ids"] or ()] == tokens(proxy.complete(ids, 5))
    assert streamed[-1]["finish_reason"] == "length"


def test_wrong_params_are_an_error_and_the_next_request_works(
    servers: tuple[Server, Server], proxy: Server, alone: Engine
) -> None:
    p, d = servers
    mine, other = prompt(100, 7100), prompt(100, 7101)
    theirs = p.complete(other, 1, PRODUCER)[1]["kv_transfer_params"]
    for params in ({"do_remote_prefill": True}, {**theirs, "remote_block_ids": [["x"]]}, theirs):
        status, body = d.complete(mine, 4, params)
        assert status >= 400, body
    assert tokens(proxy.complete(mine, 4)) == alone.ready().one(mine, 4)["tokens"]
    assert d.metrics()["kvconn_params_refused_total"] == 2
