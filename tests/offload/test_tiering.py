"""An engine whose disk fails, hangs or lies: it answers right, and it goes on."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvconn.config import Limits
from kvconn.engine.trace import TraceRequest
from kvconn.errors import ConfigError
from kvconn.offload import lookups
from kvconn.offload.events import BlockRemoved, BlockStored
from kvconn.offload.keys import Identity
from kvconn.offload.tiers.base import SecondaryTier
from kvconn.offload.tiers.fs import FsTier
from kvconn.offload.tiers.host import HostTier
from tests.offload.local import BLOCK_BYTES, SIZE, LocalEngine, expected_tokens, keys_in, offload
from tests.support import wait_until

REQUESTS = [TraceRequest(f"r{n}", tuple((n * 50 + k) % 512 for k in range(100)), 2) for n in range(6)]
BLOCKS = 6 * (100 // SIZE)
Start = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    return expected_tokens(REQUESTS)


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[LocalEngine] = []

    def start(root: Path, blocks: int = 64, **extra: Any) -> LocalEngine:
        made.append(LocalEngine(offload(blocks, root=root, **extra), num_blocks=16))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def filled(start: Start, root: Path) -> None:
    """Files of every prompt's blocks."""
    engine = start(root)
    engine.run(REQUESTS)
    assert engine.count("offload_blocks_saved") == BLOCKS


def test_a_second_engine_hits_what_the_first_stored(start: Start, tmp_path: Path, expected: Any) -> None:
    filled(start, tmp_path)
    second = start(tmp_path, kvconn={"lookup": 60.0})
    second.run(REQUESTS)
    assert second.tokens == expected
    assert second.count("offload_hit_blocks_secondary") == BLOCKS and second.count("offload_blocks_stored") == 0


def test_a_torn_file_and_changed_blocks_are_misses_and_the_request_is_computed(
    start: Start, tmp_path: Path, expected: Any
) -> None:
    filled(start, tmp_path)
    for number, path in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(path.read_bytes())
        for at in range(len(content) - BLOCK_BYTES, 0, -BLOCK_BYTES):
            content[at] ^= 1
        path.write_bytes(content if number % 2 else content[:100])
    second = start(tmp_path, kvconn={"lookup": 60.0}, policy="fail")
    second.run(REQUESTS)
    assert second.tokens == expected and set(second.errors.values()) == {None}
    assert second.count("offload_fetches_failed") > 0 and second.count("offload_hit_blocks_secondary") == 0
    assert second.count("offload_blocks_stored") > 0


def test_a_full_disk_loses_saves_only(start: Start, tmp_path: Path, expected: Any, mocker: Any) -> None:
    mocker.patch("kvconn.offload.tiers.fs.os.writev", side_effect=OSError(errno.ENOSPC, "disk full"))
    engine = start(tmp_path)
    engine.run(REQUESTS)
    assert engine.tokens == expected
    assert engine.count("offload_saves_failed") == engine.count("offload_tier_errors") == BLOCKS
    assert engine.count("offload_blocks_stored") == BLOCKS and list(tmp_path.rglob("*.kv")) == []


def test_a_disk_that_hangs_holds_up_neither_requests_nor_the_end(
    start: Start, tmp_path: Path, expected: Any, mocker: Any
) -> None:
    filled(start, tmp_path)
    go = threading.Event()
    hung = mocker.patch.object(FsTier, "present", side_effect=lambda keys: go.wait(60) and [False] * len(keys))
    mocker.patch.object(FsTier, "write_all", side_effect=lambda keys, data: go.wait(60) and [True] * len(keys))
    engine = start(tmp_path, kvconn={"lookup": 0.05, "store": 0.2})
    engine.run(REQUESTS)
    assert engine.tokens == expected
    assert engine.count("offload_lookups_timed_out") == 1 and hung.call_count == 1, "then it is left alone for a while"
    assert engine.count("offload_saves_failed") == engine.count("offload_blocks_stored") > 0
    engine.close()
    go.set()


def test_a_quick_disk_answers_the_question_that_asks_it(mocker: Any) -> None:
    """Else every request would wait for a step."""
    mocker.patch.object(lookups, "LIMITS", Limits(lookup_inline=20.0))
    mocker.patch.object(DictTier, "kept", {b"a": b"", b"c": b""})
    asked = lookups.Lookups([DictTier({}, Identity("n", ("s",)), 1)], 8)
    try:
        asked.ask("r", [b"a", b"b", b"c"], 1.0)
        assert asked.soon("r", 0.0) == {b"a", b"c"}
    finally:
        asked.close()


def test_answers_that_nobody_wants_any_more_are_kept_by_nobody() -> None:
    asked = lookups.Lookups([DictTier({}, Identity("n", ("s",)), 1)], 8)
    try:
        for n in range(20):
            asked.ask(f"r{n}", [b"a"], 1.0)
            wait_until(lambda: len(asked._table) == 0, what="the answer")
            asked.forget(f"r{n}")
        assert len(asked._table._ended) <= 1 and len(asked) == 0
    finally:
        asked.close()


def test_a_slow_disk_is_not_waited_for_where_it_is_asked(mocker: Any) -> None:
    go = threading.Event()
    mocker.patch.object(lookups, "LIMITS", Limits(lookup_inline=0.0))
    mocker.patch.object(DictTier, "present", lambda self, keys: go.wait(60) and [False] * len(keys))
    asked = lookups.Lookups([DictTier({}, Identity("n", ("s",)), 1)], 8)
    try:
        asked.ask("r", [b"a"], 1.0)
        assert asked.soon("r", 0.0) is None
    finally:
        go.set()
        asked.close()


def test_a_read_that_hangs_touches_no_slot_when_it_comes_back(
    start: Start, tmp_path: Path, expected: Any, mocker: Any
) -> None:
    filled(start, tmp_path)
    go, real = threading.Event(), FsTier.read

    def late(self: FsTier, key: bytes) -> bytes | None:
        assert go.wait(60)
        return real(self, key)

    mocker.patch.object(FsTier, "read", late)
    filling = mocker.spy(HostTier, "write")
    engine = start(tmp_path, kvconn={"lookup": 60.0, "load": 0.2})
    engine.run(REQUESTS)
    assert engine.tokens == expected and engine.count("offload_fetches_failed") > 0
    go.set()
    engine.close()  # joins the threads
    assert filling.call_count == 0


def test_a_slot_that_was_copied_too_late_is_not_saved(mocker: Any) -> None:
    """The job was given up, so that the slot may have been another block's."""
    go, real = threading.Event(), HostTier.read_all
    mocker.patch.object(HostTier, "read_all", lambda self, slots, length: go.wait(60) and real(self, slots, length))
    mocker.patch.object(DictTier, "kept", {})
    engine = LocalEngine(out_of_tree(), num_blocks=16)
    try:
        engine.worker_half.worker._limits = msgspec.structs.replace(engine.worker_half.worker._limits, store=0.2)
        engine.run(REQUESTS[:1])
        assert engine.count("offload_saves_failed") == 100 // SIZE
        go.set()
    finally:
        engine.close()
    assert DictTier.kept == {}


def test_what_went_as_soon_as_it_was_stored_is_told_in_this_order(start: Start, tmp_path: Path, mocker: Any) -> None:
    engine = start(tmp_path)
    worker, told = engine.worker_half.worker, set[str]()

    def taken(self: FsTier) -> list[bytes]:
        done = {fact.id for fact in worker._facts if fact.id.startswith("save:")} - told
        told.update(done)
        return [bytes.fromhex(id.removeprefix("save:")) for id in sorted(done)]

    mocker.patch.object(FsTier, "take_removed", taken)
    engine.run(REQUESTS[:1])
    gone = [event.block_hashes[0] for event in engine.events if isinstance(event, BlockRemoved)]
    assert gone
    for key in gone:
        kinds = [type(event) for event in engine.events if event.medium == "fs" and event.block_hashes == (key,)]
        assert kinds == [BlockStored, BlockRemoved]


def test_every_tier_tells_what_it_stored_and_removed(start: Start, tmp_path: Path) -> None:
    engine = start(tmp_path, blocks=8, max_bytes=20_000)
    engine.run(REQUESTS)
    there: dict[str, set[bytes]] = {"host": set(), "fs": set()}
    for event in engine.events:
        if isinstance(event, BlockStored):
            assert event.block_size == len(event.token_ids) == SIZE and event.block_hashes
            there[event.medium].update(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved) and event.block_hashes
            there[event.medium].difference_update(event.block_hashes)
    assert keys_in(tmp_path) == there["fs"] and there["fs"]
    assert engine.connector is not None and len(engine.connector.scheduler.index) == len(there["host"]) == 8


class DictTier(SecondaryTier):
    """A tier from elsewhere."""

    name = "dict"
    kept: dict[bytes, bytes] = {}  # noqa: RUF012 - shared by its instances, as a real tier's medium is

    def __init__(self, settings: Mapping[str, Any], identity: Identity, block_bytes: int) -> None:
        if settings.get("bad"):
            raise ConfigError("settings.bad: expected not to be")

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.kept for key in keys]

    def write(self, key: bytes, data: bytes) -> bool:
        self.kept[key] = data
        return True

    def read(self, key: bytes) -> bytes | None:
        return self.kept.get(key)


def out_of_tree(**tier: Any) -> dict[str, Any]:
    entry = {"type": "DictTier", "module_path": "tests.offload.test_tiering"} | tier
    return offload(spec_name="TieringOffloadingSpec", secondary_tiers=[entry], kvconn={"lookup": 60.0})


def test_a_tier_from_elsewhere_is_used_like_ours(expected: Any) -> None:
    for _ in range(2):
        engine = LocalEngine(out_of_tree(), num_blocks=16)
        try:
            engine.run(REQUESTS)
        finally:
            engine.close()
        assert engine.tokens == expected
    assert engine.count("offload_hit_blocks_secondary") == BLOCKS


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"type": "NoTier"}, r"\[0\]\.type: expected the name of a .*SecondaryTier"),
        ({"module_path": "no.such.module"}, r"\[0\]\.module_path: cannot import 'no.such.module'"),
        ({"settings": {"bad": True}}, r"\[0\]\.settings\.bad: expected not to be"),
        ({"setings": {}}, r"\[0\]\.setings: unknown key \(did you mean 'settings'\?\)"),
    ],
)
def test_a_tier_that_cannot_be_made_is_named(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LocalEngine(out_of_tree(**entry), num_blocks=16)
