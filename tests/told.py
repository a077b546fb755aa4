"""What the operator was told: kvconn's warnings and errors, each said once.

``with listening() as told: ...`` collects them from here on, of every logger of ours in this process.
:meth:`Told.exactly` is how a test of a fault ends: these lines, each once, and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Told", "exactly", "listening"]

#: said once per process, in whichever test comes first; tests/test_trust.py asks for it
ONCE = "NO FLEET KEY"
#: a line of the log that has all of these words in it
Words = str | tuple[str, ...]


class Told(logging.Handler):
    """Collects. ``lines`` are what has been said until now."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if not line.startswith(ONCE):
            self.lines.append(line)

    def take(self) -> list[str]:
        """What was said since the last call."""
        lines, self.lines = self.lines, []
        return lines

    def exactly(self, *expected: Words) -> None:
        """Since the last call these were said, each once, and nothing else. AssertionError with what was."""
        exactly(self.take(), *expected)


def exactly(lines: Sequence[str], *expected: Words) -> None:
    """One line for each of ``expected``, in any order, and no other."""
    left = list(lines)
    for one in expected:
        words = (one,) if isinstance(one, str) else one
        found = [line for line in left if all(word in line for word in words)]
        assert found, f"nobody was told of {one}: {lines}"
        left.remove(found[0])
    assert not left, f"told besides, or twice: {left}; in all: {lines}"


@contextmanager
def listening() -> Iterator[Told]:
    """Everything of ours at WARNING and above is collected, and printed nowhere."""
    logger, told = logging.getLogger("kvconn"), Told()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(told)
    try:
        yield told
    finally:
        logger.removeHandler(told)
        logger.propagate = propagate
