"""What ``kvconn doctor`` reads from its options and prints of a report.

Rules
1. Findings in words on stdout, one block each; what they mean and what to set only where something is not fine.
2. As JSON: the same findings, the counts, the exit code, and the facts they rest on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from kvconn.doctor.findings import Finding, Level, Report
from kvconn.errors import ConfigError

__all__ = ["print_findings", "to_json", "transfer_config"]

STYLES: Final[dict[Level, str]] = {"ok": "green", "warn": "yellow", "fail": "red"}
#: a kv_transfer_config is a few hundred bytes.
LARGEST: Final = 1 << 20


def transfer_config(given: str | None) -> str | None:
    """The JSON itself, or what is in the file of that name. Raises ConfigError."""
    if given is None or given.lstrip().startswith("{"):
        return given
    try:
        with Path(given).open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"--kv-transfer-config: expected a JSON object or a readable file: {err}") from None
    if len(text) > LARGEST:
        raise ConfigError(f"--kv-transfer-config: {given} is longer than {LARGEST} characters")
    return text


def to_json(report: Report) -> str:
    told = {
        "code": report.code,
        "warnings": report.count("warn"),
        "failures": report.count("fail"),
        "findings": [
            {"area": area, **msgspec.structs.asdict(finding)}
            for area, findings in report.findings.items()
            for finding in findings
        ],
        "facts": report.facts,
    }
    return msgspec.json.encode(told).decode()


def print_findings(console: Console, report: Report) -> None:
    for area, findings in report.findings.items():
        console.print(area, style="bold", highlight=False, markup=False)
        for finding in findings:
            _print(console, finding)
    counts = f"{report.count('ok')} fine, {report.count('warn')} warnings, {report.count('fail')} failures"
    if report.code:
        said, style = f"{counts}: what failed would break an engine", "red"
    else:
        said, style = f"{counts}: nothing here would break", "yellow" if report.count("warn") else "green"
    console.print(said, style=style, highlight=False, markup=False)


def _print(console: Console, finding: Finding) -> None:
    line = Text("  ")
    line.append(f"{finding.level:<5}", STYLES[finding.level])
    line.append(finding.title)
    console.print(line, highlight=False, soft_wrap=True)
    if finding.level == "ok":
        return
    for label, text in (("means", finding.means), ("set", finding.set)):
        if text:
            console.print(f"       {label}: {text}", highlight=False, markup=False, soft_wrap=True)
