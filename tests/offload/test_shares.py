"""What several engines see of one directory: each other's blocks, all of them, and nothing that is not there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvconn.config import FsTierSettings
from kvconn.offload.keys import Identity
from kvconn.offload.tiers import shares
from kvconn.offload.tiers.fs import FsTier
from kvconn.offload.tiers.segments import length_of
from kvconn.offload.tiers.shares import RELIST, TEMPORARY

BLOCK = 64


def tier(
    root: Path, share: str | None = "s0", *, shares: tuple[str, ...] = ("s0",), max_bytes: int = 1 << 20
) -> FsTier:
    return FsTier(FsTierSettings("fs", str(root), max_bytes), Identity("n", shares, share), BLOCK)


def data_of(key: bytes) -> bytes:
    """What a key's bytes are, whoever writes them."""
    return key * (BLOCK // len(key))


def write(one: FsTier, *keys: bytes) -> None:
    assert one.write_all(keys, memoryview(b"".join(map(data_of, keys)))) == [True] * len(keys)


def segments(root: Path, share: str = "s0") -> list[Path]:
    """Oldest first, where one engine wrote."""
    return sorted((root / "n" / share).glob("*/*.kv"), key=lambda path: int(path.stem))


def test_a_block_is_there_when_all_shares_have_it(tmp_path: Path) -> None:
    names = ("s0", "s1")
    asked, *ranks = [tier(tmp_path, share, shares=names) for share in (None, *names)]
    write(ranks[0], b"a", b"b")
    assert asked.present([b"a", b"b"]) == [False, False]
    write(ranks[1], b"b")
    assert asked.present([b"a", b"b"]) == [False, True]
    write(ranks[1], b"a")
    assert asked.present([b"a", b"b", b"c"]) == [True, True, False]


def test_a_gap_that_another_engine_left_hides_what_lies_behind_it_for_some_looks_only(tmp_path: Path) -> None:
    reader, writer = tier(tmp_path), tier(tmp_path)
    write(writer, b"a")
    assert reader.present([b"a"]) == [True]
    write(writer, b"b")
    segments(tmp_path)[1].unlink()
    write(writer, b"c")
    answers = [reader.present([b"c"]) for _ in range(RELIST)]
    assert answers[-1] == [True] and reader.read(b"c") == data_of(b"c")
    write(writer, b"d")
    assert reader.present([b"d"]) == [True]


def test_a_file_that_another_engine_removed_is_a_miss_and_then_known_to_be_gone(tmp_path: Path) -> None:
    reader, writer = tier(tmp_path), tier(tmp_path)
    write(writer, b"a", b"b")
    assert reader.present([b"a"]) == [True]
    segments(tmp_path)[0].unlink()
    assert reader.read(b"a") is None and reader.present([b"a", b"b"]) == [False, False]
    assert reader.take_removed() == [], "whoever removed it tells"


def test_a_directory_that_is_gone_takes_its_blocks_along(tmp_path: Path) -> None:
    reader, writer = tier(tmp_path), tier(tmp_path)
    write(writer, b"a")
    assert reader.present([b"a"]) == [True]
    aside = tmp_path / "aside"
    (tmp_path / "n").rename(aside)
    assert reader.present([b"a"]) == writer.present([b"a"]) == [False]
    aside.rename(tmp_path / "n")
    assert reader.present([b"a"]) == [True]
    write(writer, b"b")
    assert len(segments(tmp_path)) == 2, "a number is given once"


def test_a_block_that_two_engines_wrote_is_found_in_the_other_file_when_one_is_gone(tmp_path: Path) -> None:
    reader, *pair = [tier(tmp_path) for _ in range(3)]
    for one in pair:
        one._publish([b"a"], memoryview(data_of(b"a")))
    assert reader.present([b"a"]) == [True] and len(segments(tmp_path)) == 2
    for path in segments(tmp_path):
        assert reader.read(b"a") == data_of(b"a")
        path.unlink()
    assert reader.read(b"a") is None


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    one = tier(tmp_path)
    write(one, b"a")
    (path,) = segments(tmp_path)
    for name in ("notes", "-1.kv", "x.kv", "0.txt"):
        path.with_name(name).write_bytes(b"x")
    (path.parent.parent / ("f" * 16)).write_bytes(b"a file")
    assert tier(tmp_path).present([b"a"]) == [True] and tier(tmp_path).read(b"a") == data_of(b"a")
    assert len(list(path.parent.iterdir())) == 5


def test_what_cannot_be_read_hides_no_other(tmp_path: Path, mocker: Any) -> None:
    broken, fine, real = tier(tmp_path), tier(tmp_path), os.listdir
    write(broken, b"a")
    write(fine, b"b")
    folder = tmp_path / "n" / "s0"
    os.mkfifo(folder / fine._writer / "7.kv")
    (folder / fine._writer / "8.kv").mkdir()

    def listdir(path: str) -> list[str]:
        if path == f"{folder}/{broken._writer}":
            raise PermissionError(path)
        return real(path)

    patched = mocker.patch("kvconn.offload.tiers.shares.os.listdir", side_effect=listdir)
    one = tier(tmp_path)
    assert [one.present([b"a", b"b"]) for _ in range(2)] == [[False, True]] * 2
    mocker.stop(patched)
    assert one.present([b"a", b"b"]) == [True, True], "it is listed as soon as that works"


def test_an_empty_directory_is_swept_and_its_writer_makes_it_again(tmp_path: Path) -> None:
    idle, other = tier(tmp_path), tier(tmp_path)
    write(idle, b"a")
    (path,) = segments(tmp_path)
    path.unlink()
    write(other, b"b")
    assert not path.parent.exists()
    write(idle, b"c")
    assert path.parent.exists() and [other.present([b"c"]) for _ in range(RELIST)][-1] == [True]


KEYS = [b"%02d" % n for n in range(12)]


class TwoEngines(RuleBasedStateMachine):
    """Any order of what two engines and accidents do to one directory. The model is the set of keys that were written
    since files were last removed: they are found; all others are right or missing. As are all that are written when
    some file was changed, for that one may say that it has them. Every look lists everything (RELIST is 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp())
        self.engines = [tier(self.root), tier(self.root)]
        self.sound: set[bytes] = set()
        self.changed = False

    @rule(who=st.integers(0, 1), keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def writes(self, who: int, keys: list[bytes]) -> None:
        write(self.engines[who], *keys)
        self.sound.update(() if self.changed else keys)

    @rule(who=st.integers(0, 1), key=st.sampled_from(KEYS))
    def reads(self, who: int, key: bytes) -> None:
        got = self.engines[who].read(key)
        assert got == data_of(key) or (got is None and key not in self.sound)

    @rule(who=st.integers(0, 1))
    def restarts(self, who: int) -> None:
        self.engines[who] = tier(self.root)

    @rule(which=st.integers(0, 99), where=st.integers(0, 999), how=st.sampled_from(["removed", "cut", "flipped"]))
    def is_damaged(self, which: int, where: int, how: str) -> None:
        there = segments(self.root)
        if not there:
            return
        self.sound.clear()
        path = there[which % len(there)]
        if how == "removed":
            path.unlink()
            return
        self.changed = True
        content = bytearray(path.read_bytes()) or bytearray(1)
        at = where % len(content)
        content[at] ^= 0x10
        path.write_bytes(content[:at] if how == "cut" else content)

    @invariant()
    def nothing_is_left_over(self) -> None:
        assert not list(self.root.glob(f"n/*/{TEMPORARY}/*"))

    def teardown(self) -> None:
        for one in (*self.engines, tier(self.root)):
            assert all(one.read(key) in (data_of(key), None) for key in KEYS)
        shutil.rmtree(self.root)


def test_two_engines_read_what_was_written_or_nothing(mocker: Any) -> None:
    mocker.patch.object(shares, "RELIST", 1)
    run_state_machine_as_test(TwoEngines, settings=settings(max_examples=60, deadline=None, derandomize=True))


def test_two_engines_keep_the_bound_between_them(tmp_path: Path) -> None:
    size = length_of(1, BLOCK)
    pair = [tier(tmp_path, max_bytes=32 * size) for _ in range(2)]
    for n in range(100):
        key = b"%04d" % n
        write(pair[n % 2], key)
        assert pair[1 - n % 2].read(key) == data_of(key)
        assert sum(os.path.getsize(path) for path in segments(tmp_path)) <= 34 * size
