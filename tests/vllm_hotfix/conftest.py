"""What needs a real vLLM is skipped where there is none, and the header of the run says so once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

#: the modules here that need it; the rest run anywhere.
NEED_VLLM = {"test_installed.py", "test_engine.py"}
HERE = Path(__file__).parent
FOUND = importlib.util.find_spec("vllm") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if not FOUND and collection_path.parent == HERE and collection_path.name in NEED_VLLM else None


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if FOUND else f"vllm_hotfix: {', '.join(sorted(NEED_VLLM))} skipped: vllm is not importable"
