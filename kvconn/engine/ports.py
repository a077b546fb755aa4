"""Ports for side channels on this host.

Rules
1. A port that is only looked up can be taken before it is listened on. The kernel gives outgoing connections ports of
   its ephemeral range (UCX, gloo and ZMQ make many), so ours are drawn below that range, at random.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from kvconn.errors import ConfigError

__all__ = ["free_ports"]

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SPAN = 16384
_TRIES = 1000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """``count`` ports of ``host`` that nobody listened on a moment ago. Raises ConfigError when there are too few."""
    end = _ephemeral_start()
    drawn = random.SystemRandom().sample(range(max(1024, end - _SPAN), end), _TRIES)
    found: list[int] = []
    with ExitStack() as held:
        for port in drawn:
            probe = held.enter_context(socket.socket())
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"ports of {host}: expected {count} free ones among {_TRIES} tried, got {len(found)}")


def _ephemeral_start() -> int:
    try:
        return max(1024 + _TRIES, int(_RANGE.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 32768
