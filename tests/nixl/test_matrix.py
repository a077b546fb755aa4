"""Every pair that docs/compatibility.md promises: by the token-position model, and with bytes carried by real NIXL.

Two processes hold all memory, one of P's ranks and one of D's, with an agent each that the whole matrix shares. What is
planned and what must lie where is as in tests/nixl/test_token_positions.py, content addressed by (layer, head, token).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvconn.geometry import Place
from kvconn.nixl.pairing import Read
from tests.engine.test_transfer import PAIRS as ENGINE_PAIRS
from tests.nixl.geometries import Engine, Rank
from tests.nixl.matrix import ROWS
from tests.nixl.test_token_positions import Copies, Load, transfer
from tests.transport.peer import Child

PAIRS = [pytest.param(p, d, id=f"{row.what} [{number}]") for row in ROWS for number, (p, d) in enumerate(row.pairs)]
ROOT = Path(__file__).resolve().parents[2]
#: bytes that all ranks of one side have
ROOM = 1 << 20
#: (tokens, blocks that D has already, seed of the block tables)
LOADS = [(1, 0, 0), (14, 1, 1), (16, 0, 2), (16, 2, 3)]


class Carried(Copies):
    """Two agents over NIXL."""

    def __init__(self, producer: Child, consumer: Child) -> None:
        self.sides = producer, consumer
        blob, self._remote = producer("start", ROOM)
        consumer("start", ROOM)
        self._peer = consumer("call", "add_peer", blob)
        self._at: dict[int, int] = {}
        self.reads = 0

    def begin(self, sources: dict[Place, Rank], readers: dict[Place, Rank]) -> None:
        for child, ranks in zip(self.sides, (sources, readers), strict=True):
            whole = np.concatenate([rank.bytes for rank in ranks.values()])
            assert len(whole) <= ROOM
            child("write", 0, whole.tobytes())
            at = 0
            for rank in ranks.values():
                self._at[id(rank)] = at
                at += len(rank.bytes)

    def read(self, reader: Rank, source: Rank, read: Read) -> None:
        here, there = self._at[id(reader)], self._remote + self._at[id(source)]
        handle = self.sides[1](
            "post", self._peer, [(here + to, there + at, n) for to, at, n in reader.parts(source, read)]
        )
        assert self.sides[1]("ended", handle) == "DONE"
        self.sides[1]("call", "release", handle)
        self.reads += 1

    def end(self, reader: Rank) -> None:
        got = self.sides[1]("read", self._at[id(reader)], len(reader.bytes))
        reader.bytes[:] = np.frombuffer(got, np.uint8)


@pytest.fixture(scope="module")
def carried() -> Iterator[Carried]:
    with Child("transport") as producer, Child("transport") as consumer:
        yield Carried(producer, consumer)


def loads(d: Engine) -> Iterator[Load]:
    for tokens, hit, seed in LOADS:
        full = min(hit, tokens // d.span)
        yield Load(tokens, tuple(full if group.kind == "full" else 0 for group in d.groups), seed)


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert len(PAIRS) >= 40


def test_the_page_is_what_all_passing_tests_write() -> None:
    spec = importlib.util.spec_from_file_location("compatibility", ROOT / "tools/compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    passed = {name: True for row in ROWS for name in tool.tests_of(row)}
    passed |= {f"{tool.ENGINE}[{pair}]": True for pair in ENGINE_PAIRS}
    passed |= {name: True for row in ROWS for _, name in row.vllm}
    assert (ROOT / "docs/compatibility.md").read_text() == tool.page(passed)
    one = tool.tests_of(ROWS[0])[-1]
    assert f"| {ROWS[0].what} |" not in tool.page({**passed, one: False})


def test_what_ran_in_vllm_names_tests_that_are_there() -> None:
    for module, _, test in (name.partition("::") for row in ROWS for _, name in row.vllm):
        assert f"def {test.partition('[')[0]}(" in (ROOT / f"tests/vllm/{module}.py").read_text()


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_every_pair_by_the_model(p: Engine, d: Engine) -> None:
    for load in loads(d):
        transfer(p, d, load)


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_every_pair_over_nixl(p: Engine, d: Engine, carried: Carried) -> None:
    before = carried.reads
    for load in list(loads(d))[1::2]:
        transfer(p, d, load, carried)
    assert carried.reads >= before + d.tp * d.pp
