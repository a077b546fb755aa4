"""``python -m bench [--rounds N] [NAME ...]``: all of them, or those named."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from typing import Final

#: name -> what it asks
BENCHES: Final = {
    "bookkeeping": "what a step and the end of a request cost the processor",
    "reads": "one request's KV between two processes, over fresh and used pools",
    "parts": "many small parts of one read, by one system call or one by one",
    "contact": "what is prepared before the first byte",
    "scale": "what a peer costs, and a thousand of them",
    "latency": "from P's end of a request to D's report that its KV has come",
    "stages": "the same in the reference engine, stage by stage",
    "engines": "the same in real vLLM engines, to the first token",
    "offload": "blocks to and from each tier of the offloading connector",
    "idle": "what an agent costs while nothing moves",
}
#: before vLLM and NIXL are imported
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(f"{k}: {v}" for k, v in BENCHES.items()))
    parser.add_argument("--rounds", type=int, default=9, help="turns each subject gets (default 9)")
    given = parser.parse_args()
    unknown = set(given.names) - set(BENCHES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    os.environ.update(ENVIRONMENT)
    logging.getLogger("kvconn").setLevel(logging.CRITICAL)
    for name in given.names or BENCHES:
        for table in importlib.import_module(f"bench.{name}").run(given.rounds):
            table.print()
    sys.stdout.flush()
    os._exit(0)  # stock's threads and NIXL's would be waited for


if __name__ == "__main__":
    sys.exit(main())
