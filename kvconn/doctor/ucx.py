"""What UCX is told and what it has: UCX_TLS, UCX_NET_DEVICES, devices, and the tables it prints about its choices.

Rules
1. Nothing here loads UCX. Which choice UCX made is read from its own words (UCX_PROTO_INFO), printed by a child.
2. NIXL needs a transport that can set up connections and carry notifications: tcp, or RDMA with a device. Measured on
   nixl 1.5.1: with cma, shm, or ib without a device alone, an agent cannot be made (NIXL_ERR_BACKEND).
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from kvconn.doctor.findings import Finding, fail, ok, warn
from kvconn.transport.ucx import SEGMENT, receives_too_little

__all__ = ["Pick", "UcxFacts", "allows", "gather", "judge", "picks"]

_SM: Final = frozenset({"posix", "sysv", "xpmem", "cma", "knem"})
_IB: Final = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "srd", "gga_mlx5"})
_CUDA: Final = frozenset({"cuda_copy", "cuda_ipc", "gdr_copy"})
_ROCM: Final = frozenset({"rocm_copy", "rocm_ipc"})
#: what UCX lets one write for several.
ALIASES: Final[dict[str, frozenset[str]]] = {
    "sm": _SM, "shm": _SM, "mm": frozenset({"posix", "sysv", "xpmem"}),
    "ib": _IB, "rc": frozenset({"rc_verbs", "rc_mlx5"}), "rc_v": frozenset({"rc_verbs"}),
    "rc_x": frozenset({"rc_mlx5"}),
    "ud": frozenset({"ud_verbs", "ud_mlx5"}), "ud_v": frozenset({"ud_verbs"}), "ud_x": frozenset({"ud_mlx5"}),
    "dc": frozenset({"dc_mlx5"}), "dc_x": frozenset({"dc_mlx5"}), "gga": frozenset({"gga_mlx5"}),
    "cuda": _CUDA, "rocm": _ROCM, "loopback": frozenset({"self"}),
}  # fmt: skip
KNOWN: Final = _SM | _IB | _CUDA | _ROCM | {"tcp", "self", "ugni", "gaudi_gdr", "ze_copy", "ze_ipc", "ze_gdr"}


class UcxFacts(msgspec.Struct, frozen=True):
    """``tls``, ``devices`` and ``received``, a tcp segment's size, as set, None when not; ``interfaces``: names under
    /sys; ``rdma``: as ``mlx5_0:1``."""

    tls: str | None
    devices: str | None
    interfaces: tuple[str, ...]
    rdma: tuple[str, ...]
    received: str | None = None


class Pick(msgspec.Struct, frozen=True):
    """One row of UCX's table for reads. ``range`` in bytes as UCX writes it, ``wire`` e.g. ``cma/memory``."""

    memory: str
    range: str
    how: str
    wire: str


# --- the machine --------------------------------------------------------------------------------------------------


def gather(sys_class: Path = Path("/sys/class")) -> UcxFacts:
    return UcxFacts(
        tls=os.environ.get("UCX_TLS"),
        devices=os.environ.get("UCX_NET_DEVICES"),
        interfaces=tuple(sorted(path.name for path in _inside(sys_class / "net"))),
        rdma=tuple(
            sorted(
                f"{device.name}:{port.name}"
                for device in _inside(sys_class / "infiniband")
                for port in _inside(device / "ports")
            )
        ),
        received=os.environ.get("UCX_TCP_RX_SEG_SIZE"),
    )


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


# --- what it means ------------------------------------------------------------------------------------------------


def allows(tls: str | None, transport: str) -> bool:
    """Whether this UCX_TLS lets UCX use ``transport`` (a name of KNOWN)."""
    if tls is None or not tls.strip():
        return True
    negative, names = _split(tls)
    named = any(name == "all" or name == transport or transport in ALIASES.get(name, ()) for name in names)
    return named != negative


def _split(tls: str) -> tuple[bool, list[str]]:
    text = tls.strip()
    # "\rc" is UCX's way to say "exactly this name", ":aux" that it serves only to connect
    names = [name.strip().lstrip("\\").split(":")[0] for name in text.lstrip("^").split(",")]
    return text.startswith("^"), [name for name in names if name]


def judge(facts: UcxFacts, *, gpu: bool, cma: bool, remote: bool) -> list[Finding]:
    return [
        *_judge_tls(facts, gpu=gpu, cma=cma),
        *_judge_segments(facts),
        *_judge_devices(facts),
        *_judge_rdma(facts, remote),
    ]


def _judge_tls(facts: UcxFacts, *, gpu: bool, cma: bool) -> list[Finding]:
    tls = facts.tls
    if tls is None:
        return [ok("UCX_TLS is not set: UCX takes what it finds")]
    found = []
    strange = [name for name in _split(tls)[1] if name not in KNOWN and name not in ALIASES and name != "all"]
    for name in strange:
        close = difflib.get_close_matches(name, sorted({*KNOWN, *ALIASES}), n=1)
        hint = f"write {close[0]!r} if that is what you mean" if close else "take it out"
        title = f"UCX_TLS={tls} names {name!r}, no transport we know"
        found.append(warn(title, "UCX leaves it out without a word.", hint))
    rdma = bool(facts.rdma) and any(allows(tls, name) for name in _IB)
    if not allows(tls, "tcp") and not rdma:
        found.append(
            fail(
                f"UCX_TLS={tls} leaves no transport to connect with",
                "NIXL cannot make an agent (NIXL_ERR_BACKEND): cma and shared memory move bytes, but connections and "
                "notifications need tcp, or RDMA and a device.",
                "take tcp out of the exclusion, or unset UCX_TLS"
                if tls.startswith("^")
                else f"UCX_TLS={','.join([*(n for n in _split(tls)[1] if n not in strange), 'tcp'])}, or unset UCX_TLS",
            )
        )
    if facts.rdma and not rdma:
        found.append(
            warn(
                f"UCX_TLS={tls} leaves out RDMA, and there are devices: {_few(facts.rdma)}",
                "Reads between hosts go over tcp.",
                "add rc (or ib) to UCX_TLS, or unset it",
            )
        )
    if gpu and not any(allows(tls, name) for name in _CUDA):
        found.append(
            fail(
                f"UCX_TLS={tls} leaves out CUDA, and there is a GPU",
                "UCX takes device memory for host memory: registering KV in VRAM fails, or reading it does.",
                "add cuda to UCX_TLS, or unset it",
            )
        )
    if cma and not allows(tls, "cma"):
        found.append(
            warn(
                f"UCX_TLS={tls} leaves out CMA, which is allowed here",
                "Reads between two engines of this host go another way, usually tcp. Right if you mean it.",
                "add cma (or sm) to UCX_TLS, or unset it",
            )
        )
    return found or [ok(f"UCX_TLS={tls}")]


def _judge_segments(facts: UcxFacts) -> list[Finding]:
    if not receives_too_little(facts.received):
        return []
    return [
        warn(
            f"UCX_TCP_RX_SEG_SIZE={facts.received} is less than a producer of ours sends at once ({SEGMENT} bytes)",
            "UCX does not check what comes: a reader with it is ended by the first large answer over tcp.",
            "unset it, or set UCX_TCP_TX_SEG_SIZE to it on every producer",
        )
    ]


def _judge_devices(facts: UcxFacts) -> list[Finding]:
    if facts.devices is None or facts.devices.strip() in ("", "all"):
        return []
    text = facts.devices.strip()
    named = [name.strip() for name in text.lstrip("^").split(",") if name.strip()]
    there = {*facts.interfaces, *facts.rdma, *(name.split(":")[0] for name in facts.rdma)}
    missing = [name for name in named if name not in there]
    have = f"there are {_few((*facts.interfaces, *facts.rdma))}"
    if not missing:
        return [ok(f"UCX_NET_DEVICES={text}")]
    if text.startswith("^") or len(missing) < len(named):
        return [
            warn(
                f"UCX_NET_DEVICES={text}: no device {', '.join(missing)}; {have}",
                "UCX leaves it out without a word.",
                "correct the name; in a container the device may not be passed in",
            )
        ]
    return [
        fail(
            f"UCX_NET_DEVICES={text}: none of them exists; {have}",
            "NIXL cannot make an agent (NIXL_ERR_BACKEND).",
            "correct the name, pass the device into the container, or unset UCX_NET_DEVICES",
        )
    ]


def _judge_rdma(facts: UcxFacts, remote: bool) -> list[Finding]:
    if facts.rdma:
        return [ok(f"RDMA devices: {_few(facts.rdma)}")]
    if remote:
        return [
            warn(
                "no RDMA device",
                "KV between hosts goes over tcp, and both processors copy.",
                "if the host has a NIC: pass /dev/infiniband into the container (docker --device=/dev/infiniband)",
            )
        ]
    return [ok("no RDMA device: between hosts it would be tcp")]


def _few(names: tuple[str, ...], most: int = 8) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


# --- UCX's own words ----------------------------------------------------------------------------------------------

_TITLE: Final = re.compile(r"\|\s*remote memory read by ucp_get\*\S* into (.+?) from (.+?)\s*\|")
_ROW: Final = re.compile(r"\|\s*(\d\S*)\s*\|\s*(.+?)\s*\|\s*(.+?)\s*\|\s*$")


def picks(stderr: str) -> tuple[Pick, ...]:
    """What UCX chose for reads, from the tables that UCX_PROTO_INFO=y makes it print."""
    found: dict[Pick, None] = {}
    memory, ruled = "", 0
    for line in stderr.splitlines():
        title = _TITLE.search(line)
        if title is not None:
            memory, ruled = f"{title[1]} from {title[2]}", 0
        elif memory and "+--" in line:
            ruled += 1
            memory = memory if ruled < 3 else ""  # under the title, under the head, at the end
        elif memory and (row := _ROW.search(line)) is not None:
            found[Pick(memory, row[1], row[2], row[3])] = None
    return tuple(found)
