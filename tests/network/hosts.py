"""Two hosts on this one: network namespaces with a veth pair, or with a cable of ours that delays and loses.

Rules
1. Everything made is removed, whatever happened; names carry this process's id.
2. Where the kernel or the user refuses, :func:`why_not` says why, once, and the tests are skipped with that.
3. Only tcp crosses (``UCX_TLS=tcp``): UCX may take two namespaces for one host (F5).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from types import TracebackType

__all__ = ["ENV", "Hosts", "why_not"]

ENV = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wire0"}
SECONDS = 20.0


def run(*command: str) -> str:
    """Run it. AssertionError with its own words when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
    return done.stdout


@cache
def why_not() -> str:
    """Why there can be no two hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (iproute2)"
    try:
        with Hosts():
            return ""
    except (AssertionError, OSError, subprocess.TimeoutExpired) as err:
        return f"no network namespaces here: {err}"


class Hosts:
    """Host ``a`` has the address ``10.77.0.1``, ``b`` ``10.77.0.2``; each its own ``wire0``.

    ``delay`` in seconds and ``loss`` as a share: the cable is a forwarder of ours, else a veth pair.
    """

    def __init__(self, delay: float = 0.0, loss: float = 0.0) -> None:
        self._cable = (delay, loss) if delay or loss else None
        self._forwarder: subprocess.Popen[str] | None = None
        self.carried = (0, 0)
        self._tag = f"kv{os.getpid()}"
        self.names = {side: f"{self._tag}{side}" for side in "ab"}
        self.addresses = {"a": "10.77.0.1", "b": "10.77.0.2"}

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def _make(self) -> None:
        for name in self.names.values():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        a, b = self.names.values()
        if self._cable is None:
            run("ip", "-n", a, "link", "add", "wire0", "type", "veth", "peer", "name", "wire0", "netns", b)
        else:
            for name in (a, b):
                run("ip", "-n", name, "tuntap", "add", "dev", "wire0", "mode", "tun")
            self._forward(a, b, *self._cable)
        for side, name in self.names.items():
            run("ip", "-n", name, "addr", "add", f"{self.addresses[side]}/24", "dev", "wire0")
            run("ip", "-n", name, "link", "set", "wire0", "up")

    def _forward(self, a: str, b: str, delay: float, loss: float) -> None:
        command = [sys.executable, "-m", "tests.network.forwarder", a, b, "wire0", str(delay), str(loss), "1"]
        self._forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._forwarder.stdout is not None and self._forwarder.stdout.readline() == "ready\n"

    def unplug(self) -> tuple[int, int]:
        """End the forwarder. Returns packets carried and lost."""
        if self._forwarder is not None:
            told, _ = self._forwarder.communicate(timeout=SECONDS)
            carried, lost = map(int, told.split())
            self._forwarder, self.carried = None, (carried, lost)
        return self.carried

    def prefix(self, side: str) -> tuple[str, ...]:
        """What a command begins with to run there."""
        return "ip", "netns", "exec", self.names[side]

    def link(self, up: bool) -> None:
        """The cable between them."""
        run("ip", "-n", self.names["a"], "link", "set", "wire0", "up" if up else "down")

    def rate(self, rate: str | None) -> None:
        """Both directions at most so fast, as tc says it; None: as fast as they can."""
        for name in self.names.values():
            if rate is None:
                run("tc", "-n", name, "qdisc", "del", "dev", "wire0", "root")
            else:
                shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
                run("tc", "-n", name, "qdisc", "replace", "dev", "wire0", "root", *shape)

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.kill()
            self._forwarder.communicate()
            self._forwarder = None
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=SECONDS, check=False)

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
