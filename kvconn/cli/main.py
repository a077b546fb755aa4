"""The command ``kvconn``: its entry point, which works without the extra that the commands need.

Rules
1. Importing this module imports neither typer nor rich, nor torch: ``kvconn --help`` answers at once, and a missing
   extra is one sentence, not a traceback.
2. Until engines are started, and after they have ended, Ctrl-C is one line and the end: nothing is there to clean up.
3. Exit codes are in :mod:`kvconn.cli.verdict`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

USAGE, INTERRUPTED = 2, 130


def main() -> None:
    """``kvconn`` and ``python -m kvconn.cli``. Ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"kvconn: the command line needs {' and '.join(missing)}: pip install 'kvconn[cli]'", file=sys.stderr)
        sys.exit(USAGE)
    from kvconn.cli.app import app

    app(prog_name="kvconn")


def _interrupted(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"kvconn: interrupted\n")
    os._exit(INTERRUPTED)
