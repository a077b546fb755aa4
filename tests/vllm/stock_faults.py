"""What a hostile or careless peer does to vLLM's own NixlConnector, and what it does to ours: the same, side by side.

    python -m tests.vllm.stock_faults [--only EXPRESSION]

Real engines, default policy ``fail``: every fault on vLLM's connector, then every one on ours. An engine that ended or
stands still is replaced. Prints a Markdown table. What ours must do is asserted in test_hostile.py; here nothing is
asserted, so that another version of vLLM can be looked at.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from tests.vllm.engines import STOCK_PRODUCER, Engine, EngineError, environment, ours, stock
from tests.vllm.prompts import prompt

Params = dict[str, Any]
Fault = Callable[["Side", list[int]], str]
#: seconds for an answer; a first contact that fails takes stock 5
PATIENCE = 45
START = 150
ENGINE_ID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
TOKENS = prompt(200, 31_000)
OTHER = prompt(200, 31_001)
#: changes to what the producer returned
EDITS: dict[str, Callable[[Params], Params]] = {
    '`{"do_remote_prefill": true}` alone': lambda p: {"do_remote_prefill": True},
    "too few block ids": lambda p: {**p, "remote_block_ids": [p["remote_block_ids"][0][:2]]},
    "block ids are words": lambda p: {**p, "remote_block_ids": [["one"] * 7]},
    "block ids beyond 32 bits": lambda p: {**p, "remote_block_ids": [[1 << 40] * 7]},
    "the port is a word": lambda p: {**p, "remote_port": "http"},
    "no host": lambda p: {k: v for k, v in p.items() if k != "remote_host"},
}


class Side:
    """A producer and a consumer of one kind, started when needed."""

    def __init__(self, kind: Callable[..., dict[str, Any]], folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._running: dict[str, Engine] = {}
        self._count = 0

    def start(self, role: str, **more: Any) -> Engine:
        self._count += 1
        log = self.folder / f"{self.kind.__name__}-{self._count}.log"
        return Engine(role, log, self.folder / "llama", self.kind(f"kv_{role}"), **more)

    def engine(self, role: str) -> Engine:
        if role not in self._running:
            self._running[role] = self.start(role)
        return self._running[role].ready(START)

    def reference(self, tokens: list[int]) -> Params:
        """What a prompt's blocks are known by; both engines run before its lease begins."""
        self.engine("consumer")
        params: Params = self.engine("producer").one(tokens, 1, params=STOCK_PRODUCER)["params"]
        return params

    def replace(self, *roles: str) -> None:
        for role in roles:
            if role in self._running:
                self._running.pop(role).close()


def consume(side: Side, params: Params, right: list[int]) -> str:
    """What the consumer answers to ``TOKENS`` with these params, and what becomes of it."""
    d = side.engine("consumer")
    before = len(d.said())
    try:
        answer = d.one(TOKENS, len(right), params=params, timeout=PATIENCE)
    except EngineError:
        ended = d.process.poll() is not None
        said = f"**the engine ends**: `{last_error(d.said()[before:])}`" if ended else parked(d)
        side.replace("consumer")
        return said
    d.ask("reset")
    if answer["reason"] == "error":
        return f"that request fails{why(d.said()[before:])}"
    return "right tokens" if answer["tokens"] == right else "**wrong tokens, as if they were right**"


def run(side: Side, wanted: dict[str, Fault], right: list[int]) -> dict[str, str]:
    outcomes = {}
    try:
        for name, fault in wanted.items():
            try:
                outcomes[name] = fault(side, right)
            except EngineError as err:
                outcomes[name] = f"**{str(err).splitlines()[0]}**"
                side.replace("producer", "consumer")
            print(f"{side.kind.__name__}: {name}: {outcomes[name]}", file=sys.stderr, flush=True)
    finally:
        side.replace("producer", "consumer")
    return outcomes


def parked(d: Engine) -> str:
    served = d.one(OTHER, 2, timeout=PATIENCE)["reason"] == "length"
    return f"**no answer in {PATIENCE} s**, its blocks stay taken" + ("; others are served" if served else "")


def last_error(said: str) -> str:
    """The exception that ended it; of an assertion, what was asserted."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in said.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if not errors:
        return "?"
    asserted = [line for line in lines if line.startswith("assert ")]
    return (asserted[-1] if errors[-1] == "AssertionError" and asserted else errors[-1])[:200]


def why(said: str) -> str:
    """What the connector logged about it: ours, or vLLM's as a warning or an error."""
    mine = re.findall(r"(?:request \S+: refused|rank \d+: load of \S+ failed): (.*)", said)
    theirs = re.findall(r"(?:ERROR|WARNING) [\d-]+ [\d:]+ \[(?:base|pull)_(?:worker|scheduler)\.py:\d+\] (.*)", said)
    found = mine or theirs
    return f": `{re.sub(ENGINE_ID, 'P', found[0].split(' | ')[0])[:160]}`" if found else ""


# --- faults ---------------------------------------------------------------------------------------------------------


def another_prompts_blocks(side: Side, right: list[int]) -> str:
    theirs = side.reference(OTHER)["remote_block_ids"]
    return consume(side, {**side.reference(TOKENS), "remote_block_ids": theirs}, right)


def blocks_given_away(side: Side, right: list[int]) -> str:
    """A reference read once, and again when the producer has other KV in its blocks."""
    p, _ = side.engine("producer"), side.engine("consumer")
    first = p.one(TOKENS, 1, params=STOCK_PRODUCER)
    params = first["params"]
    read = consume(side, params, right)
    p.freed(first["id"], timeout=PATIENCE)
    p.ask("overwrite", blocks=params["remote_block_ids"][0])
    p.ask("reset")
    return f"first {read}, then {consume(side, params, right)}"


def the_next_consumer(side: Side, right: list[int]) -> str:
    """What becomes of one that was never there before; then both are replaced."""
    side.replace("consumer")
    outcome = consume(side, side.reference(TOKENS), right)
    side.replace("producer", "consumer")
    return f"the next consumer: {outcome}"


def a_wrong_size(side: Side, right: list[int]) -> str:
    """In the params of a first contact."""
    side.replace("consumer")
    outcome = consume(side, {**side.reference(TOKENS), "tp_size": 64}, right)
    return f"{outcome}; {the_next_consumer(side, right)}"


def a_malformed_frame(side: Side, right: list[int]) -> str:
    """To the producer's side channel."""
    p = side.engine("producer")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 2000)
        client.connect(f"tcp://127.0.0.1:{p.port}")
        client.send_multipart([b"", b"\xc1\xff"])
    return the_next_consumer(side, right)


def a_taken_port(side: Side, right: list[int]) -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        p = side.start("producer", port=taken.getsockname()[1])
        try:
            p.ready(START)
            return "it starts"
        except EngineError:
            if p.process.poll() is None:
                return f"**start-up hangs** (no word in {START} s): `{last_error(p.said())}`"
            return f"start-up ends: `{last_error(p.said())}`"
        finally:
            p.close()


def edited(name: str) -> Fault:
    return lambda side, right: consume(side, EDITS[name](side.reference(TOKENS)), right)


FAULTS: dict[str, Fault] = {
    **{name: edited(name) for name in EDITS},
    "`tp_size` is 64": a_wrong_size,
    "block ids of another prompt": another_prompts_blocks,
    "a reference used twice, its blocks given away between": blocks_given_away,
    "one malformed frame to the side channel": a_malformed_frame,
    "the side channel's port is taken": a_taken_port,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines end too
    parser.add_argument("--only", default="", help="faults whose name this expression finds")
    only = parser.parse_args().only
    wanted = {name: fault for name, fault in FAULTS.items() if re.search(only, name)}
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        command = [sys.executable, "-m", "tests.vllm.models", "llama", str(folder / "llama")]
        subprocess.run(command, check=True, env=environment(1, {}), capture_output=True, timeout=120)
        alone = Engine("alone", folder / "alone.log", folder / "llama", None)
        right = alone.ready(START).one(TOKENS, 4)["tokens"]
        alone.close()
        theirs, mine = (run(Side(kind, folder), wanted, right) for kind in (stock, ours))
    print("| | vLLM's NixlConnector | ours |\n|---|---|---|")
    for name in wanted:
        print(f"| {name} | {theirs[name]} | {mine[name]} |")


if __name__ == "__main__":
    main()
