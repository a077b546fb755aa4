"""GPUs, through torch, in a child: a broken driver may hang whoever asks.

Written against torch's interface; no GPU was at hand to run it on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from kvconn.doctor.children import Ending, begin, decoded, explain, run_child, say_result
from kvconn.doctor.findings import Finding, fail, ok, warn

__all__ = ["Gpu", "GpuFacts", "child", "gather", "judge"]

LIMIT: Final = 60.0
GIB: Final = 1 << 30


class Gpu(msgspec.Struct, frozen=True):
    name: str
    memory: int


class GpuFacts(msgspec.Struct, frozen=True):
    """``cuda``: the version torch was built for, None for a CPU torch. ``peers``: pairs that can read each other."""

    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    no_access: tuple[tuple[int, int], ...] = ()
    nodes: int = 0
    trouble: str = ""


def gather() -> GpuFacts:
    return facts_of(run_child(["gpu"], LIMIT))


def facts_of(ending: Ending) -> GpuFacts:
    found = decoded(ending, GpuFacts)
    return found if found is not None else GpuFacts(trouble=explain(ending))


def child() -> None:
    """In the child: ask torch."""
    import torch

    begin("cuda")
    cuda: Any = torch.cuda
    count = cuda.device_count() if cuda.is_available() else 0
    gpus = [cuda.get_device_properties(index) for index in range(count)]
    say_result(
        GpuFacts(
            cuda=torch.version.cuda,
            gpus=tuple(Gpu(gpu.name, gpu.total_memory) for gpu in gpus),
            no_access=tuple(
                (a, b) for a in range(count) for b in range(count) if a != b and not cuda.can_device_access_peer(a, b)
            ),
            nodes=_nodes(),
        )
    )


def _nodes() -> int:
    """Device files of NVIDIA GPUs that are visible here."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def judge(facts: GpuFacts, wheels: frozenset[str]) -> list[Finding]:
    """``wheels``: the installed ones of nixl-cu12 and nixl-cu13."""
    if facts.trouble:
        return [
            fail(
                "torch cannot be asked for GPUs",
                f"What happened to the child that asked it: {facts.trouble}",
                "make `python -c 'import torch; print(torch.cuda.device_count())'` work",
            )
        ]
    if not facts.gpus and facts.nodes:
        return [
            warn(
                f"{facts.nodes} NVIDIA device files, but torch sees no GPU",
                f"This torch is built for {'CUDA ' + facts.cuda if facts.cuda else 'CPUs only'}; KV stays in host "
                "memory.",
                "install a torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES",
            )
        ]
    if not facts.gpus:
        return [ok("no GPU: KV in host memory; VRAM and peer access were not looked at")]
    names = ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in facts.gpus)
    found = [ok(f"{len(facts.gpus)} GPU: {names}, torch for CUDA {facts.cuda}")]
    wheel = f"nixl-cu{(facts.cuda or '0').split('.')[0]}"
    if facts.cuda and wheel not in wheels:
        found.append(
            fail(
                f"torch is built for CUDA {facts.cuda}, {wheel} is not installed",
                "nixl loads the wheel of the CUDA version it finds and refuses to be imported without it.",
                f"pip install {wheel}",
            )
        )
    if facts.no_access:
        pairs = ", ".join(f"{a} to {b}" for a, b in facts.no_access[:8])
        found.append(
            warn(
                f"no peer access between GPUs: {pairs}{' ...' if len(facts.no_access) > 8 else ''}",
                "KV between these goes through host memory or a NIC.",
                "put P and D on GPUs joined by NVLink or under one PCIe switch; ACS and IOMMU settings can forbid it",
            )
        )
    return found
