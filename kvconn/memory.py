"""Memory that others allocated, by its address, without a copy: in host memory for NumPy, on a GPU for torch.

Whoever asks keeps the memory alive for as long as the view is used.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconn.geometry import Region

__all__ = ["block_bytes", "device_block_bytes", "host_bytes"]


def host_bytes(address: int, length: int) -> npt.NDArray[np.uint8]:
    """``length`` bytes from ``address`` on."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))


def block_bytes(region: Region) -> npt.NDArray[np.uint8]:
    """A region in host memory, shape (blocks, bytes of a block)."""
    memory = host_bytes(region.base, region.span)
    return np.lib.stride_tricks.as_strided(memory, (region.count, region.length), (region.stride, 1))


def device_block_bytes(region: Region, device: Any) -> Any:
    """The same of a region in the memory of ``device``, a torch device; a torch tensor."""
    import torch  # only where there is a device

    return torch.as_tensor(_DeviceBytes(region), device=device)


class _DeviceBytes:
    """In the words of the CUDA array interface, version 3, which torch adopts."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.count, region.length),
            "strides": (region.stride, 1),
            "typestr": "|u1",
            "data": (region.base, False),
            "version": 3,
        }
