"""The examination: every probe in its order, none of which can end it.

Rules
1. A probe that raises is a finding that says so; the others go on.
2. What would only repeat a failure is left out: without an agent there is nothing to measure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvconn.doctor import agent, disk, gpu, host, pair, ports, settings, ucx
from kvconn.doctor.findings import Finding, Report, fail, ok

__all__ = ["Options", "examine"]

F = TypeVar("F", bound=msgspec.Struct)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to look at. ``remote``: P and D will be on two hosts. ``config``: a kv_transfer_config's JSON."""

    host: str | None = None
    port: int | None = None
    replicas: int = 1
    remote: bool = False
    config: str | None = None
    directory: Path | None = None
    measure: bool = True


class _Notes:
    """Findings and facts as they come."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self.findings: dict[str, list[Finding]] = {}
        self.facts: dict[str, msgspec.Struct] = {}

    def probe(self, area: str, what: str, gather: Callable[[], F], judge: Callable[[F], list[Finding]]) -> F | None:
        """Gather, judge, note; None when the probe itself broke."""
        self._tell(what)
        findings = self.findings.setdefault(area, [])
        try:
            facts = gather()
            self.facts[what] = facts
            findings += judge(facts)
        except Exception as err:  # noqa: BLE001 - a probe meets anything; one that breaks must not take the others along
            broken = f"{what}: the probe itself failed: {type(err).__name__}: {err}"
            findings.append(fail(broken, "Nothing is known of it. A fault of kvconn.", "report it with this line"))
            return None
        return facts


def examine(options: Options, tell: Callable[[str], None] = lambda what: None) -> Report:
    """Look at this machine. ``tell`` hears what is looked at now."""
    notes = _Notes(tell)
    versions = notes.probe("versions", "versions", host.gather_versions, host.judge_versions)
    wheels = frozenset(versions.packages if versions else ())
    gpus = notes.probe("GPU", "gpu", gpu.gather, lambda facts: gpu.judge(facts, wheels))
    with_gpu = bool(gpus and gpus.gpus)
    wires = ucx.gather()
    machine = notes.probe(
        "host", "host", host.gather_host, lambda facts: host.judge_host(facts, wires.tls, bool(wires.rdma))
    )
    cma = bool(machine and machine.cma)
    notes.probe(
        "UCX", "ucx", lambda: wires, lambda facts: ucx.judge(facts, gpu=with_gpu, cma=cma, remote=options.remote)
    )
    agents = notes.probe("UCX", "agent", agent.gather, agent.judge)
    if options.measure and agents is not None and not agents.trouble:
        _measure(notes, options, with_gpu=with_gpu, cma=cma)
    notes.probe(
        "ports",
        "ports",
        lambda: ports.gather(options.host, options.port, options.replicas),
        lambda facts: ports.judge(facts, remote=options.remote),
    )
    if options.config is not None:
        raw = options.config
        notes.probe("configuration", "configuration", lambda: settings.gather(raw), settings.judge)
    if options.directory is not None:
        directory = options.directory
        notes.probe("disk", "disk", lambda: disk.gather(directory), disk.judge)
    return Report({area: tuple(found) for area, found in notes.findings.items()}, dict(notes.facts))


def _measure(notes: _Notes, options: Options, *, with_gpu: bool, cma: bool) -> None:
    def judge(facts: pair.PairFacts) -> list[Finding]:
        return pair.judge(facts, cma=cma, remote=options.remote)

    notes.probe("transfer", "read from host memory", lambda: pair.gather("DRAM"), judge)
    if with_gpu:
        notes.probe("transfer", "read from GPU memory", lambda: pair.gather("VRAM"), judge)
    else:
        notes.findings["transfer"].append(ok("GPU memory: not measured, there is no GPU"))
