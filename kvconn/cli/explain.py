"""``kvconn explain``: what running engines wait for, printed.

Rules
1. Asks the sockets of :mod:`kvconn.explain` and prints what they say; decides nothing.
2. Nobody there is 1 with a line that says where was looked; a socket that does not answer is named and is 1 too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from kvconn.explain import Report, find, run_dir

__all__ = ["explain", "print_reports", "to_json"]


def explain(pid: int | None, directory: Path | None) -> tuple[list[Report], list[str]]:
    """Reports, and problems; no report is a problem."""
    directory = directory if directory is not None else run_dir()
    reports, problems = find(directory, pid)
    if not reports:
        whom = f"process {pid}" if pid is not None else "any process"
        problems.append(f"no engine of {whom} has a socket in {directory} (KVCONN_RUN_DIR or --run-dir names another)")
    return reports, problems


def print_reports(console: Console, reports: Iterable[Report]) -> None:
    """One block per half: who it is, and a line per thing that it waits for."""
    for report in reports:
        where = "scheduler" if report.rank is None else f"rank {report.rank}"
        console.print(Text(f"{report.engine_id} {where} (pid {report.pid})", style="bold"), soft_wrap=True)
        console.print(Text(f"  {report.summary}", style="dim"), soft_wrap=True)
        for line in report.lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
        if report.left_out:
            console.print(Text(f"  ... and {report.left_out} more"))
        if not report.lines:
            console.print(Text("  waits for nothing"))


def to_json(reports: list[Report], problems: list[str]) -> str:
    """The same for programs."""
    return msgspec.json.encode({"reports": reports, "problems": problems}).decode()
