"""Write docs/compatibility.md from the results of the tests that prove it.

    python -m pytest tests/nixl/test_matrix.py tests/engine/test_transfer.py --junitxml results.xml
    python tools/compatibility.py results.xml > docs/compatibility.md

Rows are those of tests/nixl/matrix.py; one is written only when every test of its pairs ran and passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.nixl.matrix import ROWS, Row  # noqa: E402 - of this repository, wherever it was called from

MODEL, NIXL = "test_every_pair_by_the_model", "test_every_pair_over_nixl"
ENGINE = "test_decode_continues_what_prefill_computed"
HEAD = """# Who can read from whom

Written by `tools/compatibility.py` from the results of the tests; a row is here because all of its tests passed. P is
the engine that is read, D the one that reads; whatever a row does not name is equal on both sides. `kvconn plan`
([plan.md](plan.md)) says it for two engines of yours.

- **pairs**: pairs of engines in `tests/nixl/matrix.py`, each proven byte by byte against a model of where every layer,
  head and token lies, and each with the bytes carried by real NIXL between two processes of one host;
- **engines**: pairs that run from end to end in the reference engine, real processes, every token compared with one
  engine's alone (`tests/engine/test_transfer.py`);
- **stock 0.32**: what vLLM 0.32.0's own NIXL connector does in pull mode, by reading its source.

| | pairs | engines | stock 0.32 |
|---|---|---|---|
"""
FOOT = """
Replicated PCP on P needs nothing of D: only the first replica publishes itself. Data-parallel replicas are engines of
their own, each with the next port and `_dp{n}` behind its id.

Not possible, and refused by field: sizes of which neither divides the other, TP above 16, another dtype, head size or
number of heads, state at unequal TP, replicated PCP on D. VRAM is written and has not run here: there was no GPU.
"""


def passed(files: Iterable[str]) -> dict[str, bool]:
    """Test names of these JUnit files, and whether they passed; skipped is not passed."""
    found: dict[str, bool] = {}
    for file in files:
        for case in ET.parse(file).getroot().iter("testcase"):
            fine = not any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
            found[case.get("name", "")] = fine
    return found


def tests_of(row: Row) -> list[str]:
    """The names of the tests of a row's pairs."""
    return [f"{test}[{row.what} [{number}]]" for test in (MODEL, NIXL) for number in range(len(row.pairs))]


def page(results: Mapping[str, bool]) -> str:
    lines = []
    for row in ROWS:
        if all(results.get(name, False) for name in tests_of(row)):
            engines = [pair for pair in row.engine if results.get(f"{ENGINE}[{pair}]", False)]
            lines.append(f"| {row.what} | {len(row.pairs)} | {'; '.join(engines) or '-'} | {row.stock} |\n")
    return HEAD + "".join(lines) + FOOT


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write(page(passed(sys.argv[1:])))
