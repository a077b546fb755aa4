"""A finding, and the report that findings make.

Rules
1. A finding that is not ``ok`` says what it means and what to set.
2. The exit code follows from the levels alone: 1 if anything would break, else 0.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["Finding", "Level", "Report", "fail", "ok", "warn"]

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """``title``: what was found. ``means``: what follows from it. ``set``: what to change, empty when nothing."""

    level: Level
    title: str
    means: str = ""
    set: str = ""


class Report(msgspec.Struct, frozen=True):
    """Findings by area, in the order they were made, and the facts they rest on."""

    findings: dict[str, tuple[Finding, ...]]
    facts: dict[str, Any]

    def count(self, level: Level) -> int:
        return sum(finding.level == level for of_area in self.findings.values() for finding in of_area)

    @property
    def code(self) -> int:
        """1 when something would break, 0 otherwise."""
        return 1 if self.count("fail") else 0


def ok(title: str, means: str = "") -> Finding:
    return Finding("ok", title, means)


def warn(title: str, means: str, set: str) -> Finding:
    return Finding("warn", title, means, set)


def fail(title: str, means: str, set: str) -> Finding:
    return Finding("fail", title, means, set)
