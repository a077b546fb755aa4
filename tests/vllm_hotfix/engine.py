"""One real vLLM engine in a process of its own, driven by JSON lines: commands on stdin, answers on the descriptor that
``ENGINE_FD`` names. ``argv[1]`` has the arguments of ``vllm.LLM``. Scheduler in this process, workers wherever vLLM
puts them. Between commands the engine steps as vLLM's own loop does, while there is anything to wait for.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any


def main() -> None:
    with os.fdopen(int(os.environ["ENGINE_FD"]), "w", buffering=1) as answers:
        from vllm import LLM

        llm = LLM(**json.loads(sys.argv[1]))
        print(json.dumps(state(llm)), file=answers, flush=True)
        for command in commands(llm):
            print(json.dumps(act(llm, command)), file=answers, flush=True)
            if command["do"] == "end":
                break


def commands(llm: Any) -> Any:
    core, pending = llm.llm_engine.engine_core.engine_core, b""
    while True:
        if not select.select([0], [], [], 0.01)[0]:
            if core.scheduler.has_requests():
                llm.llm_engine.step()
            continue
        data = os.read(0, 65536)
        if not data:
            return
        pending += data
        *lines, pending = pending.split(b"\n")
        yield from (json.loads(line) for line in lines)


def act(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "run":
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=command["tokens"], ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": command["params"]},
        )  # fmt: skip
        (done,) = llm.generate([{"prompt_token_ids": command["prompt"]}], sampling, use_tqdm=False)
        return {
            "tokens": list(done.outputs[0].token_ids), "params": done.kv_transfer_params,
            "cached": done.num_cached_tokens, **state(llm),
        }  # fmt: skip
    if command["do"] == "end":
        llm.llm_engine.engine_core.shutdown()
    return state(llm)


def state(llm: Any) -> dict[str, Any]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    return {"free": pool.get_num_free_blocks(), "requests": sorted(scheduler.requests)}


if __name__ == "__main__":
    main()
