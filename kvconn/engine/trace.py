"""Request traces in Mooncake's JSONL format, made into prompts that share prefixes where the trace says so.

Rules
1. A trace file comes from outside (C9): whatever is in it, only :class:`~kvconn.errors.ConfigError` leaves this module,
   naming file, line and field. Bytes, line length, rows, values and the tokens made from them are bounded.
2. A row is ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), ``hash_ids``: one id per started block
   of 512 input tokens. Equal ids at equal positions are equal tokens. Other fields are ignored.
3. ``scale`` N divides lengths, 1 at least. A hash id stands for 512/N tokens drawn from a generator seeded by it and by
   nothing else, so that two files, runs or machines agree. 512/N is a multiple of the engine's block size: a block
   shared in the trace is shared in the pool.
4. Timestamps only order requests; a replay is closed-loop.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvconn.errors import ConfigError

__all__ = [
    "HASH_BLOCK",
    "TraceRequest",
    "TraceRow",
    "read_trace",
    "to_requests",
    "tokens_of_hash",
]

#: input tokens that one hash id stands for in the file
HASH_BLOCK = 512
MAX_FILE_BYTES = 32 << 20
MAX_LINE_BYTES = 1 << 20
MAX_LENGTH = 1 << 22
MAX_HASH_ID = (1 << 63) - 1
MAX_TIMESTAMP = 1e15
#: prompt tokens of one replay, after scaling
MAX_TOKENS = 1 << 24
#: problems listed before reading stops
MAX_PROBLEMS = 8


class TraceRow(msgspec.Struct, frozen=True):
    """One checked row. ``line`` is its line in the file, from 1."""

    line: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request to submit. ``id`` names the row's line in the file."""

    id: str
    prompt: tuple[int, ...]
    output_length: int


def read_trace(path: str | Path) -> list[TraceRow]:
    """All rows of a trace file, ordered by timestamp. Raises ConfigError with the first problems found."""
    try:
        with open(path, "rb") as file:
            rows = _read(file, str(path))
    except (OSError, ValueError) as err:  # ValueError: a path with a null byte
        raise ConfigError(f"trace {str(path)!r}: cannot be read: {err}") from None
    rows.sort(key=lambda row: row.timestamp)
    return rows


def to_requests(rows: Sequence[TraceRow], *, scale: int, block_size: int, vocab_size: int) -> list[TraceRequest]:
    """Rows as requests, lengths divided by ``scale`` (rule 3). Raises ConfigError."""
    per_hash = scaled_hash_block(scale, block_size)
    total = sum(max(1, row.input_length // scale) for row in rows)
    if total > MAX_TOKENS:
        raise ConfigError(
            f"trace: {len(rows)} requests make {total} prompt tokens at scale {scale}, at most {MAX_TOKENS} fit:"
            " raise --scale or lower --requests"
        )
    requests = []
    for row in rows:
        length = max(1, row.input_length // scale)
        needed = row.hash_ids[: math.ceil(length / per_hash)]
        prompt = tuple(token for hash_id in needed for token in tokens_of_hash(hash_id, per_hash, vocab_size))
        requests.append(TraceRequest(f"line-{row.line}", prompt[:length], max(1, row.output_length // scale)))
    return requests


def scaled_hash_block(scale: int, block_size: int) -> int:
    """Tokens that one hash id stands for at this scale. Raises ConfigError unless they fill whole blocks."""
    if scale < 1 or HASH_BLOCK % scale or (HASH_BLOCK // scale) % block_size:
        fitting = [n for n in (2**i for i in range(10)) if (HASH_BLOCK // n) % block_size == 0]
        raise ConfigError(
            f"--scale: a hash id stands for {HASH_BLOCK}/scale tokens, which must be a multiple of the block size"
            f" {block_size}: expected one of {fitting}, got {scale}"
        )
    return HASH_BLOCK // scale


def tokens_of_hash(hash_id: int, n: int, vocab_size: int) -> tuple[int, ...]:
    """``n`` tokens that this id stands for. Only ``random()`` is used: Python keeps its sequence across versions."""
    draw = random.Random(hash_id).random
    return tuple(int(draw() * vocab_size) for _ in range(n))


# --- reading ------------------------------------------------------------------------------------------------------


def _read(file: BinaryIO, name: str) -> list[TraceRow]:
    rows: list[TraceRow] = []
    problems: list[str] = []
    for line, raw in _lines(file, problems):
        if not _is_text(raw):  # one word on a file that is no trace at all, whatever its other lines are
            raise ConfigError(f"trace {name!r}, line {line}: not JSON but binary: expected one JSON object a line")
        try:
            row = json.loads(raw)
            found = list(_problems_of_row(row))
            if not found:
                sizes = row["input_length"], row["output_length"]
                rows.append(TraceRow(line, float(row["timestamp"]), *sizes, tuple(row["hash_ids"])))
        except (ValueError, RecursionError) as err:
            found = [f"not JSON: {err}"]
        problems.extend(f"line {line}: {what}" for what in found)
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise ConfigError([f"trace {name!r}, {what}" for what in problems[:MAX_PROBLEMS]])
    if not rows:
        raise ConfigError(f"trace {name!r}: holds no requests")
    return rows


def _lines(file: BinaryIO, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank; passing a bound adds to ``problems`` and ends the file."""
    total = 0
    for number in itertools.count(1):
        raw = file.readline(MAX_LINE_BYTES + 1)
        total += len(raw)
        if not raw:
            return
        if len(raw) > MAX_LINE_BYTES:
            problems.append(f"line {number}: expected at most {MAX_LINE_BYTES} bytes in a line")
            return
        if total > MAX_FILE_BYTES:
            problems.append(f"line {number}: expected at most {MAX_FILE_BYTES} bytes in the file")
            return
        if raw.strip():
            yield number, raw


def _is_text(raw: bytes) -> bool:
    try:
        return "\0" not in raw.decode()
    except UnicodeDecodeError:
        return False


def _problems_of_row(row: object) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f"expected an object, got {type(row).__name__}"
        return
    missing = [key for key in ("timestamp", "input_length", "output_length", "hash_ids") if key not in row]
    if missing:
        yield from (f"{key}: missing" for key in missing)
        return
    time = row["timestamp"]
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < MAX_TIMESTAMP:
        yield f"timestamp: expected milliseconds from the start, got {_short(time)}"
    lengths_good = True
    for key in ("input_length", "output_length"):
        if not _is_int(row[key], 1, MAX_LENGTH):
            lengths_good = False
            yield f"{key}: expected an integer 1..{MAX_LENGTH}, got {_short(row[key])}"
    yield from _problems_of_ids(row["hash_ids"], row["input_length"] if lengths_good else None)


def _problems_of_ids(ids: object, input_length: int | None) -> Iterator[str]:
    if not isinstance(ids, list):
        yield f"hash_ids: expected a list of integers, got {_short(ids)}"
        return
    for index, hash_id in enumerate(ids):
        if not _is_int(hash_id, 0, MAX_HASH_ID):
            yield f"hash_ids[{index}]: expected an integer 0..{MAX_HASH_ID}, got {_short(hash_id)}"
            return
    if input_length is not None and len(ids) != math.ceil(input_length / HASH_BLOCK):
        yield (
            f"hash_ids: expected {math.ceil(input_length / HASH_BLOCK)} ids, one per started {HASH_BLOCK} tokens of"
            f" input_length {input_length}, got {len(ids)}"
        )


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _short(value: object, limit: int = 60) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested as deep as JSON allows; an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."
