"""The documents name things that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.support import free_port

ROOT = Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/sequences.md").read_text())


def test_the_charts_name_tests() -> None:
    assert len(NAMED) >= 6


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_relative_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_embedding_example_moves_bytes_and_frees() -> None:
    spec = importlib.util.spec_from_file_location("embed", ROOT / "examples/embed.py")
    assert spec is not None and spec.loader is not None
    embed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(embed)
    assert embed.main(free_port(), free_port()) == (True, {"a"})
