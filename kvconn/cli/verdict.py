"""What a replay's report means: an exit code, and the sentences that say why.

Rules
1. 0: every request finished, every token right, nothing held. 1: anything else, naming request and rank. 2: usage or
   configuration. 3: the fault that was asked for happened *and was named*. 130: interrupted.
   141: nobody reads what is printed.
2. A fault that was asked for and did not show, or showed and was not named, is 1: the detector is what failed.
3. Nothing here prints or runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from kvconn.engine.router import ReplayReport

__all__ = ["FINE", "INTERRUPTED", "NAMED", "PIPE_CLOSED", "USAGE", "WRONG", "Contract", "Verdict", "judge"]

Contract = Literal["world", "hidden-ranks"]
FINE, WRONG, USAGE, NAMED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
MOST = 8


class Verdict(msgspec.Struct, frozen=True):
    """``code`` is the process's exit code."""

    code: int
    lines: tuple[str, ...]


def judge(report: ReplayReport, contract: Contract) -> Verdict:
    """The verdict on a replay under ``contract``."""
    if contract == "hidden-ranks":
        return _judge_hidden(report)
    wrong = [*_failures(report), *_mismatches(report), *_held(report)]
    if report.compared < report.finished:
        wrong.append(f"only {report.compared} of {report.finished} finished requests were compared")
    if report.min_margin < report.margin_floor:
        wrong.append(
            f"the smallest top-2 margin is {report.min_margin:.1e}, below {report.margin_floor:.0e}: tokens of this"
            " seed prove nothing; use another --seed"
        )
    if wrong:
        return Verdict(WRONG, tuple(wrong))
    return Verdict(FINE, (f"{report.finished} of {report.total} requests finished, every token right, nothing held",))


def _judge_hidden(report: ReplayReport) -> Verdict:
    others = [*_failures(report), *_mismatches(report)]
    if report.stall is None and not report.leaks:
        return Verdict(WRONG, ("hidden-ranks: the fault did not show: nothing stalled and nothing is held", *others))
    named, held = _naming(line for lines in _engine_lines(report) for line in lines), _pending(report)
    if not named or len(named) < held:
        head = f"hidden-ranks: stalled, but of {held} pending releases only {len(named)} were named"
        return Verdict(WRONG, (head, *_held(report), *others))
    if others:
        return Verdict(WRONG, ("hidden-ranks: stalled and named, but something else is wrong", *others))
    left = report.total - report.finished
    head = f"hidden-ranks: as before the fix, {left} of {report.total} requests never finished; blocks are owed:"
    if not left:
        head = f"hidden-ranks: all {report.total} requests finished, but their blocks never came back; they are owed:"
    return Verdict(NAMED, (head, *named))


def _failures(report: ReplayReport) -> list[str]:
    return _cut([f"{failure.id} failed on {failure.side}: {failure.reason}" for failure in report.failures])


def _mismatches(report: ReplayReport) -> list[str]:
    return _cut(
        [
            f"{wrong.id}: token {wrong.position} on {wrong.side}, output rank {wrong.rank}, is {wrong.got}, the"
            f" monolithic run has {wrong.expected}"
            for wrong in report.mismatches
        ]
    )


def _held(report: ReplayReport) -> list[str]:
    wrong = []
    if report.stall is not None:
        where = ", ".join(f"{id} on {side}" for id, side in list(report.stall.in_flight.items())[:MOST])
        more = len(report.stall.in_flight) - MOST
        wrong.append(
            f"stall: nothing moved for {report.stall.idle:.0f} s with {report.finished} of {report.total} finished;"
            f" in flight: {where}{f' and {more} more' if more > 0 else ''}"
        )
        wrong += _cut(list(report.stall.lines)) or ["no engine named who owes what"]
    for leak in report.leaks:
        wrong.append(
            f"leak: {leak.side} holds {leak.blocks} blocks after the drain, {leak.pending_release} releases pending"
        )
        wrong += _cut(list(leak.lines)) or [f"{leak.side} did not name who owes what"]
    return wrong


def _engine_lines(report: ReplayReport) -> list[tuple[str, ...]]:
    return [report.stall.lines if report.stall is not None else (), *(leak.lines for leak in report.leaks)]


def _pending(report: ReplayReport) -> int:
    if report.stall is not None:
        return report.stall.last.prefill.pending_release + report.stall.last.decode.pending_release
    return sum(leak.pending_release for leak in report.leaks)


def _naming(lines: Iterable[str]) -> list[str]:
    """For every request the first line that names it, a child, ranks and an age."""
    named: dict[str, str] = {}
    for line in lines:
        found = re.search(r"\b(line-\d+)\b.*Connector.*\branks? \d.*\d s\b", line)
        if found is not None:
            named.setdefault(found[1], line)
    return [named[id] for id in sorted(named, key=lambda id: int(id.removeprefix("line-")))]


def _cut(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST else [*lines[:MOST], f"... and {len(lines) - MOST} more"]
