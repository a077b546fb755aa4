"""Engines in processes of their own over one directory, and what happens to it while they run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvconn.engine.client import EngineProcess, EngineRequest
from kvconn.engine.trace import TraceRequest
from kvconn.offload.tiers.shares import SUFFIX, TEMPORARY
from tests.engine.driving import unique_tokens
from tests.engine.pairs import SECONDS, Starter, assert_all_end, ends, starting
from tests.offload.faulty import HalfWritten, Meeting, faulty
from tests.offload.local import MODEL, SIZE, expected_tokens, keys_in, offload
from tests.support import wait_until

REQUESTS = [TraceRequest(f"r{n}", unique_tokens(f"r{n}", 100), 2) for n in range(4)]
BLOCKS = 4 * (100 // SIZE)


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    return expected_tokens(REQUESTS)


@pytest.fixture
def start() -> Iterator[Starter]:
    with starting() as starter:
        yield starter


def engine(start: Starter, root: Path, *, tier: dict[str, Any] | None = None) -> EngineProcess:
    """Pools as small as one prompt, so that nothing is found in them; patience with a busy machine's disk."""
    transfer = offload(root=root, kvconn={"lookup": 60.0})
    if tier is not None:
        transfer["kv_connector_extra_config"]["secondary_tiers"] = [tier]
    return start(transfer=transfer, num_blocks=7, block_size=SIZE, model=MODEL)


def run(engine: EngineProcess, requests: Sequence[TraceRequest] = REQUESTS) -> dict[str, tuple[int, ...]]:
    for one in requests:
        engine.submit(EngineRequest(one.id, one.prompt, one.output_length))
    return {id: end.tokens for id, end in ends(engine, *(one.id for one in requests)).items()}


def count(engine: EngineProcess, name: str) -> int:
    return int(engine.stats().connector.get(f"offload_{name}", 0))


def until(engine: EngineProcess, total: int, *names: str) -> None:
    """The counters named sum up to ``total``."""
    wait_until(lambda: sum(count(engine, name) for name in names) == total, SECONDS, f"{names} are {total}")


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def assert_hits_all(engine: EngineProcess, expected: Any) -> None:
    assert run(engine) == expected
    until(engine, BLOCKS, "hit_blocks_secondary")
    assert count(engine, "blocks_stored") == count(engine, "fetches_failed") == 0


def test_the_second_of_two_engines_hits_what_the_first_stored(start: Starter, tmp_path: Path, expected: Any) -> None:
    first, second = engine(start, tmp_path), engine(start, tmp_path)
    assert run(first) == expected
    until(first, BLOCKS, "blocks_saved")
    assert_hits_all(second, expected)


def test_two_engines_that_write_the_same_blocks_at_once_leave_whole_files(
    start: Starter, tmp_path: Path, expected: Any
) -> None:
    root, marks = tmp_path / "root", tmp_path / "marks"
    for folder in (root, marks):
        folder.mkdir()
    tier = faulty(Meeting, root, marks=str(marks))
    pair = [engine(start, root, tier=tier) for _ in range(2)]
    for one in pair:
        for request in REQUESTS[:1]:
            one.submit(EngineRequest(request.id, request.prompt, request.output_length))
    for one in pair:
        assert ends(one, "r0")["r0"].tokens == expected["r0"]
        until(one, 6, "blocks_saved")
    met = list(marks.iterdir())
    assert len(met) == 6 and all(len(list(place.iterdir())) == 2 for place in met), "each was written by both at once"
    assert [path.suffix for path in files(root)] == [SUFFIX] * 12 and len(keys_in(root)) == 6
    third = engine(start, root)
    assert run(third) == expected
    until(third, 6, "hit_blocks_secondary")
    assert count(third, "fetches_failed") == 0


def test_an_engine_killed_in_mid_store_leaves_whole_files_and_the_next_one_goes_on(
    start: Starter, tmp_path: Path, expected: Any
) -> None:
    root, mark = tmp_path / "root", tmp_path / "half"
    root.mkdir()
    killed = engine(start, root, tier=faulty(HalfWritten, root, marks=str(tmp_path)))
    assert run(killed) == expected
    wait_until(mark.exists, SECONDS, "half a file is written")
    os.kill(killed.pid, signal.SIGKILL)
    assert_all_end([killed.pid, *killed.worker_pids])
    torn = Path(mark.read_text())
    assert torn.parent.name == TEMPORARY and torn.stat().st_size > 0
    assert [path.suffix for path in files(root) if path != torn] == [SUFFIX] * 2
    whole = len(keys_in(root))
    assert 2 <= whole < BLOCKS
    second = engine(start, root)
    assert run(second) == expected
    until(second, BLOCKS - whole, "blocks_saved")
    assert_hits_all(engine(start, root), expected)


def test_a_disk_that_fills_up_loses_saves_only_and_is_used_again_when_it_has_room(
    start: Starter, tmp_path: Path, expected: Any
) -> None:
    page = 4096
    with small_disk(tmp_path, (4 + BLOCKS // 4) * page) as disk:  # one request's blocks fit, in a file each or in one
        filling = disk / "somebody's file"
        filling.write_bytes(b"x" * 4 * page)
        first = engine(start, disk)
        assert run(first, REQUESTS[:1]) == {"r0": expected["r0"]}
        until(first, BLOCKS // 4, "blocks_saved")
        assert run(first, REQUESTS[1:]) == {id: tokens for id, tokens in expected.items() if id != "r0"}
        until(first, BLOCKS, "blocks_saved", "saves_failed")
        failed = count(first, "saves_failed")
        assert 0 < failed == count(first, "tier_errors"), "the disk was full"
        assert len(keys_in(disk)) == BLOCKS - failed and not list(disk.rglob(f"{TEMPORARY}/*"))
        first.shutdown()
        filling.unlink()
        second = engine(start, disk)
        assert run(second) == expected
        until(second, BLOCKS, "blocks_stored", "hit_blocks_secondary")
        assert count(second, "hit_blocks_secondary") >= BLOCKS // 4 and count(second, "fetches_failed") == 0


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of ``size`` bytes, where this user may mount one."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvconn-test", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_directory_that_vanishes_is_missed_by_nobody_and_used_again_when_it_is_back(
    start: Starter, tmp_path: Path, expected: Any
) -> None:
    root, aside = tmp_path / "root", tmp_path / "aside"
    root.mkdir()
    filler = engine(start, root)
    assert run(filler) == expected
    until(filler, BLOCKS, "blocks_saved")
    other = engine(start, root)
    root.rename(aside)
    assert run(other) == expected
    until(other, BLOCKS, "saves_failed")
    assert count(other, "tier_errors") == BLOCKS and count(other, "hit_blocks_secondary") == 0
    assert not root.exists(), "what was a mount point is not made again"
    aside.rename(root)
    other.submit(EngineRequest("new", unique_tokens("new", 100), 1))
    assert ends(other, "new")["new"].error is None
    until(other, 100 // SIZE, "blocks_saved")
    assert_hits_all(engine(start, root), expected)
