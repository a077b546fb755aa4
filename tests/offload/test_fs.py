"""The file tier over a real directory: what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvconn.config import FsTierSettings, ModelView, ParallelConfig
from kvconn.errors import ConfigError
from kvconn.offload.keys import identity_of
from kvconn.offload.tiers.fs import HEADER, TEMPORARY, FsTier

BLOCK = 1000
MODEL = ModelView("m", "float16", 2, 1, 64, 16)
DATA = bytes(range(250)) * 4


def tier(
    root: Path, *, rank: int | None = 0, tp: int = 1, pcp: int = 1, max_bytes: int = 1 << 20, name: str = "m"
) -> FsTier:
    model = ModelView(name, "float16", 2, 1, 64, 16)
    identity = identity_of(model, ParallelConfig(tp=tp, pcp=pcp), 16, rank)
    return FsTier(FsTierSettings("fs", str(root), max_bytes), identity, BLOCK)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_was_written_is_read_also_after_a_restart(tmp_path: Path) -> None:
    assert tier(tmp_path).write(b"k", DATA)
    assert tier(tmp_path).read(b"k") == DATA and tier(tmp_path).read(b"other") is None
    assert tier(tmp_path, rank=None).present([b"k", b"other"]) == [True, False]
    assert [path.name.startswith(TEMPORARY) for path in files(tmp_path)] == [False]


def test_another_topology_model_or_rank_does_not_find_it(tmp_path: Path) -> None:
    tier(tmp_path).write(b"k", DATA)
    for other in (tier(tmp_path, tp=2), tier(tmp_path, tp=2, rank=1), tier(tmp_path, name="m2")):
        assert other.read(b"k") is None
    tier(tmp_path, tp=2, rank=0).write(b"k", DATA)
    assert tier(tmp_path, tp=2, rank=None).present([b"k"]) == [False], "rank 1 has not stored its share"
    tier(tmp_path, tp=2, rank=1).write(b"k", DATA)
    assert tier(tmp_path, tp=2, rank=None).present([b"k"]) == [True]


def test_replicas_have_one_share(tmp_path: Path) -> None:
    tier(tmp_path, pcp=8, rank=0).write(b"k", DATA)
    assert tier(tmp_path, pcp=8, rank=7).read(b"k") == DATA
    assert tier(tmp_path).read(b"k") == DATA, "one rank alone holds the same bytes as a replica"


@pytest.mark.parametrize(
    "where", ["magic", "checksum", "data", "cut in the header", "cut in the data", "longer", "empty"]
)
def test_a_torn_or_flipped_file_is_a_miss_and_removed(tmp_path: Path, where: str) -> None:
    one = tier(tmp_path)
    one.write(b"k", DATA)
    (path,) = files(tmp_path)
    content = bytearray(path.read_bytes())
    if where in ("magic", "checksum", "data"):
        content[{"magic": 0, "checksum": 12, "data": HEADER + 500}[where]] ^= 1
    elif where == "longer":
        content += b"x"
    else:
        content = content[: {"cut in the header": 20, "cut in the data": HEADER + 10, "empty": 0}[where]]
    path.write_bytes(content)
    assert one.read(b"k") is None and files(tmp_path) == []
    assert one.take_removed() == [b"k"] and one.take_removed() == []
    assert one.write(b"k", DATA) and one.read(b"k") == DATA


def test_a_file_under_another_keys_name_is_a_miss(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.write(b"k", DATA)
    one.write(b"\x6bb", DATA)
    first, second = files(tmp_path)
    shutil.copy(first, second)
    assert [one.read(b"k"), one.read(b"\x6bb")].count(None) == 1


def test_disk_full_leaves_no_file_and_the_next_write_works(tmp_path: Path, mocker: Any) -> None:
    one, real = tier(tmp_path), os.writev
    first = mocker.patch("kvconn.offload.tiers.fs.os.writev", side_effect=lambda fd, parts: real(fd, [parts[0][:20]]))
    then = mocker.patch("kvconn.offload.tiers.fs.os.write", side_effect=OSError(errno.ENOSPC, "disk full"))
    with pytest.raises(OSError, match="disk full"):
        one.write(b"k", DATA)
    mocker.stop(first), mocker.stop(then)
    assert files(tmp_path) == [] and one.read(b"k") is None
    assert one.write(b"k", DATA) and one.read(b"k") == DATA


def test_a_write_that_is_cut_short_goes_on(tmp_path: Path, mocker: Any) -> None:
    real = os.write
    mocker.patch("kvconn.offload.tiers.fs.os.writev", side_effect=lambda fd, parts: real(fd, parts[0][:20]))
    mocker.patch("kvconn.offload.tiers.fs.os.write", side_effect=lambda fd, data: real(fd, data[:300]))
    assert tier(tmp_path).write(b"k", DATA) and tier(tmp_path).read(b"k") == DATA


def test_a_read_that_is_cut_short_goes_on(tmp_path: Path, mocker: Any) -> None:
    """It is no torn file."""
    tier(tmp_path).write(b"k", DATA)
    real = os.read
    mocker.patch("kvconn.offload.tiers.fs.os.read", side_effect=lambda fd, count: real(fd, min(count, 300)))
    assert tier(tmp_path).read(b"k") == DATA


def test_each_of_the_sums_finds_what_the_other_may_not(tmp_path: Path, mocker: Any) -> None:
    """Words that change places leave the sum as it was; the checksum is blinded here."""
    swapped = tmp_path / "swapped", DATA[8:16] + DATA[:8] + DATA[16:]
    blind = tmp_path / "blind", bytes([DATA[0] ^ 1]) + DATA[1:]
    for root, damaged in (swapped, blind):
        root.mkdir()
        if root.name == "blind":
            mocker.patch("kvconn.offload.tiers.fs.zlib.crc32", return_value=0)
        tier(root).write(b"k", DATA)
        (path,) = files(root)
        path.write_bytes(path.read_bytes()[:HEADER] + damaged)
        assert tier(root).read(b"k") is None


def test_a_directory_that_vanished_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    one = tier(root)
    one.write(b"k", DATA)
    shutil.rmtree(root)
    assert one.read(b"k") is None and one.present([b"k"]) == [False]
    with pytest.raises(FileNotFoundError, match="is gone"):
        one.write(b"l", DATA)
    assert not root.exists()
    root.mkdir()
    assert one.write(b"l", DATA) and one.read(b"l") == DATA


def test_the_longest_unused_goes_and_the_bound_holds(tmp_path: Path) -> None:
    size = HEADER + BLOCK
    one = tier(tmp_path, max_bytes=16 * size)
    for n in range(16):
        one.write(b"%d" % n, DATA)
        os.utime(files_of(tmp_path, b"%d" % n), (n, n))
    assert one.read(b"0") == DATA
    one.write(b"new", DATA)
    left = [n for n in range(16) if one.read(b"%d" % n) is not None]
    assert 0 in left and 1 not in left and one.read(b"new") == DATA
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 16 * size
    assert one.take_removed()[0] == b"1"


def files_of(root: Path, key: bytes) -> Path:
    (found,) = [path for path in files(root) if path.stem == key.hex()]
    return found


def test_two_engines_may_write_one_key_at_once(tmp_path: Path) -> None:
    """Each writes its own temporary file: one of the renames is the last, and every read is whole or nothing."""
    tiers, wrong = [tier(tmp_path) for _ in range(2)], []

    def write(one: FsTier) -> None:
        for n in range(100):
            one.write(b"%d" % n, DATA)
            if one.read(b"%d" % n) != DATA:
                wrong.append(n)

    threads = [threading.Thread(target=write, args=(one,)) for one in tiers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(files(tmp_path)) == 100
    assert all(tier(tmp_path).read(b"%d" % n) == DATA for n in range(100))


WRITER = """
import sys
from pathlib import Path
from tests.offload.test_fs import DATA, tier
one, n = tier(Path(sys.argv[1])), 0
while True:
    one.write(b"%d" % n, DATA)
    n += 1
    if n == 20:
        print("twenty", flush=True)
"""


def test_kill_9_at_any_moment_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"twenty\n"
        writer.send_signal(signal.SIGKILL)
    one = tier(tmp_path)
    names = [path for path in files(tmp_path) if not path.name.startswith(TEMPORARY)]
    assert len(names) >= 20
    assert all(one.read(bytes.fromhex(path.stem)) == DATA for path in names)


def test_an_abandoned_temporary_file_is_swept(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.write(b"k", DATA)
    (path,) = files(tmp_path)
    old, young = path.with_name(f"{TEMPORARY}1-1"), path.with_name(f"{TEMPORARY}1-2")
    for temporary in (old, young):
        temporary.write_bytes(b"torn")
    os.utime(old, (0, 0))
    tier(tmp_path).write(b"l", DATA)
    assert not old.exists() and young.exists(), "the young one may be another engine's"


@pytest.mark.parametrize(
    ("root", "max_bytes", "problem"),
    [("/no/such/directory", 1 << 20, "root_dir: expected a directory"), ("/", 500, "max_bytes: expected at least one")],
)
def test_wrong_settings_are_config_errors(root: str, max_bytes: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        FsTier(FsTierSettings("fs", root, max_bytes), identity_of(MODEL, ParallelConfig(), 16, 0), BLOCK)


def test_repr_is_one_readable_line(tmp_path: Path) -> None:
    one = tier(tmp_path)
    assert repr(one) == f"FsTier({tmp_path} not scanned)"
    one.write(b"k", DATA)
    assert repr(one) == f"FsTier({tmp_path} {HEADER + len(DATA)}/1048576 bytes)"
