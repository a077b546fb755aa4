"""Two hosts on this one: network namespaces with a veth pair, and a forwarder of ours that delays and loses.

Rules
1. Everything made is removed, whatever happened; names carry this process's id.
2. Where the kernel or the user refuses, :func:`why_not` says why, once, and the tests are skipped with that.
3. Only tcp crosses (``UCX_TLS=tcp``): UCX may take two namespaces for one host (F5).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from types import TracebackType

__all__ = ["ENV", "Hosts", "why_not"]

ENV = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "veth0"}
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
    """Host ``a`` has the address ``10.77.0.1``, ``b`` ``10.77.0.2``; each its own ``veth0``."""

    def __init__(self) -> None:
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
        for side, name in self.names.items():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            assert side in self.addresses
        a, b = self.names.values()
        run("ip", "-n", a, "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", b)
        for side, name in self.names.items():
            run("ip", "-n", name, "addr", "add", f"{self.addresses[side]}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "up")

    def prefix(self, side: str) -> tuple[str, ...]:
        """What a command begins with to run there."""
        return "ip", "netns", "exec", self.names[side]

    def link(self, up: bool) -> None:
        """The cable between them."""
        run("ip", "-n", self.names["a"], "link", "set", "veth0", "up" if up else "down")

    def rate(self, rate: str | None) -> None:
        """Both directions at most so fast, as tc says it; None: as fast as they can."""
        for name in self.names.values():
            if rate is None:
                run("tc", "-n", name, "qdisc", "del", "dev", "veth0", "root")
            else:
                shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
                run("tc", "-n", name, "qdisc", "replace", "dev", "veth0", "root", *shape)

    def close(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=SECONDS, check=False)

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
