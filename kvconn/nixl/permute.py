"""What a :class:`~kvconn.nixl.plan.Permute` does to blocks that have landed. Works on NumPy arrays and torch tensors,
so that it runs on the device where the blocks are.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from kvconn.nixl.plan import Permute

__all__ = ["permute_blocks"]


def permute_blocks(view: Any, blocks: npt.NDArray[Any] | Any, permute: Permute) -> None:
    """Put ``blocks`` of ``view`` in order, in place.

    ``view``: bytes of the permute's region, shape (blocks, bytes of a block), uint8; ``blocks``: their indices, of the
    same library as ``view`` and on its device.
    """
    landed = view[blocks]
    n = len(blocks)
    ordered = landed.reshape(n, permute.outer, permute.rows, permute.columns, permute.size).swapaxes(2, 3)
    view[blocks] = ordered.reshape(n, -1)
