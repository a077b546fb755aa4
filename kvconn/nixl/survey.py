"""Pure: a pair of engines -> who reads what of whom, for people to look at, or every field in the way.

Rules
1. It calls what a worker calls, for every rank of the reader, and reports what came out; it decides nothing.
2. Ranges are counted for one prompt whose blocks lie scattered, so that no two blocks are one range.
"""

from __future__ import annotations

import msgspec

from kvconn.base import BlockIds
from kvconn.errors import RequestError
from kvconn.geometry import Place, RankCache, Side, blocks_for
from kvconn.nixl.pairing import reads
from kvconn.nixl.plan import Plan, make_plan, missing
from kvconn.nixl.routes import Incompatible, Route, routes
from kvconn.nixl.shape import Shape, cache_of, metadata_of
from kvconn.nixl.wire import AgentMetadata

__all__ = ["Edge", "Peer", "Survey", "factors_of", "peer_of", "survey"]


class Peer(msgspec.Struct, frozen=True):
    """The producer: its sizes, what its ranks say, and the facts of its model in words."""

    side: Side
    ranks: dict[Place, AgentMetadata]
    factors: dict[str, str]


class Edge(msgspec.Struct, frozen=True):
    """One rank of the reader and one of the producer. ``nbytes`` and ``ranges`` of the one prompt; ``heads``: first and
    last, None where the rank is only told; ``permutes``: regions to be put in order on our side afterwards."""

    reader: Place
    source: Place
    heads: tuple[int, int] | None
    layers: int
    tokens: str
    nbytes: int
    ranges: int
    permutes: int
    readers: int


class Survey(msgspec.Struct, frozen=True):
    """``problems``: every field in the way; without any, the edges of all ranks for a prompt of ``tokens``."""

    problems: tuple[Incompatible, ...]
    edges: tuple[Edge, ...]
    tokens: int


def factors_of(shape: Shape) -> dict[str, str]:
    """What of the model must be equal, in the words of the side channel."""
    return {
        "kv dtype": shape.dtype,
        "kv heads": str(shape.heads),
        "head size": str(shape.head_size),
        "layers": str(shape.layers),
        "packing": shape.packing,
    }


def peer_of(shape: Shape) -> Peer:
    """The producer that a description describes."""
    side = shape.side
    places = [Place(pp, tp) for pp in range(side.pp) for tp in range(side.tp)]
    return Peer(side, {place: metadata_of(shape, place) for place in places}, factors_of(shape))


def survey(ours: Shape, theirs: Peer, tokens: int) -> Survey:
    """Plan every rank of ours against the peer and count what one prompt of ``tokens`` tokens would read."""
    mine = factors_of(ours)
    problems = [
        Incompatible(key, mine[key], theirs.factors[key], "the models differ, or their caches")
        for key in mine
        if key in theirs.factors and theirs.factors[key].removeprefix("torch.") != mine[key]
    ]
    if ours.pcp > 1 and ours.dcp == 1:
        hint = "one read can't fill all replicas: read with pcp 1, or share the tokens by dcp"
        problems.append(Incompatible("pcp size", f"{ours.pcp}, replicated", "any", hint))
    edges: list[Edge] = []
    for pp in range(ours.side.pp):
        for tp in range(ours.side.tp):
            found = _rank(ours, theirs, Place(pp, tp), tokens)
            if isinstance(found, Incompatible):
                if found.field not in {problem.field for problem in problems}:
                    problems.append(found)
            else:
                edges += found
    return Survey(tuple(problems), () if problems else tuple(edges), tokens)


def _rank(ours: Shape, theirs: Peer, place: Place, tokens: int) -> list[Edge] | Incompatible:
    found = routes(ours.side, theirs.side, place)
    if isinstance(found, Incompatible):
        return found
    cache = cache_of(ours, place)
    plans: list[Plan] = []
    edges: list[Edge] = []
    for route in found:
        said = theirs.ranks.get(route.source)
        if said is None:
            return Incompatible(
                "rank", "needed", f"pp {route.source.pp} tp {route.source.tp} is not there", "ask again"
            )
        plan = make_plan(cache, said, route)
        if isinstance(plan, Incompatible):
            return plan
        edge = _edge(ours, cache, said, route, plan, place, tokens)
        if isinstance(edge, Incompatible):
            return edge
        plans.append(plan)
        edges.append(edge)
    return missing(cache, plans) or edges


def _edge(
    ours: Shape, cache: RankCache, theirs: AgentMetadata, route: Route, plan: Plan, place: Place, tokens: int
) -> Edge | Incompatible:
    span = theirs.block_size * theirs.physical_blocks_per_logical_kv_block * theirs.dcp_size
    groups = max((lane.remote_group for lane in plan.lanes), default=0) + 1
    local = _scattered(len(cache.groups), blocks_for(tokens, ours.block_size * ours.dcp))
    remote = _scattered(groups, blocks_for(tokens, span))
    free = msgspec.structs.replace(plan, lanes=tuple(msgspec.structs.replace(x, pool=1 << 40) for x in plan.lanes))
    try:
        posted = reads(free, local, remote, (0,) * len(cache.groups), tokens=tokens, held=tokens)
    except RequestError as err:
        return Incompatible("prompt", f"{tokens} tokens", "fewer", str(err))
    heads = (route.first, route.first + route.count - 1) if plan.lanes else None
    common = {region.name for region in cache.regions} & set(theirs.region_names or ())
    nbytes, ranges = sum(one.nbytes for one in posted), sum(len(one.local) for one in posted)
    return Edge(
        place, route.source, heads, len(common) if heads else 0, _tokens(route), nbytes, ranges, len(plan.permutes),
        plan.readers,
    )  # fmt: skip


def _scattered(groups: int, n: int) -> BlockIds:
    """Block lists of which no two ids are neighbours."""
    return (tuple(range(0, 2 * n, 2)),) * groups


def _tokens(route: Route) -> str:
    """Which tokens of the prompt, in words."""
    share = route.theirs.tokens
    return "all" if share.dcp == 1 else f"{share.rank + 1}/{share.dcp} by {share.interleave}"
