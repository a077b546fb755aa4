"""Any two described engines: a pair is refused exactly where it cannot be; else every byte is somebody's to read."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from kvconn.errors import ConfigError
from kvconn.geometry import Place, Share
from kvconn.nixl.shape import ITEM_SIZES, Shape, ShapeGroup, parse_shape
from kvconn.nixl.survey import peer_of, survey

FUZZ = settings(derandomize=True, database=None, deadline=None, max_examples=300)
#: what may differ between two engines of one model
SIDES = {
    "tp": [1, 1, 2, 3, 4, 8], "pp": [1, 1, 2, 3], "dcp": [1, 1, 2, 4], "dcp_interleave": [1, 2, 3, 4],
    "block_size": [12, 12, 16, 24], "kernel_block_size": [None, None, 4], "kv": ["together", "together", "apart"],
    "layout": ["LBHNC", "LBNHC", "BLHNC", "BHLNC"], "pcp": [1, 1, 1, 1, 1, 2],
}  # fmt: skip
#: and what must not
ODD = {"dtype": "float32", "kv_heads": 3, "head_size": 24, "names": "other.{}"}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    model: dict[str, Any] = {"layers": 3, "kv_heads": draw(st.sampled_from([1, 2, 4, 6, 8])), "head_size": 16}
    if model["kv_heads"] == 1 and draw(st.booleans()):
        model["packing"] = "latent"
    made = []
    for _ in range(2):
        side = model | {name: draw(st.sampled_from(choices)) for name, choices in SIDES.items()}
        if draw(st.integers(0, 9)) == 0:
            name = draw(st.sampled_from(list(ODD)))
            side[name] = ODD[name]
        kind = draw(st.sampled_from(["full", "full", "window", "state"]))
        if kind != "full":
            more = {"window": draw(st.sampled_from([32, 64]))} if kind == "window" else {"state_bytes": [40, 24]}
            side["groups"] = [{"layers": [0, 2]}, {"layers": [1], "kind": kind, **more}]
        try:
            made.append(parse_shape(side, "side"))
        except ConfigError:
            assume(False)
    return made[0], made[1]


def divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def possible(p: Shape, d: Shape) -> bool:
    """In words: one model, sizes that divide, what is seen is kept, in whole blocks, a state is in one piece."""
    one_model = all(getattr(p, name) == getattr(d, name) for name in ("dtype", "heads", "head_size", "names"))
    ours, theirs = d.side, p.side
    sizes = divides(ours.tp, theirs.tp) and divides(ours.dcp, theirs.dcp)
    turns = 1 in (ours.dcp, theirs.dcp) or divides(ours.interleave, theirs.interleave)
    mine, other = kept(d), kept(p)
    state = mine != 0 or (ours.tp, ours.dcp, ours.interleave if ours.dcp > 1 else 1) == (
        theirs.tp, theirs.dcp, theirs.interleave if theirs.dcp > 1 else 1,
    )  # fmt: skip
    seen = mine == other or (mine not in (None, 0) and (other is None or (other or 0) > (mine or 0)))
    whole = not mine or not other or p.block_size * theirs.dcp % (d.block_size * ours.dcp) == 0
    replicated = d.pcp > 1 and d.dcp == 1
    return one_model and sizes and turns and state and seen and whole and not replicated


def kept(shape: Shape) -> int | None:
    """Of layer 1: how many last tokens; None: all, 0: it is a state."""
    group: ShapeGroup = next(group for group in shape.every_group if 1 in group.layers)
    return 0 if group.kind == "state" else group.window


def needed(d: Shape, place: Place, tokens: int) -> int:
    """Bytes that a rank has of a prompt."""
    share = Share.of(d.side, place.tp)
    assert share is not None
    parts = 1 if d.packing == "latent" else 2
    row = share.heads.count * d.head_size * ITEM_SIZES[d.dtype] * parts
    total = 0
    for group in d.every_group:
        here = sum(d.stage(layer) == place.pp for layer in group.layers)
        total += here * (sum(group.state_bytes) if group.kind == "state" else row * tokens // d.dcp)
    return total


@FUZZ
@given(pair=shapes())
def test_a_pair_is_refused_exactly_where_it_cannot_be(pair: tuple[Shape, Shape]) -> None:
    p, d = pair
    turns = [side.block_size * side.dcp for side in pair]
    tokens = 2 * math.lcm(*turns)  # whole blocks and turns on both sides
    found = survey(d, peer_of(p), tokens)
    assert (not found.problems) is possible(p, d), (found.problems, p, d)
    assert all(one.field and one.hint for one in found.problems)
    event("works" if not found.problems else found.problems[0].field.split(" of ")[0])
    if found.problems:
        return
    read: Counter[Place] = Counter()
    told: Counter[Place] = Counter()
    for edge in found.edges:
        read[edge.reader] += edge.nbytes
        told[edge.source] += 1
    places = [Place(pp, tp) for pp in range(d.side.pp) for tp in range(d.side.tp)]
    assert {place: read[place] for place in places} == {place: needed(d, place, tokens) for place in places}
    assert told.keys() == {Place(pp, tp) for pp in range(p.side.pp) for tp in range(p.side.tp)}
    assert all(edge.readers == told[edge.source] for edge in found.edges)


def test_a_description_of_one_engine_is_one_pair_with_itself() -> None:
    shape = parse_shape({"layers": 3, "kv_heads": 2, "head_size": 16, "tp": 2}, "it")
    assert possible(shape, shape) and not survey(shape, peer_of(shape), 64).problems
    assert not possible(msgspec.structs.replace(shape, dtype="fp8"), shape)
