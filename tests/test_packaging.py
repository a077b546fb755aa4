"""What a user installs: the wheel, in an environment that has nothing else."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import kvconn

ROOT = Path(__file__).resolve().parent.parent
#: all that a build reads.
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "kvconn")
RUNTIME = {"msgspec", "nixl", "numpy", "pyzmq", "torch"}


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """Its stdout. AssertionError with everything it said when it ends otherwise than expected."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == status, f"{command}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout or done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the tree stays clean, by the backend installed here, so that no network is asked."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(origin, source / name)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source, cwd=source)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment that has the wheel and nothing else."""
    home = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", "--without-pip", home / "env", cwd=home)
    python = home / "env" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    return python.parent


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for wanted in ("kvconn/py.typed", "kvconn/data/trace-small.jsonl", "kvconn/__init__.py", "kvconn/cli/main.py"):
        assert wanted in names
    assert {name.split("/")[0] for name in names} == {"kvconn", f"kvconn-{kvconn.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "kvconn").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "kvconn"
    assert metadata["Version"] == kvconn.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cli", "metrics", "test"}
    plain = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {r.split(">=")[0] for r in plain} == RUNTIME
    assert all(">=" in r for r in plain), "a lower bound each"


def test_imports_without_any_dependency(empty: Path, tmp_path: Path) -> None:
    code = """
import importlib.metadata, importlib.resources, json, sys
import kvconn
files = importlib.resources.files("kvconn")
trace = (files / "data" / "trace-small.jsonl").read_text().splitlines()
print(json.dumps({
    "version": kvconn.__version__,
    "installed": importlib.metadata.version("kvconn"),
    "typed": (files / "py.typed").is_file(),
    "keys": sorted(json.loads(trace[0])),
    "requests": len(trace),
    "where": kvconn.__file__,
    "alone": sorted(d.name for d in importlib.metadata.distributions()),
}))
"""
    found = json.loads(run(empty / "python", "-I", "-W", "error", "-c", code, cwd=tmp_path))
    assert found["version"] == found["installed"] == kvconn.__version__
    assert found["typed"]
    assert found["keys"] == ["hash_ids", "input_length", "output_length", "timestamp"]
    assert found["requests"] >= 48
    assert not found["where"].startswith(str(ROOT))
    assert found["alone"] == ["kvconn"]


def test_the_command_says_what_it_lacks(empty: Path, tmp_path: Path) -> None:
    """No traceback where the extra is not installed."""
    said = run(empty / "kvconn", "demo", cwd=tmp_path, status=2)
    assert "pip install 'kvconn[cli]'" in said
    assert "Traceback" not in said
