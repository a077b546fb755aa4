"""A real producer with PCP 2 and a real consumer on a machine without a GPU, and how to ask them things.

What that takes (and what it doesn't prove: the forward pass under an interpreter is not vLLM's on a GPU; scheduler,
executor, aggregator, connectors and NIXL are vLLM's own):
- PCP needs Model Runner V2, which needs Triton: a Triton backend that does nothing, and Triton's interpreter;
- PCP needs an MLA model: a tiny DeepSeek-V2 that exists as a ``config.json``, with dummy weights;
- the stock NIXL worker pins each worker to the last core: undone once it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import free_port
from tests.vllm.pcp import SITE
from tests.vllm.pcp import environment as triton_backend

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).with_name("engine.py")

MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "float32",
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2, "max_position_embeddings": 4096,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "n_group": 1, "topk_group": 1, "head_dim": 64,
    "topk_method": "greedy", "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip

ARGUMENTS = {
    "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, "block_size": 16,
    "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True, "load_format": "dummy",
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}  # fmt: skip

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip

#: a sibling for MultiConnector: holds each finished request for some steps, reports on every rank.
HOLDER = """
from dataclasses import dataclass, field
from vllm.distributed.kv_transfer.kv_connector.v1 import base


@dataclass
class Announced(base.KVConnectorMetadata):
    ids: set = field(default_factory=set)


class Holder(base.KVConnectorBase_V1, base.SupportsHMA):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.finished, self.steps = set(), {}

    def start_load_kv(self, forward_context, **kwargs):
        self.steps |= dict.fromkeys(self._get_connector_metadata().ids, 2)

    def get_transfer_results(self, finished_req_ids):
        self.steps = {id: left - 1 for id, left in self.steps.items()}
        done = {id for id, left in self.steps.items() if left <= 0}
        self.steps = {id: left for id, left in self.steps.items() if left > 0}
        return base.KVConnectorTransferResults(finished_sending=done)

    def wait_for_layer_load(self, layer_name): pass
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): pass
    def wait_for_save(self): pass
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def update_state_after_alloc(self, request, blocks, num_external_tokens): pass

    def build_connector_meta(self, scheduler_output):
        announced, self.finished = Announced(self.finished), set()
        return announced

    def request_finished_all_groups(self, request, block_ids):
        self.finished.add(request.request_id)
        return True, None

    def request_finished(self, request, block_ids):
        return self.request_finished_all_groups(request, (block_ids,))
"""


def lay_out(home: Path) -> None:
    """Put into ``home``: model, sibling, hotfix entry point as pip would, and a Triton backend (tests.vllm.pcp)."""
    files = {
        "model/config.json": json.dumps(MODEL),
        "path/holder.py": HOLDER,
        "path/kvconn-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: kvconn\nVersion: 0\n",
        "path/kvconn-0.dist-info/entry_points.txt": (
            "[vllm.general_plugins]\nkvconn_hotfix = kvconn.vllm.hotfix:install\n"
        ),
    }
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    triton_backend(home / "path", ROOT)


class Engine:
    """A context manager: the engine's process, from its first answer to its end."""

    def __init__(self, home: Path, name: str, transfer: dict[str, Any], *, pcp: int = 1, **variables: str) -> None:
        self.log = home / f"{name}.log"
        arguments = {**ARGUMENTS, "model": str(home / "model"), "kv_transfer_config": transfer}
        if pcp > 1:
            arguments["prefill_context_parallel_size"] = pcp
        first = (str(SITE), str(home / "path"), str(ROOT))
        path = os.pathsep.join(filter(None, (*first, os.environ.get("PYTHONPATH"))))
        port = str(free_port())
        read, write = os.pipe()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ENGINE), json.dumps(arguments)], stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=[write],
                env={
                    **os.environ, **ENVIRONMENT, "PYTHONPATH": path, "VLLM_NIXL_SIDE_CHANNEL_PORT": port,
                    "ENGINE_FD": str(write), **variables,
                },
            )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read)

    def __enter__(self) -> Engine:
        self.first = self._answer()
        unpin(self._process.pid)
        return self

    def ask(self, **command: Any) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(command).encode() + b"\n")
        stdin.flush()
        return self._answer()

    def _answer(self, seconds: float = 100) -> dict[str, Any]:
        if select.select([self._answers], [], [], seconds)[0]:
            line = self._answers.readline()
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AssertionError(f"no answer within {seconds} s; the end of its log:\n{self.log.read_text()[-3000:]}")

    def until(self, good: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
        """Ask for the state until it is good or time is up; the last one."""
        end = time.monotonic() + seconds
        while not good(now := self.ask(do="state")) and time.monotonic() < end:
            time.sleep(0.02)
        return now

    def __exit__(self, *exc: object) -> None:
        try:
            if self._process.poll() is None:
                self.ask(do="end")
        except (AssertionError, OSError):
            pass  # killed below
        finally:
            for pid in family(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            self._process.wait(20)
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._answers.close()


def family(root: int) -> list[int]:
    """``root`` and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def unpin(root: int) -> None:
    for pid in family(root):
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), range(os.cpu_count() or 1))
        except OSError:
            continue
