"""What hostile clients cost a side channel without a key: ``python -m tests.nixl.attack [--unguarded]`` prints it.

One client whose message has no end, then 2,000 connections that say nothing. Honest handshakes go on meanwhile.
``--unguarded``: connections are not looked at, as ZMQ alone would do it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import subprocess
import sys
import time

from kvconn.nixl.sideclient import HandshakeClient
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.trust import Trust
from tests.fuzz.live import GREETING, READY
from tests.nixl.test_sidechannel import port_of
from tests.support import wait_until

HOST, SECONDS, IDLE = "127.0.0.1", 5.0, 2000
#: bytes that the endless message may have in all: unguarded it would end this machine
MOST = 64 << 20


def attack(kind: str, port: int) -> None:
    """In a process of its own."""
    end = time.monotonic() + SECONDS
    if kind == "endless":
        sent = ends = 0
        while time.monotonic() < end and sent < MOST:
            with socket.create_connection((HOST, port), timeout=5) as raw, contextlib.suppress(OSError):
                raw.sendall(GREETING + READY)
                raw.recv(4096)
                while time.monotonic() < end and sent < MOST:
                    sent += raw.send(b"\x01\x00" * 4096)
            ends += 1
        print(f"{sent / 2**20:.0f} MiB sent over {ends} connections", flush=True)
    else:
        idle = [socket.create_connection((HOST, port), timeout=5) for _ in range(IDLE)]
        time.sleep(max(0.0, end - time.monotonic()))
        print(f"{len(idle)} connections made", flush=True)


def cost(server: HandshakeServer, kind: str) -> None:
    """Print what one attack costs and how long honest handshakes take meanwhile."""
    client, times = HandshakeClient(10.0, trust=Trust()), []
    rss, fds, most_rss, most_fds = _rss(), _fds(), 0, 0
    command = [sys.executable, "-m", "tests.nixl.attack", kind, str(port_of(server))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        while attacker.poll() is None:
            began = time.perf_counter()
            client.start(("P", HOST, port_of(server)))
            wait_until(lambda: any(result.payload for result in client.results()))
            times.append(time.perf_counter() - began)
            most_rss, most_fds = max(most_rss, _rss()), max(most_fds, _fds())
        said = (attacker.stdout.read() if attacker.stdout is not None else "").strip()
    print(f"{kind}: {said}; memory +{(most_rss - rss) >> 20} MiB, files +{most_fds - fds} at most,")
    times.sort()
    middle, last = statistics.median(times), times[-max(1, len(times) // 100)]
    print(f"  {len(times)} honest handshakes meanwhile, p50 {middle * 1e3:.1f} ms, p99 {last * 1e3:.1f} ms")
    client.close()


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def main(unguarded: bool) -> None:
    logging.getLogger("kvconn").setLevel(logging.CRITICAL)
    for kind in ("endless", "idle"):
        server = HandshakeServer(HOST, 0, {(0, 0): b"payload"}, Trust(rate=1e9))
        if unguarded:
            server._connections.accepted = lambda fd, now: ""  # type: ignore[method-assign]
        cost(server, kind)
        print(f"  then {server!r} {server._connections!r}")
        server.close()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        attack(sys.argv[1], int(sys.argv[2]))
    else:
        main("--unguarded" in sys.argv)
