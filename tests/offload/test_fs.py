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
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconn.config import FsTierSettings, ModelView, ParallelConfig
from kvconn.errors import ConfigError
from kvconn.offload.keys import identity_of
from kvconn.offload.tiers import segments
from kvconn.offload.tiers.fs import FsTier
from kvconn.offload.tiers.segments import BLOCKS_MAX, length_of
from kvconn.offload.tiers.shares import SUFFIX, TEMPORARY

BLOCK = 1000
MODEL = ModelView("m", "float16", 2, 1, 64, 16)
DATA = bytes(range(250)) * 4
#: bytes before the data of a file of one block, and of all of it
HEADER, FILE = length_of(1, 0), length_of(1, BLOCK)


def tier(
    root: Path, *, rank: int | None = 0, tp: int = 1, pcp: int = 1, max_bytes: int = 1 << 20, name: str = "m"
) -> FsTier:
    model = ModelView(name, "float16", 2, 1, 64, 16)
    identity = identity_of(model, ParallelConfig(tp=tp, pcp=pcp), 16, rank)
    return FsTier(FsTierSettings("fs", str(root), max_bytes), identity, BLOCK)


def write(one: FsTier, *keys: bytes) -> None:
    assert one.write_all(keys, memoryview(DATA * len(keys))) == [True] * len(keys)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_what_was_written_is_read_also_after_a_restart(tmp_path: Path) -> None:
    assert tier(tmp_path).write(b"k", DATA)
    assert tier(tmp_path).read(b"k") == DATA and tier(tmp_path).read(b"other") is None
    assert tier(tmp_path, rank=None).present([b"k", b"other"]) == [True, False]
    assert [path.suffix for path in files(tmp_path)] == [SUFFIX]


def test_blocks_that_are_written_together_are_one_file_and_each_is_read_alone(tmp_path: Path) -> None:
    one = tier(tmp_path)
    blocks = {b"%d" % n: bytes([n]) * (BLOCK - 1) for n in range(5)}
    assert one.write_all(list(blocks), memoryview(b"".join(blocks.values()))) == [True] * 5
    assert len(files(tmp_path)) == 1
    for reader in (one, tier(tmp_path)):
        assert all(reader.read(key) == blocks[key] for key in reversed(blocks))


def test_only_what_is_not_there_is_written(tmp_path: Path) -> None:
    one, other = tier(tmp_path), tier(tmp_path)
    write(one, b"a", b"b", b"a")
    before = files(tmp_path)
    assert before[0].stat().st_size == length_of(2, BLOCK)
    write(other, b"b", b"a")
    assert files(tmp_path) == before
    write(other, b"b", b"c")
    (new,) = set(files(tmp_path)) - set(before)
    assert new.stat().st_size == FILE


def test_what_lies_in_a_file_that_was_removed_is_written_again(tmp_path: Path) -> None:
    one = tier(tmp_path)
    write(one, b"a", b"b")
    files(tmp_path)[0].unlink()
    write(one, b"b", b"a")
    assert one.read(b"a") == one.read(b"b") == DATA


def test_a_file_has_few_blocks_and_a_sixteenth_of_the_bound_at_most(tmp_path: Path) -> None:
    roomy, tight = tmp_path / "roomy", tmp_path / "tight"
    for root, max_bytes, size in ((roomy, 1 << 30, BLOCKS_MAX), (tight, 48 * FILE, 3)):
        root.mkdir()
        one = tier(root, max_bytes=max_bytes)
        assert one.batch == size
        keys = [b"%d" % n for n in range(2 * size)]
        write(one, *keys[:size])
        write(one, *keys[size:])
        assert [path.stat().st_size for path in files(root)] == [length_of(size, BLOCK)] * 2
        assert all(one.read(key) == DATA for key in keys)


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


TORN = [
    "magic",
    "count",
    "digest",
    "key",
    "sum",
    "length",
    "data",
    "cut in the header",
    "cut in the data",
    "longer",
    "empty",
]


@pytest.mark.parametrize("where", TORN)
def test_a_torn_or_flipped_file_is_a_miss_and_removed(tmp_path: Path, where: str) -> None:
    tier(tmp_path).write(b"k", DATA)
    (path,) = files(tmp_path)
    damage(path, where)
    one = tier(tmp_path)
    assert one.read(b"k") is None and files(tmp_path) == []
    assert one.write(b"k", DATA) and one.read(b"k") == DATA


def damage(path: Path, where: str) -> None:
    content = bytearray(path.read_bytes())
    places = {"magic": 0, "count": 8, "length": 12, "digest": 16, "key": 33, "sum": HEADER - 8, "data": HEADER + 500}
    if where in places:
        content[places[where]] ^= 1
    elif where == "longer":
        content += b"x"
    else:
        content = content[: {"cut in the header": 20, "cut in the data": HEADER + 10, "empty": 0}[where]]
    path.write_bytes(content)


@pytest.mark.parametrize("where", ["data", "cut in the header", "cut in the data", "empty"])
def test_a_file_that_is_damaged_under_an_engine_is_a_miss_and_its_blocks_are_told(tmp_path: Path, where: str) -> None:
    one = tier(tmp_path)
    write(one, b"k", b"l")
    (path,) = files(tmp_path)
    damage(path, where)
    assert one.read(b"l" if where == "cut in the data" else b"k") is None and files(tmp_path) == []
    assert sorted(one.take_removed()) == [b"k", b"l"] and one.take_removed() == []
    assert one.write(b"k", DATA) and one.read(b"k") == DATA


def test_a_file_of_another_share_is_a_miss(tmp_path: Path) -> None:
    ours, theirs = tier(tmp_path, tp=2, rank=0), tier(tmp_path, tp=2, rank=1)
    ours.write(b"k", DATA)
    (first,) = files(tmp_path)
    theirs.write(b"l", DATA)
    (second,) = set(files(tmp_path)) - {first}
    shutil.copy(first, second)
    later = tier(tmp_path, tp=2, rank=1)
    assert later.read(b"k") is None and later.read(b"l") is None and files(tmp_path) == [first]


def test_a_file_that_took_anothers_place_is_a_miss(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.write(b"k", DATA)
    one.write(b"l", DATA[::-1])
    first, second = files(tmp_path)
    shutil.copy(first, second)
    assert (one.read(b"k"), one.read(b"l")) == (DATA, None)


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path, mocker: Any) -> None:
    first, second = tier(tmp_path), tier(tmp_path)
    first.write(b"k", DATA), second.write(b"l", DATA)
    (path,), real = (
        [path for path in files(tmp_path) if first.read(b"k") and path.parent.name == first._writer],
        os.open,
    )

    def broken(name: str, *args: int) -> int:
        if name == str(path):
            raise OSError(errno.EIO, "broken")
        return real(name, *args)

    mocker.patch("kvconn.offload.tiers.shares.os.open", side_effect=broken)
    one = tier(tmp_path)
    assert one.present([b"k", b"l"]) == [False, True] and one.read(b"l") == DATA and path.exists()


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
    real = os.pread
    mocker.patch(
        "kvconn.offload.tiers.segments.os.pread", side_effect=lambda fd, count, at: real(fd, min(count, 30), at)
    )
    assert tier(tmp_path).read(b"k") == DATA


CHANGES = {
    "words changed places": DATA[8:16] + DATA[:8] + DATA[16:],
    "halves of a word changed places": DATA[4:8] + DATA[:4] + DATA[8:],
    "the highest bits of two words": DATA[:3]
    + bytes([DATA[3] ^ 0x80])
    + DATA[4:7]
    + bytes([DATA[7] ^ 0x80])
    + DATA[8:],
    "one more, one less": bytes([DATA[0] + 1]) + DATA[1:4] + bytes([DATA[4] - 1]) + DATA[5:],
    "zeros": bytes(len(DATA)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_sum_finds_what_a_plain_sum_would_not(tmp_path: Path, what: str) -> None:
    tier(tmp_path).write(b"k", DATA)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:HEADER] + CHANGES[what])
    assert tier(tmp_path).present([b"k"]) == [True] and tier(tmp_path).read(b"k") is None


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.binary(min_size=1, max_size=BLOCK), flips=st.sets(st.integers(0, 8 * BLOCK - 1), min_size=1, max_size=4))
def test_bits_that_flip_are_found_in_blocks_of_any_length(data: bytes, flips: set[int]) -> None:
    changed = bytearray(data)
    for bit in {flip % (8 * len(data)) for flip in flips}:
        changed[bit // 8] ^= 1 << bit % 8
    assert segments._sums(data, 1) != segments._sums(memoryview(changed), 1)


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
    one = tier(tmp_path, max_bytes=16 * FILE)
    for n in range(16):
        before = files(tmp_path)
        one.write(b"%d" % n, DATA)
        (new,) = set(files(tmp_path)) - set(before)
        os.utime(new, (n, n))
    assert one.read(b"0") == DATA
    one.write(b"new", DATA)
    left = [n for n in range(16) if one.read(b"%d" % n) is not None]
    assert 0 in left and 1 not in left and one.read(b"new") == DATA
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 16 * FILE
    assert one.take_removed()[0] == b"1"


def test_files_of_an_earlier_version_count_and_go_first(tmp_path: Path) -> None:
    one = tier(tmp_path, max_bytes=16 * FILE)
    one.write(b"k", DATA)
    (first,) = files(tmp_path)
    old = first.parent.parent / "6b" / "6b.kv"
    old.parent.mkdir()
    old.write_bytes(b"x" * 15 * FILE)
    os.utime(old, (0, 0))
    later = tier(tmp_path, max_bytes=16 * FILE)
    assert later.write(b"l", DATA) and not old.exists() and later.read(b"k") == later.read(b"l") == DATA


def test_what_cannot_be_removed_is_passed_over_and_the_bound_holds(tmp_path: Path, mocker: Any) -> None:
    one, real, kept = tier(tmp_path, max_bytes=16 * FILE), os.unlink, set[str]()

    def unlink(path: str) -> None:
        if path in kept:
            raise PermissionError(errno.EPERM, "kept", path)
        real(path)

    for n in range(16):
        one.write(b"%d" % n, DATA)
    for path in files(tmp_path):
        os.utime(path, (int(path.stem), int(path.stem)))
    oldest = min(files(tmp_path), key=lambda path: int(path.stem))
    folder = oldest.with_name("folder")
    folder.mkdir()
    os.utime(folder, (0, 0))
    kept.add(str(oldest))
    mocker.patch("kvconn.offload.tiers.fs.os.unlink", side_effect=unlink)
    assert one.write(b"new", DATA) and one.read(b"new") == one.read(b"0") == DATA
    assert one.take_removed() == [b"1", b"2"] and folder.exists()
    assert one.write(b"the sixteenth", DATA)
    kept.update(map(str, files(tmp_path)))
    with pytest.raises(OSError, match="cannot be removed"):
        one.write(b"more", DATA)
    assert len(files(tmp_path)) == 16
    kept.clear()
    assert one.write(b"then", DATA) and one.read(b"then") == DATA


def test_more_blocks_that_go_at_once_than_are_told_at_once_are_all_told(tmp_path: Path, mocker: Any) -> None:
    mocker.patch("kvconn.offload.tiers.fs.TOLD_MAX", 3)
    keys = [b"%d" % n for n in range(8)]
    write(tier(tmp_path), *keys)
    small = tier(tmp_path, max_bytes=2 * FILE)
    small.write(b"new", DATA)
    told = [small.take_removed() for _ in range(4)]
    assert list(map(len, told)) == [3, 3, 2, 0] and sorted(key for keys in told for key in keys) == keys


def test_a_block_that_comes_back_before_its_removal_was_told_is_not_told(tmp_path: Path) -> None:
    one = tier(tmp_path)
    write(one, b"a", b"b")
    damage(files(tmp_path)[0], "data")
    assert one.read(b"a") is None
    one.write(b"b", DATA)
    assert one.take_removed() == [b"a"]


def test_a_file_that_another_engine_is_writing_counts_and_stays(tmp_path: Path) -> None:
    one = tier(tmp_path, max_bytes=16 * FILE)
    for n in range(15):
        one.write(b"%d" % n, DATA)
    begun = files(tmp_path)[0].parent.parent / TEMPORARY / "0-0"
    begun.write_bytes(bytes(FILE))
    for path in files(tmp_path):
        if path != begun:
            os.utime(path, (2**33, 2**33))
    later = tier(tmp_path, max_bytes=16 * FILE)
    assert later.write(b"new", DATA) and begun.exists()
    assert sum(path.stat().st_size for path in files(tmp_path)) == 15 * FILE


def test_two_engines_may_write_one_key_at_once(tmp_path: Path) -> None:
    """Each writes files of its own, and every read is whole or nothing."""
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
    assert wrong == [] and 100 <= len(files(tmp_path)) <= 200
    assert all(tier(tmp_path).read(b"%d" % n) == DATA for n in range(100))


WRITER = """
import sys
from pathlib import Path
from tests.offload.test_fs import tier, write
one, n = tier(Path(sys.argv[1]), max_bytes=1 << 40), 0  # whenever it is killed, nothing has had to make room
while True:
    write(one, b"%d" % n, b"%d" % (n + 1))
    n += 2
    if n == 20:
        print("twenty", flush=True)
"""


def test_kill_9_at_any_moment_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"twenty\n"
        writer.send_signal(signal.SIGKILL)
    one = tier(tmp_path)
    whole = 2 * sum(path.suffix == SUFFIX for path in files(tmp_path))
    assert whole >= 20
    assert [one.read(b"%d" % n) for n in range(whole + 2)] == [DATA] * whole + [None] * 2


def test_an_abandoned_temporary_file_is_swept(tmp_path: Path) -> None:
    one = tier(tmp_path)
    one.write(b"k", DATA)
    (path,) = files(tmp_path)
    old, young = (path.parent.parent / TEMPORARY / name for name in ("1-1", "1-2"))
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
    assert repr(one) == f"FsTier({tmp_path} {FILE}/1048576 bytes)"
