"""Who may import whom, as a table, and what the tree as a whole must keep to.

Every import counts: those inside functions, those under ``TYPE_CHECKING``, and ``import_module`` with a literal. A
connector named by a string that configuration carries (``kvconn.factory``) is no import: that is how one reaches down
without knowing what it finds.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import kvconn

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvconn"

#: the names at the bottom, which everybody may use.
BASE = frozenset({"errors", "metrics", "base", "config"})
#: what connectors are built of.
PARTS = frozenset({"ledger", "geometry", "memory", "params", "transport", "trust"})
CONNECTORS = frozenset({"nixl", "multi", "offload"})

#: first name below ``kvconn`` -> the others that it may import. ``""`` is ``kvconn/__init__.py`` itself.
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "metrics": frozenset({"errors"}),
    "config": frozenset({"errors"}),
    "base": frozenset({"errors", "metrics", "config"}),
    "factory": BASE,
    "explain": BASE,
    "ledger": BASE,
    "geometry": BASE,
    "memory": BASE | {"geometry"},
    "params": BASE,
    "trust": BASE,
    "transport": BASE,
    "aggregator": BASE | {"ledger"},
    "nixl": BASE | PARTS,
    "offload": BASE | PARTS,
    "multi": BASE | PARTS | {"factory"},  # its children are named by strings
    "engine": BASE | PARTS | {"factory", "aggregator", "explain"},  # its connectors too
    "chaos": BASE | PARTS | {"engine", "explain"},
    "vllm": BASE | PARTS | CONNECTORS | {"factory", "aggregator", "explain"},
    "doctor": BASE | PARTS | {"", "factory"},  # asks children about the rest
    "cli": BASE | PARTS | CONNECTORS | {"", "factory", "aggregator", "engine", "chaos", "doctor", "explain", "vllm"},
    "data": BASE | {"engine"},  # the script that made the shipped trace
    "testing": BASE | PARTS | CONNECTORS | {"factory", "aggregator", "engine", "vllm"},
    "": BASE | PARTS | CONNECTORS | {"factory", "aggregator"},  # for type checkers; at run time names are fetched late
}

#: outside package -> the only modules that may import it, as prefixes.
OUTSIDE: dict[str, tuple[str, ...]] = {
    "nixl": ("kvconn.transport.nixl",),
    "nixl_cu12": (),
    "nixl_cu13": (),
    "vllm": ("kvconn.vllm",),
    "typer": ("kvconn.cli",),
    "rich": ("kvconn.cli",),
    "pytest": (),
    "hypothesis": (),
}

#: attributes that only these modules read, as prefixes: C5 has one place that turns a PCP rank into a role.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "pcp_rank": ("kvconn.config", "kvconn.geometry", "kvconn.engine", "kvconn.vllm"),
}

#: imported in processes that never move a byte.
LIGHT = tuple(f"kvconn{m}" for m in ("", ".base", ".config", ".factory", ".ledger", ".aggregator", ".errors"))
HEAVY = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "zmq", "vllm")

LONGEST = 600
EXCUSE = "longer than 600 lines because"

#: what only makes sense on the machine where something was written; put together here so that this file has none.
MACHINE = re.compile("|".join(("/" + "work/", "/" + "root/", r"\." + r"library\b", r"\bfarm" + "-")))


# --- imports ------------------------------------------------------------------------------------------------------


def sources() -> dict[str, str]:
    """Module name -> source, of everything under kvconn/."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imports(tree: ast.AST, module: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, full name of the module imported), wherever in the file the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # from . import x: the enclosing package, as far up as there are dots
                is_package = any(name.startswith(f"{module}.") for name in modules)
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:  # `from kvconn import nixl` is kvconn.nixl, `from kvconn.x import f` is kvconn.x
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in modules or base == "kvconn" else base
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def violations(files: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """One line per import or attribute in ``files`` that the tables do not allow. ``known``: all modules there are."""
    modules = {*files, *known}
    units = {name.split(".")[1] for name in modules if "." in name} | set(ALLOWED)
    found = []
    for module, source in files.items():
        tree = ast.parse(source)
        unit = _unit(module, units)
        if unit not in ALLOWED:
            found.append(f"{module}: {unit!r} has no row in ALLOWED")
            continue
        for line, name in imports(tree, module, modules):
            top = name.split(".")[0]
            if top == "kvconn":
                target = _unit(name, units)
                if target != unit and target not in ALLOWED[unit]:
                    found.append(f"{module}:{line}: {unit or 'kvconn'} must not import {name}")
            elif top in OUTSIDE and not _within(module, OUTSIDE[top]):
                found.append(f"{module}:{line}: must not import {top}; {' and '.join(OUTSIDE[top]) or 'nobody'} may")
        found += [
            f"{module}:{node.lineno}: must not read {node.attr}; ask the RankRole (C5)"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr in ATTRIBUTES
            and not _within(module, ATTRIBUTES[node.attr])
        ]
    return found


def _unit(name: str, units: Iterable[str]) -> str:
    """First name below kvconn; "" for the package itself and for the names that its __init__ hands out."""
    below = name.split(".")[1:2]
    return below[0] if below and below[0] in units else ""


def _within(module: str, prefixes: Iterable[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in prefixes)


@pytest.fixture(scope="module")
def known() -> frozenset[str]:
    return frozenset(sources())


def test_imports_point_down() -> None:
    files = sources()
    assert violations(files, files) == []


def test_the_table_has_no_cycle() -> None:
    """Nobody may import, over any number of steps, something that may import it."""
    reach = {unit: set(allowed) for unit, allowed in ALLOWED.items()}
    for middle in reach:
        for unit in reach:
            if middle in reach[unit]:
                reach[unit] |= reach[middle]
    assert [unit for unit in reach if unit in reach[unit]] == []


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("kvconn.ledger", "from kvconn.nixl.worker import NixlWorker", "ledger must not import kvconn.nixl"),
        ("kvconn.base", "def f():\n    import kvconn.engine.worker", ":2: base must not import kvconn.engine"),
        ("kvconn.nixl.plan", "import kvconn.multi.policy as p", "nixl must not import kvconn.multi"),
        ("kvconn.nixl.plan", "from kvconn import offload", "nixl must not import kvconn.offload"),
        ("kvconn.nixl.plan", "from kvconn import KVConnector", "nixl must not import kvconn.KVConnector"),
        ("kvconn.nixl", "from .. import multi", "nixl must not import kvconn.multi"),
        ("kvconn.nixl.plan", "from ..multi import policy", "nixl must not import kvconn.multi"),
        ("kvconn.nixl.plan", "from .. import multi", "nixl must not import kvconn.multi"),
        ("kvconn.engine.core", "from kvconn.nixl.connector import NixlConnector", "engine must not import kvconn.nixl"),
        ("kvconn.engine.core", "import_module('kvconn.testing.faults')", "engine must not import kvconn.testing"),
        ("kvconn.cli.job", "from kvconn.testing import faults", "cli must not import kvconn.testing"),
        ("kvconn.testing.kit", "from kvconn.cli.main import main", "testing must not import kvconn.cli"),
        ("kvconn.new.thing", "", "'new' has no row"),
        ("kvconn.nixl.worker", "from nixl._api import nixl_agent", "must not import nixl; kvconn.transport.nixl may"),
        ("kvconn.transport.loopback", "import importlib as i\ni.import_module('nixl._api')", "must not import nixl"),
        (
            "kvconn.nixl.worker",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm.config",
            "kvconn.nixl.worker:3: must not import vllm; kvconn.vllm may",
        ),
        ("kvconn.engine.core", "try:\n    import rich\nexcept ImportError:\n    pass", "must not import rich"),
        ("kvconn.nixl.worker", "def f(c):\n    return c.pcp_rank > 0", "must not read pcp_rank"),
    ],
)
def test_a_bad_import_is_caught(module: str, source: str, caught: str, known: frozenset[str]) -> None:
    (line,) = violations({module: source}, known)
    assert caught in line


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvconn.cli.job", "NAME = 'kvconn.testing.faults'"),
        ("kvconn.cli.job", "from kvconn import __version__"),
        ("kvconn.transport.nixl", "import importlib\nimportlib.import_module('nixl._api')"),
        ("kvconn.vllm.connector", "import vllm.config\nfrom kvconn.nixl import worker"),
        ("kvconn.testing.kit", "from kvconn.nixl.worker import NixlWorker\nfrom kvconn.engine import core"),
        ("kvconn.nixl.worker", "from kvconn.transport import base\nfrom . import plan\nfrom .plan import make_plan"),
    ],
)
def test_a_good_import_is_not(module: str, source: str, known: frozenset[str]) -> None:
    assert violations({module: source}, known) == []


@pytest.mark.parametrize("module", LIGHT)
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    """In a fresh interpreter, because this one has loaded everything."""
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}} & set({HEAVY!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


# --- the package's own names --------------------------------------------------------------------------------------


def test_public_names_are_what_type_checkers_see() -> None:
    """``__all__``, the table of late names and the imports under TYPE_CHECKING are one list written three times."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        if node.module and node.module.startswith("kvconn.")
    }  # fmt: skip
    assert typed == kvconn._EXPORTS
    assert set(kvconn.__all__) == {*typed, "__version__"}


@pytest.mark.parametrize("name", sorted(kvconn.__all__))
def test_public_names_exist(name: str) -> None:
    assert getattr(kvconn, name) is not None
    assert name in dir(kvconn)


def test_other_names_do_not() -> None:
    with pytest.raises(AttributeError, match="module 'kvconn' has no attribute 'NoSuchThing'"):
        _ = kvconn.NoSuchThing


# --- files --------------------------------------------------------------------------------------------------------


def too_long(files: Mapping[str, str]) -> list[str]:
    """Files of more than LONGEST lines whose docstring doesn't give the reason."""
    return [
        f"{name}: {len(text.splitlines())} lines"
        for name, text in files.items()
        if len(text.splitlines()) > LONGEST
        and EXCUSE not in " ".join((ast.get_docstring(ast.parse(text), clean=True) or "").split())
    ]


def test_modules_are_short_or_say_why() -> None:
    tests = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("*.py")}
    assert too_long({**sources(), **tests}) == []


def test_a_long_module_is_caught() -> None:
    body = "x = 1\n" * LONGEST
    assert too_long({"fine": body}) == []
    assert too_long({"long": body + "y = 2\n"}) == ["long: 601 lines"]
    assert too_long({"excused": f'"""Doc.\n\nThis file is longer than 600\nlines because so.\n"""\n{body}'}) == []


def tracked() -> list[Path]:
    """Files that are or would be committed; without git, everything that is not hidden or built."""
    git = shutil.which("git")
    if git and (ROOT / ".git").exists():
        done = subprocess.run(
            [git, "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        return [path for name in done.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    skipped = ("build", "dist", "__pycache__")
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not any(part.startswith(".") or part in skipped for part in path.relative_to(ROOT).parts)
    ]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("line", ["cd /" + "work/main", "'/" + "root/x'", "see ." + "library/y", "on farm" + "-12"])
def test_a_machine_path_is_caught(line: str) -> None:
    assert MACHINE.search(line)


@pytest.mark.parametrize("line", ["/workspace/x", "a/network/b", "the library.", "a windfarm - no"])
def test_an_innocent_line_is_not(line: str) -> None:
    assert not MACHINE.search(line)
