"""Any two sides, one plan: D has exactly its bytes of the prompt, each read once, and nothing else is touched.

Pairs, prompts and hits are drawn; where everything lies says :mod:`tests.nixl.geometries`, which plans nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.geometry import Place
from kvconn.nixl.pairing import NO_BLOCK, permuted, reads
from kvconn.nixl.permute import permute_blocks
from kvconn.nixl.plan import Incompatible, Plan, make_plan, missing, routes
from tests.nixl.geometries import Engine, Group, Rank, name, ranks

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=300)
P_FILL, D_FILL = 0xEE, 0xDD


@dataclass
class Load:
    """A prompt of ``tokens`` tokens, of whose blocks D has ``hits`` per group; block tables are drawn from ``seed``."""

    tokens: int
    hits: tuple[int, ...]
    seed: int = 0

    def table(self, engine: Engine, side: str) -> list[list[int]]:
        """Per group the prompt's blocks in order; of a window only those that a next token looks into."""
        draw = random.Random(f"{side} {self.seed}")
        tables = []
        for group in engine.groups:
            n = -(-self.tokens // engine.span)
            table = draw.sample(range(engine.blocks), n)
            if self.seed % 3 == 0:
                table.sort()
            if group.window is not None:
                gone = max(0, self.tokens - group.window + 1) // engine.span
                table[:gone] = [NO_BLOCK] * gone
            tables.append(table)
        return tables


def planned(mine: Rank, sources: dict[Place, Rank]) -> list[tuple[Plan, Place]]:
    p = next(iter(sources.values())).engine
    found = routes(mine.engine.side, p.side, mine.place)
    assert not isinstance(found, Incompatible), found
    plans = []
    for route in found:
        plan = make_plan(mine.cache(), sources[route.source].metadata(), route)
        assert isinstance(plan, Plan), plan
        assert plan.readers == route.readers
        plans.append((plan, route.source))
    assert missing(mine.cache(), [plan for plan, _ in plans]) is None
    return plans


def transfer(p: Engine, d: Engine, load: Load) -> dict[Place, Rank]:
    """Prefill on every rank of P, plan and read on every rank of D, check all of D. Returns D."""
    theirs, mine = load.table(p, "P"), load.table(d, "D")
    sources = ranks(p, P_FILL)
    for source in sources.values():
        source.write(theirs, load.tokens)
    remote = tuple(tuple(block for block in table if block != NO_BLOCK) for table in theirs)
    local = tuple(tuple(table[hit:]) for table, hit in zip(mine, load.hits, strict=True))
    readers = ranks(d, D_FILL)
    for reader in readers.values():
        plans = planned(reader, sources)
        for plan, source in plans:
            for read in reads(plan, local, remote, load.hits, tokens=load.tokens, held=load.tokens):
                assert (read.local_mem, read.remote_mem) == (d.mem_type, p.mem_type)
                reader.read(sources[source], read)
        for permute, blocks in permuted([plan for plan, _ in plans], local):
            permute_blocks(reader.view(permute), blocks, permute)
        check(reader, mine, load)
    return readers


def check(rank: Rank, tables: list[list[int]], load: Load) -> None:
    may = np.zeros(len(rank.bytes), bool)
    for layer in rank.mine:
        group = rank.group_of[layer]
        for block in tables[group][load.hits[group] :]:
            if block != NO_BLOCK:
                for cell in rank.block_bytes(layer, block):
                    may[cell] = True
    assert not rank.written[~may].any(), "read into bytes that are not of a block to fill"
    assert (rank.bytes[~may] == D_FILL).all()
    assert rank.written.max(initial=0) <= 1, "read twice"
    for layer, part, head, token in rank.holds(load.tokens):
        group = rank.group_of[layer]
        number, offset = rank.engine.slot(rank.place.tp, token) or (0, 0)
        block = tables[group][number]
        window = rank.engine.groups[group].window
        seen = window is None or token > load.tokens - window
        if number < load.hits[group] or block == NO_BLOCK or not seen:
            continue
        cell = rank.cell(layer, part, head, block, offset)
        got, want = int(rank.bytes[cell].view(np.uint64)[0]), name(layer, part, head, token)
        assert got == want, f"{rank.place} layer {layer} part {part} head {head} token {token}: {got:x}"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine]:
    """Two engines of one model that can exchange KV."""
    heads = draw(st.sampled_from([1, 1, 2, 4, 8]))
    n_groups = draw(st.sampled_from([1, 1, 2]))
    groups = (
        (Group((0, 1)),)
        if n_groups == 1
        else (Group((0, 2)), Group((1, 3), "window", draw(st.sampled_from([1, 3, 5, 8, 30]))))
    )
    latent = heads == 1 and draw(st.booleans())
    turns = draw(st.sampled_from([1, 2, 4]))
    sides = []
    for _ in range(2):
        tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0 or n % heads == 0]))
        copies = max(1, tp // heads)
        block = draw(st.sampled_from([4, 8]))
        pool = draw(st.sampled_from(["layers", "layers", "blocks", "heads"]))
        kv = (
            "latent"
            if latent
            else "row"
            if pool == "heads"
            else draw(st.sampled_from(["row", "row", "block", "apart"]))
        )
        plain = kv in ("latent", "row") and pool != "heads"
        sides.append(
            Engine(
                heads,
                tp,
                pp=draw(st.sampled_from([1, 1, 2])),
                dcp=draw(st.sampled_from([n for n in (1, 2, 4) if copies % n == 0])),
                interleave=draw(st.sampled_from([1, turns])),
                block=block,
                kernel=draw(st.sampled_from([1, 1, 2])),
                first="heads" if pool == "heads" else draw(st.sampled_from(["heads", "heads", "tokens"])),
                kv=kv,
                pool=pool,
                blocks=draw(st.sampled_from([8, 11])),
                gap=draw(st.sampled_from([0, 0, 24])),
                groups=groups,
                cells=not plain or draw(st.booleans()),
                mem_type=draw(st.sampled_from(["DRAM", "VRAM"])),
            )
        )
    return sides[0], sides[1]


@st.composite
def loads(draw: st.DrawFn, d: Engine) -> Load:
    tokens = draw(st.integers(1, 30))
    hits = tuple(draw(st.integers(0, tokens // d.span)) for _ in d.groups)
    return Load(tokens, hits, draw(st.integers(0, 99)))


class TestAnyPair:
    @FUZZ
    @given(data=st.data())
    def test_every_rank_has_exactly_its_cells_each_read_once_and_nothing_outside(self, data: st.DataObject) -> None:
        p, d = data.draw(pairs())
        transfer(p, d, data.draw(loads(d)))
