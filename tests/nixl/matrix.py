"""The pairs that are promised: each row of docs/compatibility.md with the pairs of engines that prove it.

``tests/nixl/test_matrix.py`` runs every pair by the token-position model and over real NIXL; ``tools/compatibility.py``
writes the page. What stock vLLM 0.32.0 does is by reading its NIXL connector, pull mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.nixl.geometries import Engine, Group, other

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """``pairs``: (P, D). ``stock``: what vLLM 0.32.0's own connector does with such a pair. ``engine``: the pairs of
    tests/engine/test_transfer.py that belong here. ``vllm``: what ran between real vLLM engines, in words, and the test
    of tests/vllm that did it, as ``module::name``."""

    what: str
    stock: str
    pairs: tuple[tuple[Engine, Engine], ...]
    engine: tuple[str, ...] = ()
    vllm: tuple[tuple[str, str], ...] = ()


GQA = Engine(heads=8)
FEW = Engine(heads=2)
MLA = Engine(kv="latent")
STATE = other(GQA, groups=(Group((0, 2)), Group((1, 3), "state")))
FULL_AND_WINDOW = (Group((0, 2)), Group((1, 3), "window", 5))
DCP = other(MLA, tp=2, dcp=2), other(FEW, tp=8, dcp=2)


def _tp(model: Engine, *sizes: tuple[int, int]) -> tuple[tuple[Engine, Engine], ...]:
    return tuple((other(model, tp=p), other(model, tp=d)) for p, d in sizes)


def _both(model: Engine, **changes: object) -> tuple[tuple[Engine, Engine], ...]:
    """The change on P alone and on D alone."""
    return (other(model, **changes), model), (model, other(model, **changes))


ROWS = (
    Row(
        "equal sizes",
        "yes",
        ((GQA, GQA), (MLA, MLA), *_tp(GQA, (4, 4))),
        ("tp 2 to 2",),
        vllm=(("tp 2 to 2", "test_tp::test_two_to_two"),),
    ),
    Row(
        "TP, D larger",
        "yes",
        _tp(GQA, (1, 2), (1, 8), (2, 4), (4, 8)),
        ("tp 1 to 2",),
        (("tp 1 to 2", "test_tp::test_one_to_two"),),
    ),
    Row(
        "TP, P larger",
        "yes",
        _tp(GQA, (2, 1), (8, 1), (4, 2)),
        ("tp 2 to 1",),
        (("tp 2 to 1", "test_tp::test_two_to_one"),),
    ),
    Row(
        "TP above the KV heads (copies: one is read, all are told)",
        "D larger only",
        _tp(FEW, (1, 8), (8, 1), (4, 8), (16, 2), (16, 16)),
        ("tp 2 to 4, copies of heads",),
    ),
    Row(
        "latent cache (MLA) at unequal TP, read once",
        "yes",
        _tp(MLA, (1, 4), (4, 1), (2, 8)),
        ("latent, tp 2 to 1", "latent, tp 1 to 2"),
    ),
    Row(
        "PP on P",
        "no (push mode only)",
        ((other(GQA, pp=2), GQA), (other(MLA, pp=2), MLA)),
        ("pp 2 to 1",),
        (("pp 2 to 1", "test_pp::test_two_stages_to_one"),),
    ),
    Row(
        "PP on D, or on both",
        "no",
        ((GQA, other(GQA, pp=2)), (other(GQA, pp=2, tp=2), other(GQA, pp=2, tp=4))),
        ("pp 1 to 2", "transformer, tp 2 to pp 2"),
        (("pp 1 to 2", "test_pp::test_one_stage_to_two"), ("pp 2 to 2", "test_pp::test_two_stages_to_two")),
    ),
    Row(
        "DCP, equal on both sides",
        "latent, DCP equal to TP",
        tuple(
            (other(e, interleave=i),) * 2 for e in (other(MLA, tp=2, dcp=2), other(FEW, tp=8, dcp=2)) for i in (1, 4)
        ),
        ("dcp 2 to 2",),
    ),
    Row(
        "DCP on one side, or sizes that divide",
        "latent, DCP 1 or equal to TP",
        (
            *_both(MLA, tp=2, dcp=2),
            *_both(MLA, tp=4, dcp=4, interleave=4),
            (other(MLA, tp=2, dcp=2, interleave=4), other(MLA, tp=4, dcp=4, interleave=4)),
            (other(FEW, tp=4, dcp=2), other(FEW, tp=8, dcp=4)),
        ),
        ("dcp 1 to 2",),
    ),
    Row(
        "DCP with different interleave",
        "no",
        ((other(MLA, tp=2, dcp=2, interleave=1), other(MLA, tp=2, dcp=2, interleave=4)),),
        ("dcp 2 to 2, in turns of 1 and of 4",),
    ),
    Row(
        "PCP sharded by DCP on P (its ranks are transfer ranks)",
        "latent, DCP equal to PCP",
        (
            (other(MLA, tp=2, dcp=2, interleave=4, pcp="sharded"), MLA),
            (other(MLA, tp=4, dcp=4, pcp="sharded"), other(MLA, tp=2)),
        ),
        ("pcp 2 dcp 2 to 1",),
    ),
    Row(
        "PCP replicated on P (the first replica is read, the others let go at once)",
        "alone; below MultiConnector, beside one that holds, nothing is freed",
        (
            (other(GQA, replicas=2), GQA),
            (other(GQA, replicas=3, tp=2), other(GQA, tp=4)),
            (other(MLA, replicas=2, pp=2), MLA),
        ),
        ("pcp 2 to 1", "transformer with state, pcp 2 to 1"),
        (("MLA, pcp 2 to 1", "test_pcp::test_ours_frees_each_request_when_it_was_read[alone]"),),
    ),
    Row(
        "blocks smaller on P",
        "yes, where P's TP is not larger",
        ((other(GQA, block=2), GQA), (other(MLA, block=2, tp=2), MLA)),
        ("blocks 16 to 32",),
        (("MLA, blocks 16 to 32", "test_shapes::test_mla[16-32]"),),
    ),
    Row(
        "blocks larger on P",
        "no",
        ((other(GQA, block=8), GQA), (other(MLA, block=8), other(MLA, tp=2))),
        ("blocks 32 to 16",),
        (("MLA, blocks 32 to 16", "test_shapes::test_mla[32-16]"),),
    ),
    Row("kernel blocks smaller than blocks", "yes", (*_both(GQA, kernel=2), (other(MLA, block=8, kernel=4), MLA))),
    Row(
        "tokens before heads in a block, on one side",
        "P heads first, D tokens first, by enable_permute_local_kv",
        (*_both(GQA, first="tokens"), (other(GQA, first="tokens", tp=4), other(GQA, tp=2))),
    ),
    Row("tokens before heads on both sides", "equal TP", ((other(GQA, first="tokens"),) * 2,)),
    Row(
        "block-first pools (BLHNC, BHLNC), on one side or both",
        "both sides alike",
        (
            *_both(GQA, pool="blocks"),
            *_both(GQA, pool="heads"),
            (other(GQA, pool="blocks", tp=2), other(GQA, pool="heads", tp=4)),
        ),
        (),
        tuple(
            (f"MLA, {of_p} to {of_d}", f"test_shapes::test_pools_that_are_block_first[{of_p}-{of_d}]")
            for of_p, of_d in (("BLHNC", "BLHNC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC"))
        ),
    ),
    Row(
        "K and V in one row, in halves of a block, in tensors of their own",
        "one row is all there is",
        (*_both(GQA, kv="apart"), *_both(GQA, kv="block"), (other(GQA, kv="apart", tp=2), other(GQA, kv="block"))),
    ),
    Row(
        "gaps between blocks, other pool sizes",
        "yes",
        (*_both(GQA, gap=24), *_both(GQA, blocks=9)),
        ("pools of 20 and 40 blocks",),
    ),
    Row(
        "full and sliding-window attention (only the window travels), D's blocks divide P's",
        "yes",
        (
            (other(GQA, groups=FULL_AND_WINDOW),) * 2,
            (other(GQA, groups=FULL_AND_WINDOW, tp=2, block=8), other(GQA, groups=FULL_AND_WINDOW, pp=2)),
        ),
        ("window, tp 1 to 2", "window, pp 2 to 1, blocks 16 to 8"),
        (
            ("windows alone", "test_windows::test_only_the_window_travels[window]"),
            ("windows beside full attention", "test_windows::test_only_the_window_travels[mixed]"),
        ),
    ),
    Row(
        "state (one slot of two tensors per layer, as Mamba's) beside attention, equal TP",
        "yes",
        (
            (STATE,) * 2,
            (other(STATE, tp=2),) * 2,
            (other(STATE, kernel=2, pp=2), other(STATE, kernel=2)),
            (other(STATE, block=8), STATE),
        ),
        ("state", "state, tp 2 to 2", "state, pp 2 to 1, blocks 16 to 8"),
    ),
)
