"""The block ids that measurements read are what the installed vLLM hands out."""

from __future__ import annotations

import json

from bench import recorded
from bench.pools import STATES, mean_run


def test_the_file_is_what_vllm_does_now() -> None:
    """With another vLLM the ids may be others: then `python -m bench.recorded`."""
    theirs, ours = recorded.record(), json.loads(recorded.FILE.read_text())
    assert theirs.pop("vllm") and ours.pop("vllm") and theirs == ours


def test_pools_in_use_are_scattered() -> None:
    fresh, recycled, churned = (mean_run(*recorded.recorded(state)) for state in STATES)
    assert fresh == recorded.COUNT and churned < recycled < fresh
