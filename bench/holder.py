"""A vLLM connector without a bench of its own: as a sibling of NIXL's it holds each request for two steps."""

from __future__ import annotations

from tests.vllm_hotfix.rig import HOLDER

__all__ = ["Holder"]

exec(HOLDER)
