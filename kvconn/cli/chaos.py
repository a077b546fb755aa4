"""What a person sees of chaos and soak: the table of faults, what the engines counted, and the verdict.

Rules
1. 0: every request done, every token right, nothing held, every fault survived, no engine ended by itself. 1: anything
   else, and it is named.
"""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from kvconn.chaos.book import ABORTS
from kvconn.chaos.flat import drift, ends, rates
from kvconn.chaos.picture import svg
from kvconn.chaos.run import Report
from kvconn.cli.verdict import FINE, WRONG

__all__ = ["print_report", "problems", "to_json"]

MOST = 8
#: engines' counters that say that faults reached them: name -> what it means
COUNTED = {
    "nixl_num_transfers": "reads that ended",
    "nixl_num_failed_transfers": "loads that failed",
    "nixl_num_failed_handshakes": "handshakes that failed",
    "nixl_num_failed_notifications": "notifications that failed",
    "nixl_num_kv_expired_reqs": "leases that ended unread",
    "stale_reads": "stale reads caught by the fence",
    "seals_refused": "references refused by their seal",
    "params_refused": "references refused at sight",
    "agent_recreations": "NIXL agents made anew",
    "duplicates_absorbed": "repeated reports absorbed",
}


def problems(report: Report) -> list[str]:
    """One line per thing that is wrong; empty when nothing is."""
    found = [f"lost: {line}" for line in report.lost[:MOST]]
    found += [f"wrong: {w.id} on {w.where}: expected {w.expected}, got {w.got}" for w in report.wrong[:MOST]]
    found += [f"leaked: {line}" for line in report.leaked[:MOST]]
    found += [f"an engine ended by itself: {line}" for line in report.died[:MOST]]
    for row in report.faults:
        if row.survived < row.injected:
            found.append(f"{row.name}: of {row.injected} only {row.survived} were seen to be survived")
    if report.soaked:
        found += drift(report.samples)
    if report.done + len(report.lost) < report.asked:
        found.append(f"of {report.asked} requests {report.done} are done and {len(report.lost)} lost")
    return found


def code(report: Report) -> int:
    """The exit code."""
    return WRONG if problems(report) else FINE


def print_report(console: Console, report: Report) -> None:
    """The table, what the engines counted, what is wrong."""
    table = Table("fault", "injected", "survived", title_justify="left")
    for row in sorted(report.faults, key=lambda row: row.name):
        table.add_row(row.name, str(row.injected), str(row.survived))
    table.add_section()
    table.add_row("all", str(report.injected), str(sum(row.survived for row in report.faults)))
    console.print(table)
    totals = Table(show_header=False)
    aborts = sum(row.injected for row in report.faults if row.name in ABORTS)
    rate = report.done / report.seconds if report.seconds else 0.0
    for name, value in (
        ("requests", f"{report.done} of {report.asked} done, {report.retried} times tried again"),
        ("aborts", f"{aborts} landed of {report.drawn} drawn"),
        ("time", f"{report.seconds:.0f} s, {rate:.1f} requests/s"),
        ("lost", len(report.lost)),
        ("wrong", len(report.wrong)),
        ("leaked", len(report.leaked)),
        ("engines that ended by themselves", len(report.died)),
        ("producers that UCX ended (F6)", len(report.aborted)),
        *((text, int(report.counters.get(name, 0))) for name, text in COUNTED.items()),
    ):
        totals.add_row(str(name), str(value))
    console.print(totals)
    if report.soaked and (both := ends(report.samples)) is not None:
        flat = Table("", "first tenth", "last tenth")
        flat.add_row("requests/s", *(f"{value:.1f}" for value in both.rate))
        flat.add_row("memory, MiB", *(f"{value / 2**20:.0f}" for value in both.rss))
        flat.add_row("open files", *(f"{value:.0f}" for value in both.fds))
        flat.add_row("posted reads", *(f"{value:.0f}" for value in both.handles))
        console.print(flat)
    for line in problems(report):
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)


def to_json(report: Report) -> str:
    """The report with its exit code."""
    return msgspec.json.encode({"code": code(report), "problems": problems(report), "report": report}).decode()


def to_svg(report: Report) -> str:
    """What was sampled, over the seconds of the run."""
    samples = report.samples
    wide = max(1, len(samples) // 60)
    coarse = samples[::wide]
    return svg(
        f"{report.done} of {report.asked} requests, {report.injected} faults and aborts, {report.seconds:.0f} s",
        [
            ("requests/s", list(zip((s.at for s in coarse[1:]), rates(coarse), strict=False))),
            ("memory, MiB", [(s.at, s.rss / 2**20) for s in samples]),
            ("open files", [(s.at, s.fds) for s in samples]),
            ("posted reads", [(s.at, s.handles) for s in samples]),
            ("KV blocks in use", [(s.at, s.kv) for s in samples]),
        ],
    )
