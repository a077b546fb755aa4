"""The command ``kvconn``: its entry point, which works without the extra that the commands need.

Rules
1. Importing this module imports neither typer nor rich, nor torch: ``kvconn --help`` answers at once, and a missing
   extra is one sentence, not a traceback.
2. Exit codes are in :mod:`kvconn.cli.verdict`.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

USAGE = 2


def main() -> None:
    """``kvconn`` and ``python -m kvconn.cli``. Ends the process."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"kvconn: the command line needs {' and '.join(missing)}: pip install 'kvconn[cli]'", file=sys.stderr)
        sys.exit(USAGE)
    from kvconn.cli.app import app

    app(prog_name="kvconn")
