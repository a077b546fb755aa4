"""What a :class:`~kvconn.nixl.plan.Permute` does to blocks that have landed, on the device where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvconn.memory import block_bytes, device_block_bytes
from kvconn.nixl.plan import Permute

__all__ = ["permute_blocks", "put_in_order"]

#: blocks that are copied aside at once: an engine leaves little of a device's memory
AT_ONCE = 64


def put_in_order(permute: Permute, blocks: npt.NDArray[np.int64]) -> None:
    """Put these blocks of the permute's region in order, in memory."""
    for start in range(0, len(blocks), AT_ONCE):
        _put_in_order(permute, blocks[start : start + AT_ONCE])


def _put_in_order(permute: Permute, blocks: npt.NDArray[np.int64]) -> None:
    region = permute.region
    if region.mem_type == "DRAM":
        permute_blocks(block_bytes(region), blocks, permute)
        return
    import torch  # only where there is a device

    device = torch.device("cuda", region.device_id)
    permute_blocks(device_block_bytes(region, device), torch.as_tensor(blocks, device=device), permute)
    torch.cuda.current_stream(device).synchronize()  # whoever is told that they are there may read them


def permute_blocks(view: Any, blocks: npt.NDArray[Any] | Any, permute: Permute) -> None:
    """Put ``blocks`` of ``view`` in order, in place.

    ``view``: bytes of the permute's region, shape (blocks, bytes of a block), uint8; ``blocks``: their indices, of the
    same library as ``view`` and on its device.
    """
    landed = view[blocks]
    n = len(blocks)
    ordered = landed.reshape(n, permute.outer, permute.rows, permute.columns, permute.size).swapaxes(2, 3)
    view[blocks] = ordered.reshape(n, -1)
