"""Traces: what is accepted, what is refused and how it is named, and that sharing survives scaling."""

import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvconn.data.make_trace import make_trace
from kvconn.engine import trace
from kvconn.engine.trace import TraceRow, read_trace, to_requests, tokens_of_hash
from kvconn.errors import ConfigError

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 40, "hash_ids": [0, 7]}
REAL = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    return str(caught.value)


class TestReading:
    def test_a_row_keeps_its_line_and_blank_lines_are_skipped(self, tmp_path):
        rows = read_trace(written(tmp_path, GOOD, "", {**GOOD, "extra": "ignored"}))
        assert rows == [TraceRow(1, 5.0, 600, 40, (0, 7)), TraceRow(3, 5.0, 600, 40, (0, 7))]

    def test_timestamps_order(self, tmp_path):
        rows = read_trace(written(tmp_path, GOOD, {**GOOD, "timestamp": 1.5}))
        assert [row.line for row in rows] == [2, 1]

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"timestamp": "0"}, "timestamp: expected milliseconds"),
            ({"timestamp": -1}, "timestamp: expected milliseconds"),
            ({"timestamp": float("nan")}, "timestamp: expected milliseconds from the start, got nan"),
            ({"timestamp": float("inf")}, "timestamp: expected milliseconds from the start, got inf"),
            ({"timestamp": True}, "timestamp: expected milliseconds"),
            ({"input_length": 600.0}, "input_length: expected an integer 1..4194304, got 600.0"),
            ({"input_length": 0}, "input_length: expected an integer"),
            ({"input_length": 1 << 40}, "input_length: expected an integer"),
            ({"input_length": float("nan")}, "input_length: expected an integer 1..4194304, got nan"),
            ({"output_length": -3}, "output_length: expected an integer 1..4194304, got -3"),
            ({"output_length": None}, "output_length: expected an integer"),
            ({"output_length": 10**4000}, "output_length: expected an integer"),
            ({"hash_ids": "ab"}, "hash_ids: expected a list"),
            ({"hash_ids": [0]}, "hash_ids: expected 2 ids, one per started 512 tokens of input_length 600, got 1"),
            ({"hash_ids": [0, 1, 2]}, "hash_ids: expected 2 ids"),
            ({"hash_ids": [0, -1]}, "hash_ids[1]: expected an integer"),
            ({"hash_ids": [0, True]}, "hash_ids[1]: expected an integer"),
            ({"hash_ids": [0, 1 << 63]}, "hash_ids[1]: expected an integer"),
            ({"hash_ids": [[0], 1]}, "hash_ids[0]: expected an integer"),
        ],
    )
    def test_a_bad_value_is_named_with_line_and_field(self, tmp_path, change, said):
        assert f"line 2: {said}" in refused(written(tmp_path, GOOD, {**GOOD, **change}))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "line 1: not JSON"),
            ("[1]", "line 1: expected an object, got list"),
            ("{}", "line 1: hash_ids: missing"),
            ("[" * 100_000, "line 1: not JSON"),
            ('{"timestamp": ' + "9" * 5000 + "}", "line 1: not JSON"),
            ("\x00\x01", "line 1: not JSON"),
            ('"\\ud800"', "line 1: expected an object"),
        ],
    )
    def test_a_line_that_is_no_row_is_named(self, tmp_path, line, said):
        assert said in refused(written(tmp_path, line))

    def test_values_nested_deep_are_named(self, tmp_path):
        for depth in range(900, 1000):  # somewhere here parsing succeeds and repr() does not
            refused(
                written(
                    tmp_path,
                    '{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[%s]}' % ("[" * depth + "]" * depth),
                )
            )

    def test_several_problems_come_at_once_and_are_bounded(self, tmp_path):
        said = refused(written(tmp_path, *[{**GOOD, "input_length": -1, "output_length": -1}] * 50))
        assert "line 1: input_length" in said and "line 1: output_length" in said and "line 4" in said
        assert "line 5" not in said

    def test_lines_and_files_are_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(trace, "MAX_LINE_BYTES", 200)
        assert "line 1: expected at most 200 bytes" in refused(written(tmp_path, {**GOOD, "x": "y" * 300}))
        monkeypatch.setattr(trace, "MAX_FILE_BYTES", 1000)
        assert "expected at most 1000 bytes" in refused(written(tmp_path, *[GOOD] * 100))

    def test_a_device_without_end_is_refused(self):
        assert "line 1" in refused(Path("/dev/zero"))

    @pytest.mark.parametrize("path", ["/no/such/file", "/", "a\0b"])
    def test_what_cannot_be_opened_is_a_config_error(self, path):
        assert "cannot be read" in refused(Path(path))

    def test_an_empty_file_is_refused(self, tmp_path):
        assert "holds no requests" in refused(written(tmp_path, "", " "))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.dictionaries(st.sampled_from(sorted(GOOD)), JSON | st.just([0, 7]) | st.just(600))
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class TestHostileFiles:
    @FUZZ
    @given(content=st.binary(max_size=300))
    def test_any_bytes_end_in_rows_or_a_config_error(self, tmp_path, content):
        (tmp_path / "t").write_bytes(content)
        self.read(tmp_path / "t")

    @FUZZ
    @given(rows=st.lists(ROWS | JSON, min_size=1, max_size=4))
    def test_any_json_ends_in_rows_or_a_config_error(self, tmp_path, rows):
        self.read(written(tmp_path, *[json.dumps(row) for row in rows]))

    @FUZZ
    @given(at=st.integers(0, 80), byte=st.integers(0, 255))
    def test_a_flipped_byte_ends_in_rows_or_a_config_error(self, tmp_path, at, byte):
        content = bytearray(json.dumps(GOOD).encode())
        content[at % len(content)] = byte
        (tmp_path / "t").write_bytes(bytes(content))
        self.read(tmp_path / "t")

    def read(self, path: Path) -> None:
        try:
            rows = read_trace(path)
            requests = to_requests(rows, scale=32, block_size=16, vocab_size=256)
        except ConfigError as err:
            str(err).encode()  # can be printed
        else:
            assert all(request.prompt and request.output_length >= 1 for request in requests)


def row(line: int, input_length: int, *hash_ids: int, output_length: int = 64) -> TraceRow:
    return TraceRow(line, 0.0, input_length, output_length, hash_ids)


def requests_of(*rows: TraceRow, scale: int = 32) -> list[trace.TraceRequest]:
    return to_requests(rows, scale=scale, block_size=16, vocab_size=256)


class TestScaling:
    def test_lengths_are_divided_and_at_least_one(self):
        long, short = requests_of(row(1, 6758, *range(14), output_length=500), row(2, 5, 3, output_length=2))
        assert (len(long.prompt), long.output_length) == (6758 // 32, 15)
        assert (len(short.prompt), short.output_length) == (1, 1)
        assert long.id == "line-1"

    def test_a_hash_id_is_whole_blocks_and_always_the_same_tokens(self):
        (request,) = requests_of(row(1, 1024, 5, 9))
        assert request.prompt == tokens_of_hash(5, 16, 256) + tokens_of_hash(9, 16, 256)
        assert tokens_of_hash(5, 4, 256) == (159, 189, 203, 241)  # on every Python
        assert requests_of(row(1, 1024, 5, 9), scale=16)[0].prompt[:16] == tokens_of_hash(5, 16, 256)

    @pytest.mark.parametrize("scale", [0, -1, 3, 64, 512, 1000])
    def test_a_scale_that_splits_blocks_is_refused(self, scale):
        with pytest.raises(ConfigError, match=r"expected one of \[1, 2, 4, 8, 16, 32\], got"):
            requests_of(row(1, 100, 0), scale=scale)

    def test_too_many_tokens_are_refused_before_they_are_made(self):
        big = row(1, trace.MAX_LENGTH, *range(trace.MAX_LENGTH // 512))
        with pytest.raises(ConfigError, match="raise --scale"):
            requests_of(*[big] * 5, scale=1)

    @given(
        shared=st.lists(st.integers(0, 1000), max_size=6),
        tails=st.tuples(*[st.lists(st.integers(1001, 9999), min_size=1, max_size=4)] * 2),
        cuts=st.tuples(*[st.integers(0, 511)] * 2),
        scale=st.sampled_from([1, 8, 32]),
    )
    @settings(max_examples=100, deadline=None)
    def test_equal_ids_at_equal_positions_are_an_equal_prefix(self, shared, tails, cuts, scale):
        ids = [shared + tail for tail in tails]
        rows = [row(i, len(x) * 512 - cut, *x) for i, (x, cut) in enumerate(zip(ids, cuts, strict=True))]
        a, b = requests_of(*rows, scale=scale)
        common = len(shared) * 512 // scale
        assert a.prompt[:common] == b.prompt[:common]
        if tails[0][0] != tails[1][0] and min(len(a.prompt), len(b.prompt)) >= common + 8:
            assert a.prompt != b.prompt


class TestShippedTrace:
    def test_it_is_what_its_generator_makes(self):
        assert resources.files("kvconn.data").joinpath("trace-small.jsonl").read_text() == make_trace()

    def test_it_has_requests_enough_and_shares(self):
        with resources.as_file(resources.files("kvconn.data").joinpath("trace-small.jsonl")) as path:
            rows = read_trace(path)
        assert len(rows) >= 64
        assert all(row.hash_ids[0] == 0 for row in rows)
        ids = [hash_id for row in rows for hash_id in row.hash_ids]
        assert len(set(ids)) < 0.7 * len(ids)


def test_the_real_trace_reads_at_the_default_scale():
    if not REAL.exists():
        reason = f"no real trace at {REAL}"
        print(reason)
        pytest.skip(reason)
    rows = read_trace(REAL)
    requests = to_requests(rows[:64], scale=32, block_size=16, vocab_size=256)
    assert len(rows) == 3000
    assert max(len(request.prompt) for request in requests) <= 2724
