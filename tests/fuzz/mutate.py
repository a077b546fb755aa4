"""Good input made bad, the same for the same generator: bytes, and values made of lists and maps."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["junk", "mutated", "mutated_bytes"]

#: at the edges of what types, fields and formats hold
INTS = (0, 1, -1, 2, 7, 16, 127, 128, 255, 256, 512, 4096, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32,
        (1 << 53) + 1, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63))  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e15, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "P", ":", ",", "HB:", "a:1", "true", "0", "10.0.0.0/8", "10.0.0.1/8", "::1", "[::1]", "tcp://a;b",
         "a" * 512, "a" * 513, "é", "\x00", "\n", "\u202e", "/", "/dev/null", "/no/such", "DRAM", "VRAM", "kv_both",
         "0" * 16, "f" * 64, "{}", "[1]")  # fmt: skip
#: only JSON can carry these
SURROGATE = "\ud800"
HUGE = 10**30
SIZES = (0, 1, 2, 3, 9, 70, 600)


def junk(draw: random.Random, depth: int = 2, raw: bool = False) -> Any:
    """Anything. ``raw``: bytes as well, which JSON does not have, and no lone surrogates, which msgpack does not."""
    kind = draw.randrange(9 if depth else 6)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind in (1, 2):
        if not raw and draw.random() < 0.05:
            return HUGE
        return draw.choice(INTS) if draw.random() < 0.8 else draw.randrange(-100, 10_000)
    if kind == 3:
        return draw.choice(FLOATS)
    if kind == 4:
        return draw.choice(TEXTS) if draw.random() < 0.9 or raw else SURROGATE
    if kind == 5:
        return draw.randbytes(draw.choice(SIZES)) if raw else draw.choice(TEXTS)
    many = draw.choice((0, 1, 2, 3)) if draw.random() < 0.98 else 200
    if kind == 6:
        return {draw.choice(TEXTS): junk(draw, depth - 1, raw) for _ in range(many)}
    return [junk(draw, depth - 1, raw) for _ in range(many)]


def mutated(draw: random.Random, value: Any, raw: bool = False) -> Any:
    """A copy with one to four places changed."""
    for _ in range(draw.choice((1, 1, 1, 2, 2, 4))):
        value = _changed(draw, value, raw)
    return value


def _changed(draw: random.Random, value: Any, raw: bool) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        return _changed_map(draw, value, raw)
    if isinstance(value, list | tuple) and value and draw.random() < 0.8:
        return _changed_list(draw, list(value), raw)
    if isinstance(value, bytes) and draw.random() < 0.8:
        return mutated_bytes(draw, value)
    if isinstance(value, str) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(TEXTS) + value[at + draw.randrange(2) :]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        near = value + draw.choice((-2, -1, 1, 2)) if draw.random() < 0.7 else -value
        return max(-(1 << 63), min((1 << 64) - 1, near)) if raw else near
    return junk(draw, 2, raw)


def _changed_map(draw: random.Random, value: dict[Any, Any], raw: bool) -> dict[Any, Any]:
    out = dict(value)
    key = draw.choice(list(out))
    kind = draw.randrange(8)
    if kind == 0:
        del out[key]
    elif kind == 1:
        out[draw.choice(TEXTS)] = junk(draw, 1, raw)
    elif kind == 2:
        out[key] = out[draw.choice(list(out))]
    else:
        out[key] = _changed(draw, out[key], raw)
    return out


def _changed_list(draw: random.Random, out: list[Any], raw: bool) -> list[Any]:
    at = draw.randrange(len(out))
    kind = draw.randrange(6)
    if kind == 0:
        del out[at]
    elif kind == 1:
        out.insert(at, junk(draw, 1, raw))
    elif kind == 2:
        out += out[at : at + draw.randrange(4)]
    else:
        out[at] = _changed(draw, out[at], raw)
    return out


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """A copy with one to four places changed, cut, doubled or grown."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = draw.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF, draw.randrange(256)))
        elif kind == 2:
            del out[at : at + draw.choice((1, 1, 4, 40))]
        elif kind == 3:
            out[at:at] = draw.randbytes(draw.choice((1, 2, 9)))
        elif kind == 4:
            out[at:at] = out[at : at + draw.randrange(40)]
        else:
            del out[at:]
    return bytes(out)
