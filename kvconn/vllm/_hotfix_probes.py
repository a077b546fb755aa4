"""Is the fault there? Asked of vLLM's own classes, by running them.

Rules
1. A probe makes an object of the real class without its constructor, gives it the few attributes that the method under
   test needs, runs the method, and looks at what comes out. It reads no source and compares no version.
2. Only what would touch a network or a device is replaced, on the probe's object alone.
3. A probe looks at the healthy cases too: a serving rank that says "sent" before anybody read, a rank that reports
   twice, a counter that does not complete at all. Where one of these is wrong the class is not the one we know, and
   the answer is :class:`NotUnderstoodError`, never "faulty".
4. Probes may raise anything: whoever asks treats a raise as "do nothing".
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

__all__ = ["PROBE_ID", "NotUnderstoodError", "Probed", "probe_aggregator", "probe_replicated_rank"]

#: the request that probes speak of.
PROBE_ID = "kvconn-hotfix-probe"


class NotUnderstoodError(Exception):
    """The class behaves in a way that the probe has no name for."""


@dataclass(frozen=True)
class Probed:
    """``faulty`` is the verdict, ``seen`` what it was concluded from, in words."""

    faulty: bool
    seen: str


# --- a replicated PCP rank ----------------------------------------------------------------------------------------


def probe_replicated_rank(connector: type, worker: type, metadata: type) -> Probed:
    """Does a producer's replicated PCP rank above 0 report a release that was announced to it?

    ``connector`` and ``worker`` are the facade and its worker half, ``metadata`` what the scheduler half ships.
    """
    count = _expected_count(connector)
    if count is not None:  # another scheme: fewer reports are expected, and hiding ranks belongs to it
        return Probed(False, f"get_finished_count() is {count!r}, so not every rank is expected to report")
    for label, rank, sharded in (("PCP rank 0", 0, False), ("a rank with its own shard", 1, True)):
        if _polls(connector, worker, metadata, rank, sharded)[0]:
            raise NotUnderstoodError(f"{label} reported a release that nobody had read")
    first, second = _polls(connector, worker, metadata, 1, False)
    if second:
        raise NotUnderstoodError("a replicated rank reported one release in two polls")
    if first:
        return Probed(False, "a replicated PCP rank above 0 reports an announced release")
    recorded = PROBE_ID in _announced(worker, metadata, 1, False).get_transfer_results().finished_sending
    return Probed(True, "recorded by the worker, dropped on the way out" if recorded else "never recorded")


def _expected_count(connector: type) -> int | None:
    half: Any = object.__new__(connector)
    half.connector_worker = half.connector_scheduler = None
    count: int | None = half.get_finished_count()
    return count


def _polls(connector: type, worker: type, metadata: type, rank: int, sharded: bool) -> tuple[bool, bool]:
    """Announce one release to a worker at this place; was it in the first poll of the facade, and in the second?"""
    facade: Any = object.__new__(connector)
    facade.kv_transfer_config = SimpleNamespace(kv_role="kv_producer")
    facade.connector_scheduler = None
    facade.connector_worker = _announced(worker, metadata, rank, sharded)
    first, second = (PROBE_ID in facade.get_transfer_results(set()).finished_sending for _ in range(2))
    return first, second


def _announced(worker: type, metadata: type, rank: int, sharded: bool) -> Any:
    half = _bare_worker(worker, rank, sharded)
    step = metadata()
    # a deadline that no clock reaches: an expired lease would be a report too
    step.reqs_to_send[PROBE_ID] = float("inf")
    step.reqs_in_batch.add(PROBE_ID)
    half.start_load_kv(step)
    return half


def _bare_worker(worker: type, rank: int, sharded: bool) -> Any:
    half: Any = object.__new__(worker)
    half.__dict__.update(
        pcp_rank=rank,
        pcp_size=2,
        pcp_dcp_sharded=sharded,
        tp_rank=0,
        use_host_buffer=False,
        use_mla=True,
        enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False,
        transfer_topo=object(),
        consumer_notification_counts_by_req={},
        _replicated_pcp_done_sending=set(),
        _reqs_to_process=set(),
        _reqs_to_send={},
        _recving_metadata={},
        _recving_transfers={},
        _recv_failures=set(),
        _failed_recv_reqs=queue.Queue(),
        _ready_requests=queue.Queue(),
        _sending_transfers=defaultdict(list),
        _sending_transfers_lock=threading.Lock(),
        _send_failures=set(),
        _evict_finished_inbox=queue.Queue(),
        _push_writer_wake=threading.Event(),
        # what would reach for an agent, a peer or a device
        _get_new_notifs=set,
        _pop_done_transfers=lambda transfers: (set(), set()),
        _send_heartbeats=lambda metadata: None,
        _sync_device_after_direct_recv=lambda ids: None,
        _cleanup_remote_engines=lambda: None,
        _cleanup_replaced_remote_engines=lambda: None,  # 0.31
    )
    return half


# --- the aggregator -----------------------------------------------------------------------------------------------


def probe_aggregator(aggregator: type, part: type) -> Probed:
    """Does the counter of a world of two count reports where it should count ranks?

    ``part`` is the class of one worker's connector output.
    """
    seen = []
    for direction in ("finished_sending", "finished_recving"):
        twice = _Run(aggregator, part, direction)
        early = twice.report(0) or twice.report(0)
        if not early and not twice.report(1):
            raise NotUnderstoodError(f"{direction}: two ranks of two reported and nothing completed")
        if early:
            seen.append(f"{direction} complete after two reports of one rank")
    late = _Run(aggregator, part, "finished_sending")
    late.report(0)
    if not late.report(1):
        raise NotUnderstoodError("finished_sending: two ranks of two reported and nothing completed")
    if late.report(0) or late.report(1):
        seen.append("a send completes a second time")
    again = _Run(aggregator, part, "finished_recving")
    lives = [again.report(0), again.report(1), again.report(0), again.report(1)]
    if lives != [False, True, False, True]:
        raise NotUnderstoodError(
            f"a receive, then another of the same id: expected completion after 2 and 4, got {lives}"
        )
    return Probed(bool(seen), "; ".join(seen) or "counts ranks")


class _Run:
    """One id's way through an aggregator of two ranks."""

    def __init__(self, aggregator: type, part: type, direction: str) -> None:
        self._aggregator = aggregator(2)
        self._part = part
        self._direction = direction

    def report(self, rank: int) -> bool:
        """True when this report of ``rank`` completed the id."""
        outputs = [SimpleNamespace(kv_connector_output=self._part()) for _ in range(2)]
        setattr(outputs[rank].kv_connector_output, self._direction, {PROBE_ID})
        joined = self._aggregator.aggregate(outputs, 0).kv_connector_output
        return PROBE_ID in (getattr(joined, self._direction) or ())
