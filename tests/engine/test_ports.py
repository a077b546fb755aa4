"""Ports that stay free until they are listened on."""

from __future__ import annotations

import socket
from pathlib import Path

from kvconn.engine.ports import free_ports


def test_ports_are_distinct_free_and_below_what_the_kernel_gives_to_outgoing_connections() -> None:
    start = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(1024 <= port < start for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_port_in_use_is_not_given_out() -> None:
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert port not in free_ports(900)
