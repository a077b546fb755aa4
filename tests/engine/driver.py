"""A driver to be killed: starts an engine of two ranks, keeps it busy, and says its processes' ids on one line."""

from __future__ import annotations

import sys

from kvconn.config import ParallelConfig
from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.config import EngineConfig, ModelSpec


def main() -> None:
    model = ModelSpec(mode="content-addressed", n_layers=1)
    engine = EngineProcess(EngineConfig(name="driven", parallel=ParallelConfig(pcp=2), num_blocks=4096, model=model))
    engine.start()
    if "busy" in sys.argv:
        engine.submit(EngineRequest("endless", (1, 2, 3), 60_000))
        while not engine.poll(10.0):
            pass
    print(engine.pid, *engine.worker_pids, flush=True)
    while True:
        engine.poll(60.0)


if __name__ == "__main__":
    main()
