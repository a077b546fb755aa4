"""``kvconn plan``: what it says of described pairs and of a running producer, and with which exit code."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from kvconn.cli.app import app
from kvconn.geometry import Place
from kvconn.nixl.shape import Shape, cache_of, metadata_of, parse_shape
from kvconn.nixl.sideserver import HandshakeServer
from kvconn.nixl.survey import factors_of
from kvconn.nixl.wire import HandshakePayload, KvconnHandshake
from tests.support import free_port

GQA = {"layers": 4, "kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
MLA = {"layers": 4, "kv_heads": 1, "head_size": 576, "packing": "latent"}


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def pair(p: dict[str, Any], d: dict[str, Any], *more: object) -> Any:
    return run("--p", json.dumps(p), "--d", json.dumps(d), *more)


def told(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["works"] is True
    survey: dict[str, Any] = found["survey"]
    return survey


class TestDescribed:
    def test_a_pair_that_works_is_a_table_and_0(self, tmp_path: Path) -> None:
        (tmp_path / "p.json").write_text(json.dumps({**GQA, "tp": 4}))
        (tmp_path / "d.json").write_text(json.dumps({**GQA, "tp": 2}))
        result = run("--p", tmp_path / "p.json", "--d", tmp_path / "d.json")
        assert result.exit_code == 0, result.output
        rows = [line.split() for line in result.stdout.splitlines() if "pp0" in line]
        assert [" ".join(row) for row in rows] == [
            "│ pp0 tp0 │ pp0 tp0 │ 0-1 │ 4 │ all │ 2.1 │ 256 │ 1 │",
            "│ pp0 tp0 │ pp0 tp1 │ 2-3 │ 4 │ all │ 2.1 │ 256 │ 1 │",
            "│ pp0 tp1 │ pp0 tp2 │ 4-5 │ 4 │ all │ 2.1 │ 256 │ 1 │",
            "│ pp0 tp1 │ pp0 tp3 │ 6-7 │ 4 │ all │ 2.1 │ 256 │ 1 │",
        ]

    def test_bytes_are_those_of_the_prompt(self) -> None:
        survey = told(pair({**GQA, "pp": 2, "block_size": 8}, {**GQA, "tp": 2}, "--json", "--tokens", 1000))
        read = {}
        for edge in survey["edges"]:
            read[edge["reader"]["tp"]] = read.get(edge["reader"]["tp"], 0) + edge["nbytes"]
        whole = 1000 * 4 * 8 * 64 * 2 * 2
        assert read == {0: whole // 2, 1: whole // 2}

    def test_ranks_that_are_only_told_are_named(self) -> None:
        survey = told(pair({**MLA, "tp": 2}, MLA, "--json"))
        assert [(edge["source"]["tp"], edge["heads"], edge["readers"]) for edge in survey["edges"]] == [
            (0, [0, 0], 1),
            (1, None, 1),
        ]
        assert "only told" in pair({**MLA, "tp": 2}, MLA).stdout

    def test_blocks_that_need_putting_in_order_are_told(self) -> None:
        result = pair({**GQA, "layout": "LBNHC"}, GQA)
        assert result.exit_code == 0
        assert "D puts heads and tokens in order afterwards" in result.stdout

    def test_a_pair_that_cannot_work_is_every_field_that_differs_and_1(self) -> None:
        result = pair({**GQA, "dtype": "fp8", "tp": 8}, {**GQA, "head_size": 128, "tp": 2})
        assert result.exit_code == 1
        rows = [line.split("│")[1:4] for line in result.stdout.splitlines() if "│" in line]
        assert [[cell.strip() for cell in row] for row in rows][:2] == [
            ["kv dtype", "bfloat16", "fp8"],
            ["head size", "128", "64"],
        ]
        found = json.loads(pair({**GQA, "tp": 8, "dtype": "fp8"}, GQA, "--json").stdout)
        assert found["works"] is False
        assert found["survey"]["edges"] == []

    def test_sizes_that_do_not_divide_are_named(self) -> None:
        heads = {**GQA, "kv_heads": 12}
        result = pair({**heads, "tp": 3}, {**heads, "tp": 2}, "--json")
        assert result.exit_code == 1
        (problem,) = json.loads(result.stdout)["survey"]["problems"]
        assert (problem["field"], problem["ours"], problem["theirs"]) == ("tp size", "2", "3")

    def test_the_picture_has_a_box_per_rank_and_a_line_per_edge(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.svg"
        assert pair({**MLA, "tp": 4}, {**MLA, "tp": 2}, "--svg", file).exit_code == 0
        root = ET.fromstring(file.read_text())
        svg = "{http://www.w3.org/2000/svg}"
        labels = [text.text for text in root.iter(f"{svg}text")]
        assert [label for label in labels if label and ":" in label] == [
            "P: pp0 tp0", "P: pp0 tp1", "P: pp0 tp2", "P: pp0 tp3", "D: pp0 tp0", "D: pp0 tp1",
        ]  # fmt: skip
        lines = list(root.iter(f"{svg}line"))
        assert [("stroke-dasharray" in line.attrib) for line in lines] == [False, True, False, True]

    def test_no_picture_is_drawn_of_a_pair_that_cannot_work(self, tmp_path: Path) -> None:
        file = tmp_path / "plan.svg"
        assert pair({**GQA, "dtype": "fp8"}, GQA, "--svg", file).exit_code == 1
        assert not file.exists()


def kinds(kind: str, **more: Any) -> dict[str, Any]:
    """Every second layer of that kind."""
    return {**GQA, "groups": [{"layers": [0, 2]}, {"layers": [1, 3], "kind": kind, **more}]}


WINDOWS = kinds("window", window=128)["groups"]
ROW = 16 * 8 * 64 * 2 * 2  # bytes of a block of GQA
#: P, D, and the fields that are named
IMPOSSIBLE: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "tp that does not divide": ({**GQA, "kv_heads": 6, "tp": 3}, {**GQA, "kv_heads": 6, "tp": 2}, ["tp size"]),
    "tp above 16": ({**GQA, "tp": 32}, GQA, ["tp size"]),
    "pp above 64": ({**GQA, "layers": 80, "pp": 80}, {**GQA, "layers": 80}, ["pp size"]),
    "dcp that does not divide": ({**MLA, "tp": 6, "dcp": 2}, {**MLA, "tp": 6, "dcp": 3}, ["dcp size"]),
    "turns that do not divide": (
        {**MLA, "block_size": 12, "tp": 2, "dcp": 2, "dcp_interleave": 3},
        {**MLA, "block_size": 12, "tp": 2, "dcp": 2, "dcp_interleave": 2},
        ["dcp interleave"],
    ),
    "replicated pcp on D": (GQA, {**GQA, "pcp": 2}, ["pcp size"]),
    "dtype": ({**GQA, "dtype": "fp8"}, GQA, ["kv dtype"]),
    "kv heads": ({**GQA, "kv_heads": 4}, GQA, ["kv heads"]),
    "head size": ({**GQA, "head_size": 128}, GQA, ["head size", "block length of layers.0"]),
    "fewer layers on P": ({**GQA, "layers": 3}, GQA, ["layers", "layer layers.3"]),
    "more layers on P": ({**GQA, "layers": 5}, GQA, ["layers"]),
    "other names": ({**GQA, "names": "model.{}"}, GQA, ["layer layers.0"]),
    "packing": (MLA, {**MLA, "packing": "kv"}, ["packing", "layer layers.0"]),
    "a longer window on D": (kinds("window", window=128), kinds("window", window=4096), ["tokens kept of layers.1"]),
    "a window, blocks larger on D": (
        kinds("window", window=128), {**kinds("window", window=128), "block_size": 32}, ["block size of layers.1"],
    ),
    "a window, blocks that do not divide": (
        {**kinds("window", window=128), "block_size": 24}, kinds("window", window=128), ["block size of layers.1"],
    ),
    "a window, dcp on D": (
        {**MLA, "groups": WINDOWS, "tp": 2}, {**MLA, "groups": WINDOWS, "tp": 2, "dcp": 2}, ["block size of layers.1"],
    ),
    "a window on P alone": (kinds("window", window=128), GQA, ["tokens kept of layers.1"]),
    "state on P alone": (kinds("state", state_bytes=[ROW]), GQA, ["tokens kept of layers.1"]),
    "state on D alone": (GQA, kinds("state", state_bytes=[ROW]), ["tokens kept of layers.1"]),
    "state of another size": (
        kinds("state", state_bytes=[8, 16]), kinds("state", state_bytes=[8, 24]), ["state of layers.1"],
    ),
    "state in fewer tensors": (
        kinds("state", state_bytes=[8, 16]), kinds("state", state_bytes=[8]), ["tensors of layers.1"],
    ),
    "state, tp 2 to 1": (
        {**kinds("state", state_bytes=[8]), "tp": 2}, kinds("state", state_bytes=[8]), ["share of layers.1"],
    ),
    "state, tp 1 to 2": (
        kinds("state", state_bytes=[8]), {**kinds("state", state_bytes=[8]), "tp": 2}, ["share of layers.1"],
    ),
    "many at once": (
        {**GQA, "dtype": "fp8", "kv_heads": 16}, {**GQA, "pcp": 2, "tp": 8}, ["kv dtype", "kv heads", "pcp size"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_each_impossible_pair_is_1_and_names_what_is_in_the_way(name: str) -> None:
    p, d, fields = IMPOSSIBLE[name]
    result = pair(p, d, "--json")
    assert result.exit_code == 1, result.output
    problems = json.loads(result.stdout)["survey"]["problems"]
    assert [problem["field"] for problem in problems] == fields
    assert all(problem["hint"] and problem["ours"] != problem["theirs"] for problem in problems)
    assert "this pair cannot exchange KV" in pair(p, d).stdout


@pytest.mark.parametrize(
    ("p", "d"),
    [
        (kinds("window", window=4096), kinds("window", window=128)),
        (GQA, {**kinds("window", window=128), "block_size": 32}),
        ({**kinds("window", window=128), "block_size": 32}, kinds("window", window=128)),
    ],
    ids=["a longer window", "everything, in whatever blocks", "longer blocks"],
)
def test_who_keeps_more_than_is_seen_can_be_read(p: dict[str, Any], d: dict[str, Any]) -> None:
    assert told(pair(p, d, "--json"))["edges"]


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--d", json.dumps(GQA)], "--p: expected the engine that is read"),
            (["--p", "/no/such/file", "--d", json.dumps(GQA)], "--p: expected a JSON object or a readable file"),
            (["--p", "{", "--d", json.dumps(GQA)], "--p: not JSON"),
            (["--p", '{"layers": 4}', "--d", json.dumps(GQA)], "--p.kv_heads: missing"),
            (["--p", json.dumps({**GQA, "tpp": 2}), "--d", json.dumps(GQA)], "did you mean 'tp'?"),
            (["--p", json.dumps({**GQA, "dtype": "bf17"}), "--d", json.dumps(GQA)], "--p.dtype: expected one of"),
            (["--p", json.dumps({**GQA, "tp": 3}), "--d", json.dumps(GQA)], "--p.tp: expected to divide 8 KV heads"),
            (["--p", json.dumps({**GQA, "pp": 5}), "--d", json.dumps(GQA)], "--p.pp: expected at most one stage"),
            (["--from", "nowhere", "--d", json.dumps(GQA)], "--from: expected host:port"),
            (["--from", "127.0.0.1:99999999999", "--d", json.dumps(GQA)], "--from: expected host:port"),
            (["--p", json.dumps(GQA), "--d", json.dumps(GQA), "--svg", "/no/such/dir/x.svg"], "--svg: cannot write"),
        ],
    )
    def test_2_and_what_is_wrong(self, arguments: list[str], said: str) -> None:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert said in result.stderr

    def test_groups_say_what_is_wrong_with_them(self) -> None:
        groups = [{"layers": [0, 1], "kind": "window"}, {"layers": [1, 2, 3], "state_bytes": [8]}]
        result = pair({**GQA, "groups": groups}, GQA)
        assert result.exit_code == 2
        for said in ("groups: expected each of layers 0..3", "groups[0].window: expected", "groups[1].state_bytes"):
            assert said in result.stderr


def payload(shape: Shape, place: Place, **changes: Any) -> bytes:
    metadata = msgspec.structs.replace(metadata_of(shape, place), agent_metadata=b"agent", **changes)
    ours = KvconnHandshake(factors=factors_of(shape)) if metadata.kvconn is not None else None
    return msgspec.msgpack.encode(HandshakePayload("hash", msgspec.msgpack.encode(metadata), ours))


@pytest.fixture
def serve() -> Iterator[Any]:
    """Serves the ranks of a description, as a running engine does, and says where."""
    servers: list[HandshakeServer] = []

    def start(described: dict[str, Any], **changes: Any) -> str:
        shape = parse_shape(described, "p")
        side, port = shape.side, free_port()
        ranks = {(pp, tp): payload(shape, Place(pp, tp), **changes) for pp in range(side.pp) for tp in range(side.tp)}
        servers.append(HandshakeServer("127.0.0.1", port, ranks))
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.close()


class TestLive:
    def test_a_running_engine_is_asked_for_all_its_ranks(self, serve: Any) -> None:
        live = told(run("--from", serve({**GQA, "tp": 2, "pp": 2}), "--d", json.dumps(GQA), "--json"))
        assert live == told(pair({**GQA, "tp": 2, "pp": 2}, GQA, "--json"))
        assert len(live["edges"]) == 4

    def test_a_running_engine_of_another_model_is_1_with_the_fields(self, serve: Any) -> None:
        result = run("--from", serve({**GQA, "kv_heads": 4}), "--d", json.dumps(GQA), "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["survey"]["problems"][0]["field"] == "kv heads"

    def test_a_stock_engine_does_not_say_its_sizes_so_they_must_be_described(self, serve: Any) -> None:
        address = serve({**GQA, "tp": 2}, kvconn=None)
        result = run("--from", address, "--d", json.dumps(GQA))
        assert result.exit_code == 2
        assert "describe it too" in result.stderr
        found = told(run("--from", address, "--p", json.dumps({**GQA, "tp": 2}), "--d", json.dumps(GQA), "--json"))
        assert [edge["source"]["tp"] for edge in found["edges"]] == [0, 1]

    def test_ranks_of_two_engines_are_not_taken_for_one(self) -> None:
        shape = parse_shape({**GQA, "tp": 2}, "p")
        ranks = {(0, tp): payload(shape, Place(0, tp), engine_id=f"life {tp}") for tp in range(2)}
        server = HandshakeServer("127.0.0.1", port := free_port(), ranks)
        try:
            result = run("--from", f"127.0.0.1:{port}", "--d", json.dumps(GQA))
        finally:
            server.close()
        assert result.exit_code == 1
        assert "ranks of 2 engines answered" in result.stderr

    def test_who_answers_wrongly_is_named_and_1(self) -> None:
        server = HandshakeServer("127.0.0.1", port := free_port(), {(0, 0): b"rubbish"})
        try:
            result = run("--from", f"127.0.0.1:{port}", "--d", json.dumps(GQA))
        finally:
            server.close()
        assert result.exit_code == 1
        assert f"peer 127.0.0.1:{port}, handshake payload: malformed" in result.stderr


def test_a_description_registers_what_an_engine_of_that_shape_would() -> None:
    shape = parse_shape({**GQA, "tp": 2, "kv": "apart", "layout": "BLHNC", "kernel_block_size": 8}, "d")
    cache = cache_of(shape, Place(0, 1))
    assert len(cache.regions) == 8
    assert cache.kernel_blocks == 2
    assert {region.length for region in cache.regions} == {4 * 8 * 64 * 2}
    assert len({region.base for region in cache.regions}) == 8


def test_where_heads_are_outside_of_layers_a_head_is_a_row_of_all_layers() -> None:
    cache = cache_of(parse_shape({**GQA, "layout": "BHLNC"}, "d"), Place(0, 0))
    row = 16 * 64 * 2 * 2
    assert [region.base - cache.regions[0].base for region in cache.regions] == [0, row, 2 * row, 3 * row]
    assert {region.stride for region in cache.regions} == {8 * 4 * row}
    assert {region.cells.head_stride for region in cache.regions if region.cells is not None} == {4 * row}
