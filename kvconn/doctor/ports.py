"""The side channel's address: does the host name lead here, is every port free, would a peer on another host get here?

Rules
1. One port per data-parallel replica, from the base up, as vLLM counts them.
2. A name is resolved once, with a deadline; a port is tried by listening on it for an instant.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from pathlib import Path
from typing import Final

import msgspec

from kvconn.config import side_channel_address
from kvconn.doctor.findings import Finding, fail, ok, warn
from kvconn.errors import ConfigError

__all__ = ["PortFacts", "Tried", "gather", "judge"]

RESOLVE_LIMIT: Final = 10.0
VARIABLES: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST / VLLM_NIXL_SIDE_CHANNEL_PORT"


class Tried(msgspec.Struct, frozen=True):
    """One port. ``error``: an errno's name, empty when it could be listened on; ``owner``: who has it, when known."""

    port: int
    error: str = ""
    owner: str = ""


class PortFacts(msgspec.Struct, frozen=True):
    """``source``: who said host and port. ``addresses`` of the host; ``trouble`` when there is none to try."""

    host: str
    source: str
    addresses: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()
    ephemeral: tuple[int, int] = (32768, 60999)
    trouble: str = ""


# --- the machine --------------------------------------------------------------------------------------------------


def gather(host: str | None, port: int | None, replicas: int) -> PortFacts:
    try:
        told_host, told_port = side_channel_address()
    except ConfigError as err:
        if port is None:
            return PortFacts(host or "", VARIABLES, trouble="; ".join(err.problems))
        told_host, told_port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"), port
    source = "--host" if host else "VLLM_NIXL_SIDE_CHANNEL_HOST"
    if not host and "VLLM_NIXL_SIDE_CHANNEL_HOST" not in os.environ:
        source = "default"
    name, base = host or told_host, port or told_port
    last = base + replicas - 1
    if last > 65535:
        return PortFacts(name, source, trouble=f"{replicas} replicas from port {base} need ports up to {last}")
    addresses = _resolve("0.0.0.0" if name == "*" else name)
    if not addresses:
        return PortFacts(name, source, trouble=f"the name {name!r} leads to no address")
    tried = tuple(_try(addresses[0], number) for number in range(base, last + 1))
    return PortFacts(name, source, addresses, tried, _ephemeral())


def _resolve(name: str) -> tuple[str, ...]:
    """Its addresses, IPv4 first. The resolver has no deadline of its own, so it gets a thread that may be left."""
    found: list[str] = []

    def ask() -> None:
        try:
            rows = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found.extend(dict.fromkeys(str(row[4][0]) for row in sorted(rows, key=lambda row: row[0] != socket.AF_INET)))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESOLVE_LIMIT)
    return tuple(found)


def _try(address: str, port: int) -> Tried:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZMQ does: a port at rest is free
            probe.bind((address, port))
            probe.listen(1)
    except OSError as err:
        name = errno.errorcode.get(err.errno or 0, str(err))
        return Tried(port, name, _owner(port) if name == "EADDRINUSE" else "")
    return Tried(port)


def _owner(port: int) -> str:
    """Process that listens on it, as far as /proc lets us see."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for cells in (row.split() for row in rows):
            if cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    for folder in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(os.readlink(fd) in inodes for fd in (folder / "fd").iterdir()):
                return f"process {folder.name} ({(folder / 'comm').read_text().strip()})"
        except OSError:
            continue  # it ended, or is somebody else's
    return ""


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32768, 60999


# --- what it means ------------------------------------------------------------------------------------------------


def judge(facts: PortFacts, *, remote: bool) -> list[Finding]:
    if facts.trouble:
        how = f"set {VARIABLES} (or --host, --port)"
        return [fail(f"side channel: {facts.trouble}", "The engine's connector cannot start.", how)]
    return [*_judge_host(facts, remote), *(_judge_port(facts, tried) for tried in facts.tried)]


def _judge_host(facts: PortFacts, remote: bool) -> list[Finding]:
    address = ipaddress.ip_address(facts.addresses[0])
    name = f"side channel host {facts.host}"
    where = f"{name} ({facts.addresses[0]})" if facts.host != facts.addresses[0] else name
    how = "set VLLM_NIXL_SIDE_CHANNEL_HOST to the address at which the other host reaches this one"
    if address.is_unspecified:
        means = "This address is also what P's clients are told: a D on another host would dial itself."
        return [(fail if remote else warn)(f"{where} is every address", means, how)]
    if address.is_loopback and remote:
        set_by = "nothing sets VLLM_NIXL_SIDE_CHANNEL_HOST" if facts.source == "default" else f"from {facts.source}"
        return [
            fail(
                f"{where} is loopback ({set_by})",
                "P tells its clients this address: a D on another host would ask its own loopback for P's metadata.",
                how,
            )
        ]
    if address.is_loopback:
        return [ok(f"{where} is loopback: for P and D on one host (--remote if they are not)")]
    return [ok(where)]


def _judge_port(facts: PortFacts, tried: Tried) -> Finding:
    where = f"side channel port {tried.port} on {facts.host}"
    low, high = facts.ephemeral
    if tried.error == "EADDRINUSE":
        return fail(
            f"{where} is taken{f' by {tried.owner}' if tried.owner else ''}",
            "The engine's connector cannot listen and the engine does not start. Each engine of a host needs its own "
            "port, and each data-parallel replica the next one.",
            "VLLM_NIXL_SIDE_CHANNEL_PORT, a different one on P and on D",
        )
    if tried.error == "EADDRNOTAVAIL":
        return fail(
            f"{facts.host} is no address of this machine",
            f"The connector cannot listen on port {tried.port} of it. In a container only the container's own "
            "addresses exist.",
            "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this machine or container (docker --network=host)",
        )
    if tried.error:
        return fail(
            f"{where} cannot be listened on: {tried.error}",
            "The engine's connector cannot start.",
            "another VLLM_NIXL_SIDE_CHANNEL_PORT; below 1024 needs a privilege",
        )
    if low <= tried.port <= high:
        return warn(
            f"{where} is free, and in the range {low} to {high} that outgoing connections are given",
            "Somebody's connection can have it when the engine starts.",
            f"VLLM_NIXL_SIDE_CHANNEL_PORT below {low}",
        )
    return ok(f"{where} is free")
