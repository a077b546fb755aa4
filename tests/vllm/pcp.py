"""What a machine without a GPU needs so that vLLM runs a real PCP=2 engine: a test hack for the forward pass only.

Prefill context parallelism needs vLLM's second model runner, which needs Triton; Triton needs a backend. So: a backend
named ``cpu`` that compiles nothing, kernels under Triton's own interpreter, an MLA model, and PyTorch's rotary
embedding in place of the CPU operator, which is wrong for this model. Scheduler, executor, aggregator, connectors and
NIXL are real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: whose sitecustomize every process of an engine imports
SITE = Path(__file__).with_name("site")
BLOCK = 16
#: arguments of both engines
ARGUMENTS: dict[str, Any] = {
    "block_size": BLOCK,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}

_DRIVER = '''
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class _Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 20, "multiprocessor_count": 1, "max_num_regs": 1 << 16, "warpSize": 1}


class CPUDriver(DriverBase):
    """Answers what is asked of a device that is the host; kernels never reach it (TRITON_INTERPRET=1)."""

    def __init__(self):
        self.utils = _Utils()

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def map_python_to_cpp_type(self, type):
        return "void*"

    def get_benchmarker(self):
        raise NotImplementedError("interpreter only")

    def get_empty_cache_for_benchmark(self):
        raise NotImplementedError("interpreter only")

    def clear_cache(self, cache):
        pass

    def assemble_tensormap_to_arg(self, *args):
        raise NotImplementedError("interpreter only")
'''

_COMPILER = '''
from triton.backends.compiler import BaseBackend


class CPUBackend(BaseBackend):
    """Says that the target is known, and compiles nothing."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError("interpreter only")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
'''


def environment(where: Path, root: Path) -> dict[str, str]:
    """Write the backend below ``where``; the variables that make an engine use it."""
    package, info = where / "kvconn_test_triton", where / "kvconn_test_triton-0.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    info.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "driver.py").write_text(_DRIVER)
    (package / "compiler.py").write_text(_COMPILER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvconn-test-triton\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[triton.backends]\ncpu = kvconn_test_triton\n")
    return {"PYTHONPATH": f"{SITE}:{root}:{where}", "TRITON_INTERPRET": "1"}
