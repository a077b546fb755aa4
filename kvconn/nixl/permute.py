"""What a :class:`~kvconn.nixl.plan.Permute` does to blocks that have landed, on the device where they are."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconn.geometry import Region
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
        permute_blocks(_host_bytes(region), blocks, permute)
        return
    import torch  # only where there is a device

    device = torch.device("cuda", region.device_id)
    view = torch.as_tensor(_DeviceBytes(region), device=device)
    permute_blocks(view, torch.as_tensor(blocks, device=device), permute)
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


def _host_bytes(region: Region) -> npt.NDArray[np.uint8]:
    """Shape (blocks, bytes of a block): the memory itself, no copy."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.span).from_address(region.base))
    return np.lib.stride_tricks.as_strided(memory, (region.count, region.length), (region.stride, 1))


class _DeviceBytes:
    """The same of device memory, in the words of the CUDA array interface."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.count, region.length),
            "strides": (region.stride, 1),
            "typestr": "|u1",
            "data": (region.base, False),
            "version": 3,
        }
