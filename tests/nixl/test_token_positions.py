"""Any two sides, one plan: D has exactly its bytes of the prompt, each read once, and nothing else is touched.

Pairs, prompts and hits are drawn; where everything lies says :mod:`tests.nixl.geometries`, which plans nothing.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.base import NO_BLOCK, GroupView
from kvconn.geometry import Place, RankCache, Region
from kvconn.nixl.pairing import Read, permuted, reads
from kvconn.nixl.permute import permute_blocks
from kvconn.nixl.plan import Plan, make_plan, missing
from kvconn.nixl.routes import Incompatible, routes
from tests.nixl.geometries import Engine, Group, Rank, name, other, ranks

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=300)
P_FILL, D_FILL = 0xEE, 0xDD
BLOCKS = (3, 4, 6, 8, 12)


@dataclass
class Load:
    """A prompt of ``tokens`` tokens, of whose blocks D has ``hits`` per group; block tables are drawn from ``seed``."""

    tokens: int
    hits: tuple[int, ...]
    seed: int = 0

    def table(self, engine: Engine, side: str) -> list[list[int]]:
        """Per group the prompt's blocks in order; of a window those that the last token or the next look into."""
        draw = random.Random(f"{side} {self.seed}")
        tables = []
        for group in engine.groups:
            if group.kind == "state":
                tables.append([draw.randrange(engine.blocks)])
                continue
            n = -(-self.tokens // engine.span)
            table = draw.sample(range(engine.blocks), n)
            if self.seed % 3 == 0:
                table.sort()
            if group.window is not None:
                gone = max(0, self.tokens - group.window) // engine.span
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


class Copies:
    """Memory that is copied from: what carries bytes in most tests."""

    def begin(self, sources: dict[Place, Rank], readers: dict[Place, Rank]) -> None:
        """These ranks' memory is as it should be before the reads."""

    def read(self, reader: Rank, source: Rank, read: Read) -> None:
        reader.read(source, read)

    def end(self, reader: Rank) -> None:
        """All reads of this rank were given."""


def transfer(p: Engine, d: Engine, load: Load, carrier: Copies | None = None) -> None:
    """Prefill on every rank of P, plan and read on every rank of D, check all of D."""
    carrier = carrier or Copies()
    theirs, mine = load.table(p, "P"), load.table(d, "D")
    sources = ranks(p, P_FILL)
    for source in sources.values():
        source.write(theirs, load.tokens)
    remote = tuple(tuple(block for block in table if block != NO_BLOCK) for table in theirs)
    local = tuple(tuple(table[hit:]) for table, hit in zip(mine, load.hits, strict=True))
    readers = ranks(d, D_FILL)
    carrier.begin(sources, readers)
    for reader in readers.values():
        plans = planned(reader, sources)
        for plan, source in plans:
            for read in reads(plan, local, remote, load.hits, tokens=load.tokens, held=load.tokens):
                assert (read.local_mem, read.remote_mem) == (d.mem_type, p.mem_type)
                carrier.read(reader, sources[source], read)
        carrier.end(reader)
        for permute, blocks in permuted([plan for plan, _ in plans], local):
            permute_blocks(reader.view(permute), blocks, permute)
        check(reader, mine, load)


def check(rank: Rank, tables: list[list[int]], load: Load) -> None:
    may = np.zeros(len(rank.bytes), bool)
    for layer in rank.mine:
        group = rank.group_of[layer]
        for block in tables[group][load.hits[group] :]:
            if block != NO_BLOCK:
                for cell in rank.block_bytes(layer, block):
                    may[cell] = True
    for region in rank.state_regions():
        slot = rank.slot(region, tables[region.group][-1])
        may[slot] = True
        np.testing.assert_array_equal(rank.bytes[slot], rank.state(region))
    assert not rank.written[~may].any(), "read into bytes that are not of a block to fill"
    assert (rank.bytes[~may] == D_FILL).all()
    assert rank.written.max(initial=0) <= 1, "read twice"
    for layer, part, head, token in rank.holds(load.tokens):
        group = rank.group_of[layer]
        number, offset = rank.engine.slot(rank.place.tp, token) or (0, 0)
        block = tables[group][number]
        if number < load.hits[group] or block == NO_BLOCK:
            continue
        cell = rank.cell(layer, part, head, block, offset)
        got, want = int(rank.bytes[cell].view(np.uint64)[0]), name(layer, part, head, token)
        assert got == want, f"{rank.place} layer {layer} part {part} head {head} token {token}: {got:x}"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine]:
    """Two engines of one model that can exchange KV: of a window, D's blocks divide P's."""
    heads = draw(st.sampled_from([1, 1, 2, 4, 8]))
    n_groups = draw(st.sampled_from([1, 1, 2]))
    groups = (
        (Group((0, 1)),)
        if n_groups == 1
        else (Group((0, 2)), Group((1, 3), "window", draw(st.sampled_from([1, 3, 5, 8, 30]))))
    )
    latent = heads == 1 and draw(st.booleans())
    turns = draw(st.sampled_from([1, 2, 3, 4]))
    #: a state is read between equal shares
    keeps_state = draw(st.sampled_from([False, False, True]))
    if keeps_state:
        groups += (Group((groups[-1].layers[-1] + 1,), "state"),)
    sides: list[Engine] = []

    def fits(span: int) -> bool:
        return n_groups == 1 or not sides or sides[0].span % span == 0

    for _ in range(2):
        tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if heads % n == 0 or n % heads == 0]))
        tp = sides[0].tp if keeps_state and sides else tp
        copies = max(1, tp // heads)
        sizes = [n for n in (1, 2, 4) if copies % n == 0 and any(fits(n * block) for block in BLOCKS)]
        dcp = 1 if keeps_state else draw(st.sampled_from(sizes))
        block = draw(st.sampled_from([block for block in BLOCKS if fits(dcp * block)]))
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
                dcp=dcp,
                interleave=draw(st.sampled_from([1, turns] if block % turns == 0 else [1])),
                block=block,
                kernel=draw(st.sampled_from([n for n in (1, 1, 2, 3) if block % n == 0])),
                first="heads" if pool == "heads" else draw(st.sampled_from(["heads", "heads", "tokens"])),
                kv=kv,
                pool=pool,
                blocks=draw(st.sampled_from([10, 13])),
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
    hits = tuple(0 if g.kind == "state" else draw(st.integers(0, tokens // d.span)) for g in d.groups)
    return Load(tokens, hits, draw(st.integers(0, 99)))


class TestAnyPair:
    @FUZZ
    @given(data=st.data())
    def test_every_rank_has_exactly_its_cells_each_read_once_and_nothing_outside(self, data: st.DataObject) -> None:
        p, d = data.draw(pairs())
        transfer(p, d, data.draw(loads(d)))


#: every way to lay out the blocks of a model with four KV heads
LAYOUTS = [
    *(
        Engine(heads=4, kv=kv, first=first, pool=pool)
        for kv in ("row", "block", "apart")
        for first in ("heads", "tokens")
        for pool in ("layers", "blocks")
    ),
    Engine(heads=4, pool="heads"),
]


class TestEveryPairOfLayouts:
    @pytest.mark.parametrize("p_tp", [1, 2, 4])
    @pytest.mark.parametrize("d_tp", [1, 2])
    def test_bytes_are_right_whichever_two_meet(self, p_tp: int, d_tp: int) -> None:
        for seed, (p, d) in enumerate(itertools.product(LAYOUTS, LAYOUTS)):
            blocks = 4 if seed % 2 else 8
            transfer(other(p, tp=p_tp, block=blocks), other(d, tp=d_tp), Load(15, (seed % 3,), seed))

    @pytest.mark.parametrize(("p_tp", "d_tp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)])
    @pytest.mark.parametrize("tokens_first", ["P", "D"])
    def test_whole_blocks_are_read_where_only_the_order_of_heads_and_tokens_differs(
        self, p_tp: int, d_tp: int, tokens_first: str
    ) -> None:
        base = Engine(heads=4)
        turned = other(base, first="tokens")
        p, d = (turned, base) if tokens_first == "P" else (base, turned)
        p, d = other(p, tp=p_tp), other(d, tp=d_tp)
        reader = ranks(d, D_FILL)[Place(0, 0)]
        plans = planned(reader, ranks(p, P_FILL))
        lanes = [lane for plan, _ in plans for lane in plan.lanes]
        torn = tokens_first == "P" and p_tp < d_tp  # some heads of every token: no order makes them one piece
        alike = tokens_first == "P" and p_tp == 4  # one head per rank has no order
        assert {lane.unit for lane in lanes} == ({1} if torn else {4})
        assert bool(permuted([plan for plan, _ in plans], ((0,),))) == (not torn and not alike)


class TestEveryNumberOfTokens:
    """Partial first and last blocks of either side, and every hit."""

    @pytest.mark.parametrize(("p_block", "d_block"), [(4, 4), (2, 4), (4, 2), (8, 4), (4, 8), (2, 8)])
    @pytest.mark.parametrize("dcp", [1, 2])
    def test_partial_blocks(self, p_block: int, d_block: int, dcp: int) -> None:
        p = Engine(kv="latent", block=p_block, tp=2, dcp=dcp)
        d = Engine(kv="latent", block=d_block)
        for tokens in range(1, 18):
            for hits in range(tokens // d_block + 1):
                transfer(p, d, Load(tokens, (hits,), tokens))


class TestOneAddress:
    def test_two_regions_at_one_address_with_different_strides_share_a_pool_of_bytes(self) -> None:
        """Group 0 has blocks of 16 bytes, group 1 of 32, of one buffer; block ids of the two don't overlap."""
        mine = RankCache(
            (Region("a", 1000, 16, 16, 8, 0), Region("b", 1000, 32, 32, 4, 1)),
            4,
            (GroupView("full", ("a",)), GroupView("full", ("b",))),
        )
        theirs = msgspec.structs.replace(
            ranks(Engine(blocks=8), 0)[Place(0, 0)].metadata(),
            kv_caches_base_addr=[5000, 5000], block_lens=[16, 32], block_strides=[16, 32], num_blocks=8,
            region_num_blocks=[8, 4], region_names=["a", "b"], region_group_ids=[0, 1], kvconn=None,
        )  # fmt: skip
        plan = make_plan(mine, theirs)
        assert isinstance(plan, Plan)
        (read,) = reads(plan, ((0, 1), (3,)), ((6, 7), (1,)), (0, 0), tokens=8, held=8)
        got = list(zip(read.local.tolist(), read.remote.tolist(), strict=True))
        assert got == [([1000, 32], [5096, 32]), ([1096, 32], [5032, 32])]
