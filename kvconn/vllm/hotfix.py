"""Repairs of vLLM 0.30 to 0.33 for people who stay on its own connectors. See docs/hotfix.md.

Rules
1. Off unless ``KVCONN_VLLM_HOTFIX=1``. vLLM calls :func:`install` in each of its processes (``vllm.general_plugins``);
   without the variable it returns at once and imports nothing.
2. A repair is made only where its probe has seen the fault, and stays only if the probe then sees it gone; otherwise
   the class is put back. Elsewhere (a fixed vLLM, an unknown one, a probe that fails) nothing is changed.
3. Every repair says in one line on stderr what it did or why it did nothing. stderr, because vLLM's log level may hide
   a log record and this changes somebody else's code.
4. Nothing here raises into vLLM: not installing, and not the repaired methods beyond what the originals raise.
5. A repair wraps and adds; the original method always runs.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from kvconn.vllm._hotfix_counting import Direction, ReportFilter
from kvconn.vllm._hotfix_probes import PROBE_ID, Probed, probe_aggregator, probe_replicated_rank

__all__ = ["VARIABLE", "Outcome", "Targets", "install", "load_targets", "repair"]

VARIABLE = "KVCONN_VLLM_HOTFIX"
#: where the faults were read, and the repairs run, release by release.
KNOWN = re.compile(r"0\.(30|31|32|33)\.\d+")

_MARK = "__kvconn_hotfix__"
_PARTS: tuple[tuple[Direction, str], ...] = (("send", "finished_sending"), ("recv", "finished_recving"))

State = Literal["repaired", "already", "healthy", "unknown", "failed"]
Undo = Callable[[], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one repair. ``already``: an earlier call in this process made it."""

    name: str
    state: State
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {_WORDS[self.state]}: {self.detail}"


_WORDS: dict[State, str] = {
    "repaired": "REPAIRED",
    "already": "repaired before",
    "healthy": "nothing changed, the fault is not there",
    "unknown": "nothing changed, not a version this was written for",
    "failed": "WARNING: nothing changed, the probe failed",
}


@dataclass(frozen=True)
class Targets:
    """vLLM's classes, as arguments so that a test can hand in others."""

    version: str
    pull_connector: type
    pull_worker: type
    push_connector: type
    push_worker: type
    nixl_metadata: type
    aggregator: type
    output: type


def load_targets() -> Targets:
    """From the installed vLLM. Raises whatever its import raises."""
    nixl = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    connector, metadata = import_module(f"{nixl}.connector"), import_module(f"{nixl}.metadata")
    return Targets(
        version=_version(),
        pull_connector=connector.NixlPullConnector,
        pull_worker=import_module(f"{nixl}.pull_worker").NixlPullConnectorWorker,
        push_connector=connector.NixlPushConnector,
        push_worker=import_module(f"{nixl}.push_worker").NixlPushConnectorWorker,
        nixl_metadata=metadata.NixlConnectorMetadata,
        aggregator=import_module("vllm.distributed.kv_transfer.kv_connector.utils").KVOutputAggregator,
        output=import_module("vllm.v1.outputs").KVConnectorOutput,
    )


def _version() -> str:
    return str(import_module("vllm").__version__)


def install() -> None:
    """The entry point. Never raises."""
    value = os.environ.get(VARIABLE)
    if value in (None, "", "0"):
        return
    try:
        if value != "1":
            _say(f"{VARIABLE}: expected 1, got {value!r}: nothing changed")
            return
        version = _version()
        if not KNOWN.match(version):
            _say(str(Outcome(f"vllm {version}", "unknown", "0.30 to 0.33 are known; remove the variable")))
            return
        for outcome in repair(load_targets()):
            if outcome.state != "already":
                _say(f"vllm {version}: {outcome}")
    except Exception as error:  # noqa: BLE001 -- whatever this vLLM is, the engine must start as it would without us
        _say(f"WARNING: nothing (more) changed: {type(error).__name__}: {error}")


def _say(line: str) -> None:
    print(f"kvconn hotfix (pid {os.getpid()}): {' '.join(line.split())}", file=sys.stderr, flush=True)


# --- probing, patching, probing again -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Repair:
    name: str
    probe: Callable[[], Probed]
    #: replaces one method or more and says how to put it back.
    patch: Callable[[], Undo]
    #: the method that tells, by its mark, that we were here.
    method: Callable[..., Any] | None
    done: str


def repair(targets: Targets) -> list[Outcome]:
    """Make every repair that is needed, and tell of each. Does not raise. The caller checked the version."""
    return [_run(one) for one in _repairs(targets)]


def _run(one: _Repair) -> Outcome:
    if getattr(one.method, _MARK, False):
        return Outcome(one.name, "already", one.done)
    undo: Undo | None = None
    try:
        before = one.probe()
        if not before.faulty:
            return Outcome(one.name, "healthy", before.seen)
        undo = one.patch()
        after = one.probe()
        if not after.faulty:
            return Outcome(one.name, "repaired", f"{one.done} (found: {before.seen})")
        problem = f"still {after.seen} after the repair"
    except Exception as error:  # noqa: BLE001 -- a class that the probe does not know may raise anything
        problem = f"{type(error).__name__}: {error}"
    if undo is not None:
        undo()
    return Outcome(one.name, "failed", problem)


def _repairs(t: Targets) -> list[_Repair]:
    pull = functools.partial(probe_replicated_rank, t.pull_connector, t.pull_worker, t.nixl_metadata)
    push = functools.partial(probe_replicated_rank, t.push_connector, t.push_worker, t.nixl_metadata)
    return [
        _Repair(
            "NIXL pull with replicated PCP",
            pull,
            lambda: _wrap(t.pull_connector, "get_transfer_results", _delivering),
            _method(t.pull_connector, "get_transfer_results"),
            "get_transfer_results() hands out what PCP ranks above 0 report",
        ),
        _Repair(
            "NIXL push with replicated PCP",
            push,
            lambda: _patch_push(t),
            _method(t.push_worker, "start_load_kv"),
            "PCP ranks above 0 report a release when it is announced",
        ),
        _Repair(
            "KVOutputAggregator",
            lambda: probe_aggregator(t.aggregator, t.output),
            lambda: _wrap(t.aggregator, "aggregate", _counting_ranks),
            _method(t.aggregator, "aggregate"),
            "counts each rank once, drops reports about sends that have completed",
        ),
    ]


def _patch_push(t: Targets) -> Undo:
    """The worker's half; the facade's too where the pull connector does not share its poll."""
    undo = [_wrap(t.push_worker, "start_load_kv", _recording)]
    poll = "get_transfer_results"
    if _owner(t.push_connector, poll) is not _owner(t.pull_connector, poll):
        undo.append(_wrap(t.push_connector, poll, _delivering))

    def put_back() -> None:
        for one in undo:
            one()

    return put_back


def _method(cls: type, name: str) -> Callable[..., Any] | None:
    """None where there is no such method; the probe will then say so."""
    method: Callable[..., Any] | None = getattr(cls, name, None)
    return method


def _owner(cls: type, name: str) -> type:
    return next(base for base in cls.__mro__ if name in vars(base))


def _wrap(cls: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace the method in the class that defines it, for all who have that class by whatever name."""
    owner = _owner(cls, name)
    original = vars(owner)[name]
    wrapped = functools.wraps(original)(around(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
    return lambda: setattr(owner, name, original)


# --- the repaired methods -----------------------------------------------------------------------------------------


def _delivering(original: Callable[..., Any]) -> Callable[..., Any]:
    """A facade's poll that gives out what its worker had recorded for replicated PCP ranks."""

    def get_transfer_results(self: Any, *args: Any, **kwargs: Any) -> Any:
        owed = set(getattr(self.connector_worker, "_replicated_pcp_done_sending", ()))
        results = original(self, *args, **kwargs)
        if owed:
            results.finished_sending.update(owed)
        return results

    return get_transfer_results


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's load step that records, where it serves nobody, the releases announced to it."""

    def start_load_kv(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, metadata, *args, **kwargs)
        if self.pcp_rank > 0 and not self.pcp_dcp_sharded:
            self._replicated_pcp_done_sending.update(metadata.reqs_to_send)
        return result

    return start_load_kv


def _counting_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    """An aggregation whose counter sees each rank once per life."""

    def aggregate(self: Any, outputs: Any, output_rank: int = 0) -> Any:
        if not outputs[output_rank]:  # the original counts nothing then, so nothing has been reported
            return original(self, outputs, output_rank)
        reports = self.__dict__.get("_kvconn_reports")
        if reports is None:
            reports = self._kvconn_reports = ReportFilter(memory=_memory())
        _drop_repeated(reports, outputs)
        joined = original(self, outputs, output_rank)
        part = joined.kv_connector_output
        for direction, attribute in _PARTS:
            reports.completed(direction, getattr(part, attribute) or ())
        return joined

    return aggregate


def _memory() -> int:
    """How many completed sends to remember: none where a client's id may come back for another request."""
    ids_come_back = os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("", "0")
    return 0 if ids_come_back else 4096


def _drop_repeated(reports: ReportFilter, outputs: Any) -> None:
    """Give each output that repeats something a new part without it; parts may be shared, so none is changed."""
    first = not reports.duplicates + reports.late
    for rank, output in enumerate(outputs):
        part = getattr(output, "kv_connector_output", None)
        if part is None:
            continue
        fewer: dict[str, Any] = {}
        for direction, attribute in _PARTS:
            ids = getattr(part, attribute) or set()
            admitted = reports.admit(rank, direction, ids)
            if len(admitted) == len(ids):
                continue
            fewer[attribute] = admitted
            if first and PROBE_ID not in ids:
                first = False
                repeated = sorted(ids - admitted)[0]
                _say(f"rank {rank} repeated {attribute} of {repeated[:100]!r}: not counted; I say this once")
        if fewer:
            output.kv_connector_output = replace(part, **fewer)
