"""A cable of ours between two network namespaces: it delays every packet and loses some.

Where the kernel has no netem. Each end is a tun device; IP packets are read from one and written to the other. Run with
``python -m tests.network.forwarder NAMESPACE NAMESPACE DEVICE DELAY LOSS SEED``; it says "ready", and at the end of its
input how many packets it carried and lost.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LARGEST = 1 << 16


def end(namespace: str, device: str) -> int:
    """The file behind ``device`` in ``namespace``; this process is in there afterwards."""
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def carry(ends: tuple[int, int], delay: float, loss: float, rng: random.Random) -> tuple[int, int]:
    """Until the input ends. Returns packets carried and lost."""
    on_the_way: list[tuple[float, int, int, bytes]] = []
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    carried = lost = 0
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        ready, _, _ = select.select([*ends, 0], [], [], wait)
        if 0 in ready:
            return carried, lost
        for one in ready:
            packet = os.read(one, LARGEST)
            if rng.random() < loss:
                lost += 1
            else:
                carried += 1
                heapq.heappush(on_the_way, (time.monotonic() + delay, carried, other[one], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(on_the_way)
            os.write(to, packet)


if __name__ == "__main__":
    first, second, device, delay, loss, seed = sys.argv[1:]
    both = end(first, device), end(second, device)
    print("ready", flush=True)
    print(*carry(both, float(delay), float(loss), random.Random(int(seed))), flush=True)
