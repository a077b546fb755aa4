"""What is read, as rows of numbers: checked and joined. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvconn.errors import TransportError
from kvconn.transport.base import Descs

__all__ = ["Spans", "check", "joined"]


def check(remote: Descs, local: Descs) -> int:
    """Raise TransportError unless they pair; returns their bytes.

    They are checked here because NIXL does not: it copies the local length from wherever the remote address points.
    """
    for side, descs in (("local", local), ("remote", remote)):
        if descs.ndim != 2 or descs.shape[1] != 2 or not len(descs) or descs.dtype != np.int64:
            raise TransportError(
                f"post_read: expected {side} as a non-empty int64 array of shape (n, 2), got {descs.dtype} of shape "
                f"{descs.shape}; a fault of ours"
            )
        if descs[:, 0].min() <= 0:  # NIXL lets one pass whose end wraps to zero, and writes there
            raise TransportError(f"post_read: {side} address {int(descs[:, 0].min())}; a fault of ours")
    lengths = local[:, 1]
    if len(local) != len(remote) or (lengths != remote[:, 1]).any():
        raise TransportError(
            f"post_read: {len(local)} local parts of {int(lengths.sum())} bytes do not pair with {len(remote)} "
            f"remote parts of {int(remote[:, 1].sum())} bytes; a fault of ours"
        )
    if lengths.min() <= 0:
        raise TransportError(f"post_read: a part of {int(lengths.min())} bytes; a fault of ours")
    return int(lengths.sum())


def joined(remote: Descs, local: Descs, remote_device: int, local_device: int) -> tuple[Descs, Descs]:
    """Both sides as NIXL wants them, ``(address, length, device)``, with adjacent parts merged."""
    lengths = local[:, 1]
    if len(local) > 1:
        starts = np.ones(len(local), np.bool_)
        starts[1:] = (local[1:, 0] != local[:-1, 0] + lengths[:-1]) | (remote[1:, 0] != remote[:-1, 0] + lengths[:-1])
        first = starts.nonzero()[0]
        local, remote, lengths = local[first], remote[first], np.add.reduceat(lengths, first)
    return _rows(remote, lengths, remote_device), _rows(local, lengths, local_device)


def _rows(descs: Descs, lengths: npt.NDArray[np.int64], device: int) -> Descs:
    rows = np.empty((len(descs), 3), np.int64)
    rows[:, 0] = descs[:, 0]
    rows[:, 1] = lengths
    rows[:, 2] = device
    return rows


class Spans:
    """Registered memory of this process, by its first and last addresses."""

    def __init__(self) -> None:
        self._bounds: Descs = np.empty((0, 2), np.int64)

    def add(self, rows: Descs) -> None:
        """Memory: rows that begin with address and length."""
        ends = rows[:, 0] + rows[:, 1]
        bounds = np.concatenate([self._bounds, np.stack([rows[:, 0], ends], axis=1)])
        self._bounds = bounds[np.argsort(bounds[:, 0], kind="stable")]

    def hold(self, rows: Descs) -> bool:
        """Whether each of these lies in one piece of it."""
        at = np.searchsorted(self._bounds[:, 0], rows[:, 0], side="right") - 1
        return bool((at >= 0).all() and (rows[:, 0] + rows[:, 1] <= self._bounds[at, 1]).all())
