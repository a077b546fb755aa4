"""Pure: which of a request's blocks a producer holds and a consumer fills, by the kind of their cache group.

Rules
1. An engine's list of a group begins with the prompt's first block; ``NO_BLOCK`` stands where there is none any more.
2. Of a window only the blocks are held and filled in which the next token can still see something; of state the one
   slot. For readers that count on more blocks of a window the first one is named again: nobody needs what is before it.
3. A state is that of exactly the tokens that were computed: who reads it goes on there, with a token of the prompt left
   to compute. A reader of fewer tokens, or of all of the prompt, would let tokens join it twice.
Counts in tokens of the prompt; ``size`` is a block id's, over all ranks that share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvconn.base import NO_BLOCK, GroupView
from kvconn.errors import RequestError
from kvconn.geometry import blocks_for

__all__ = ["blocks_held", "blocks_to_fill", "check_state", "reach"]


def reach(group: GroupView) -> int | None:
    """Of how many last tokens its blocks are kept; None: of all, 0: of none, it is a state."""
    return 0 if group.kind == "state" else group.window


def check_state(groups: Sequence[GroupView], held: int, prompt: int) -> None:
    """Raise RequestError where a state that stands after ``held`` tokens is of no use to a prompt of ``prompt``."""
    if held >= prompt and any(group.kind == "state" for group in groups):
        expected = f"below the prompt's {prompt}: a state that stands behind its last token can't be taken back"
        raise RequestError("kv_transfer_params.remote_num_tokens", expected, held)


def blocks_held(group: GroupView, ids: Sequence[int], tokens: int, size: int) -> tuple[int, ...]:
    """The blocks that a reader of the first ``tokens`` tokens needs, as a reference names them."""
    if group.kind == "state":
        return tuple(ids[-1:])
    count = blocks_for(tokens, size)
    held = tuple(ids[_first(group, tokens, size) : count])
    return held[:1] * (min(group.named, count) - len(held)) + held


def blocks_to_fill(group: GroupView, ids: Sequence[int], hit: int, tokens: int, size: int) -> tuple[int, ...]:
    """From block number ``hit`` on, so that afterwards the first ``tokens`` tokens stand as far as they are needed."""
    if group.kind == "state":
        return tuple(ids[-1:])
    first = _first(group, tokens, size)
    wanted = enumerate(ids[hit : blocks_for(tokens, size)], hit)
    return tuple(block if number >= first else NO_BLOCK for number, block in wanted)


def _first(group: GroupView, tokens: int, size: int) -> int:
    """The first block that is needed. The last token may be computed again, and sees a whole window before itself."""
    return max(0, tokens - group.window) // size if group.window is not None else 0
