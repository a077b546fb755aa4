"""For authors of connectors and engines: a clock, a network and faults to test against.

Rules
1. Nothing of the product imports this package.
2. Names are fetched when they are asked for, so that one tool does not load what another needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconn.testing.checks import check_transport
    from kvconn.testing.clock import ManualClock
    from kvconn.testing.faults import FaultPolicy, FaultTransport
    from kvconn.transport.loopback import LoopbackNet, LoopbackTransport

__all__ = ["FaultPolicy", "FaultTransport", "LoopbackNet", "LoopbackTransport", "ManualClock", "check_transport"]

_EXPORTS = {
    "FaultPolicy": "kvconn.testing.faults",
    "FaultTransport": "kvconn.testing.faults",
    "LoopbackNet": "kvconn.transport.loopback",
    "LoopbackTransport": "kvconn.transport.loopback",
    "ManualClock": "kvconn.testing.clock",
    "check_transport": "kvconn.testing.checks",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
