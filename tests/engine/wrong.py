"""Where a content-addressed cache is wrong: what a changed token alone does not tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvconn.engine.content import ContentAddressed, prefix_hashes
from kvconn.engine.scheduler import Scheduled

__all__ = ["first_wrong"]


def first_wrong(model: ContentAddressed, s: Scheduled, tokens: Sequence[int]) -> tuple[int, int, int] | None:
    """(layer, block id, position) of the first row that ``s`` sees here and that is not what ``tokens`` say, or of
    the first state, which stands at its last token."""
    hashes, portion = prefix_hashes(tokens), model._portion
    for layer, keeps_state in enumerate(portion.keeps_state):
        number, table = portion.first_layer + layer, s.tables[portion.groups[layer]]
        if keeps_state:
            slot = model._slot(s, layer)
            right = np.zeros_like(slot)
            model._joined(right, hashes, layer)
            if not np.array_equal(slot, right):
                return number, table[0], len(tokens) - 1
            continue
        context, positions = model._context(s, layer)
        expected = model._rows([hashes[position] for position in positions.tolist()], layer)
        bad = np.flatnonzero((context != expected).any(axis=(1, 2)))
        if bad.size:
            position = int(positions[int(bad[0])])
            return number, table[position // (model._size * portion.tokens.dcp)], position
    return None
