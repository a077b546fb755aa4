"""``python -m kvconn.doctor.child PARENT WHAT ...``: the child's end of every probe that may hang or abort.

Rules
1. Whatever an ordinary exception is, is one error line; what is not (an abort, a hang) is the parent's to see.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Final

from kvconn.doctor.children import begin, die_with_parent, say_error

__all__ = ["main"]

BODIES: Final = {
    "agent": ("kvconn.doctor.agent", "child"),
    "holder": ("kvconn.doctor.pair", "hold"),
    "reader": ("kvconn.doctor.pair", "read"),
    "gpu": ("kvconn.doctor.gpu", "child"),
    "disk": ("kvconn.doctor.disk", "child"),
    "connector": ("kvconn.doctor.settings", "child"),
}


def main(arguments: list[str]) -> int:
    die_with_parent(int(arguments[0]))
    what, rest = arguments[1], arguments[2:]
    begin("import")
    try:
        _body(what)(*rest)
    except Exception as err:  # noqa: BLE001 - the top of the process: any library's error is one line for the parent
        say_error(f"{type(err).__name__}: {err}")
        return 1
    return 0


def _body(what: str) -> Callable[..., None]:
    """Imported here: torch for one, nixl for another, neither for the rest."""
    if what not in BODIES:
        raise ValueError(f"no such child: {what!r}")
    module, name = BODIES[what]
    body: Callable[..., None] = getattr(importlib.import_module(module), name)
    return body


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
