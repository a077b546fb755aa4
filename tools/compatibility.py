"""Write docs/compatibility.md from the results of the tests that prove it.

    python -m pytest tests/nixl/test_matrix.py tests/nixl/test_whole_matrix.py tests/engine/test_transfer.py \\
        --junitxml results.xml
    make test-vllm PYTEST_ARGS="--junitxml vllm.xml"
    python tools/compatibility.py results.xml vllm.xml > docs/compatibility.md

Rows are those of tests/nixl/matrix.py; one is written only when every test of its pairs ran and passed, and of the
engines, ours and vLLM's, only the pairs whose test passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.nixl.matrix import ROWS, Row  # noqa: E402 - of this repository, wherever it was called from

PAIRS = (
    "test_every_pair_by_the_model",
    "test_every_pair_over_nixl",
    "test_every_pair_through_the_halves",
    "test_every_pair_through_the_halves_over_nixl",
    "test_whichever_rank_that_is_read_let_go_the_load_is_refused",
)
ENGINE = "test_decode_continues_what_prefill_computed"
HEAD = """# Who can read from whom

Written by `tools/compatibility.py` from the results of the tests; a row is here because all of its tests passed. P is
the engine that is read, D the one that reads; whatever a row does not name is equal on both sides. `kvconn plan`
([plan.md](plan.md)) says it for two engines of yours.

- **pairs**: pairs of engines in `tests/nixl/matrix.py`, each proven byte by byte against a model of where every layer,
  head and token lies: the plan alone, the plan with its bytes carried by real NIXL between two processes of one host,
  and the scheduler and worker halves of both engines, an agent per rank: who is told, fences, tables that empty;
- **engines**: pairs that run from end to end in the reference engine, real processes, every token compared with one
  engine's alone (`tests/engine/test_transfer.py`);
- **real vLLM**: pairs of real vLLM 0.32.0 engines on its CPU platform, tokens compared with one engine's alone
  (`tests/vllm`);
- **stock 0.32**: what vLLM 0.32.0's own NIXL connector does in pull mode, by reading its source.

| | pairs | engines | real vLLM | stock 0.32 |
|---|---|---|---|---|
"""
FOOT = """
Data-parallel replicas are engines of their own, each with the next port and `_dp{n}` behind its id; one may be read by
several, and read several (`tests/engine/test_replicated_engines.py`).

Not possible, and refused by field, in `kvconn plan` too: sizes of which neither divides the other, TP above 16, another
dtype, head size or number of heads, state at unequal TP or of another size, a window that is longer on D than on P, a
layer with another kind of cache, replicated PCP on D, a window on both sides where D's block (times DCP) does not
divide P's: D's first block would be filled in part, and found again by a prompt that sees the rest of it. A state
stands before the last token of the prompt that P was given: an engine that computes states holds them there, and a
state that stands elsewhere is refused. VRAM is written and has not run here: there was no GPU.
"""


def passed(files: Iterable[str]) -> dict[str, bool]:
    """Test names of these JUnit files, and whether they passed; skipped is not passed."""
    found: dict[str, bool] = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            fine = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
            name = case.get("name", "")
            found[name] = found[f"{case.get('classname', '').rpartition('.')[2]}::{name}"] = fine
    return found


def tests_of(row: Row) -> list[str]:
    """The names of the tests of a row's pairs."""
    return [f"{test}[{row.what} [{number}]]" for test in PAIRS for number in range(len(row.pairs))]


def page(results: Mapping[str, bool]) -> str:
    lines = []
    for row in ROWS:
        if all(results.get(name, False) for name in tests_of(row)):
            engines = [pair for pair in row.engine if results.get(f"{ENGINE}[{pair}]", False)]
            real = [words for words, name in row.vllm if results.get(name, False)]
            cells = row.what, str(len(row.pairs)), "; ".join(engines) or "-", "; ".join(real) or "-", row.stock
            lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines) + FOOT


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write(page(passed(sys.argv[1:])))
