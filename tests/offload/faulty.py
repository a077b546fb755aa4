"""File tiers that misbehave on purpose, for engines in processes of their own; named by ``module_path`` in their
configuration. ``settings`` are those of the file tier, and ``marks``: a directory in which each proves what it did.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconn.config import FsTierSettings
from kvconn.offload.keys import Identity
from kvconn.offload.tiers.fs import FsTier

__all__ = ["HalfWritten", "Meeting", "Slow", "faulty"]

#: no test takes longer
SECONDS = 60.0


def faulty(kind: type[_Faulty], root: Path, **settings: Any) -> dict[str, Any]:
    """An entry of ``secondary_tiers``."""
    told = {"root_dir": str(root), **settings}
    return {"type": kind.__name__, "module_path": __name__, "settings": told}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


class _Faulty(FsTier):
    def __init__(self, settings: Mapping[str, Any], identity: Identity, block_bytes: int) -> None:
        super().__init__(FsTierSettings("fs", settings["root_dir"], 1 << 30), identity, block_bytes)
        self.marks = Path(settings.get("marks", settings["root_dir"]))
        self.settings = settings


class HalfWritten(_Faulty):
    """Writes half of its third file, leaves a mark that says which, and never goes on."""

    batch = 2
    begun = 0

    def _write_new(self, path: str, parts: tuple[bytes, memoryview]) -> None:
        self.begun += 1
        if self.begun < 3:
            super()._write_new(path, parts)
            return
        whole = b"".join(parts)
        super()._write_new(path, (b"", memoryview(whole)[: len(whole) // 2]))
        mark = self.marks / "half.new"
        mark.write_text(path)
        mark.rename(self.marks / "half")  # who sees it may end this process at once
        wait_for(lambda: False)


class Meeting(_Faulty):
    """Has written a file, under its own name, when another process has written the same block's: then both go on."""

    batch = 1  # or the two would not write the same files

    def _write_new(self, path: str, parts: tuple[bytes, memoryview]) -> None:
        super()._write_new(path, parts)
        place = self.marks / parts[1][-64:].hex()
        place.mkdir(exist_ok=True)
        place.joinpath(str(os.getpid())).touch()
        wait_for(lambda: len(list(place.iterdir())) == 2)


class Slow(_Faulty):
    """Takes ``seconds`` for every call."""

    def _rest(self) -> None:
        time.sleep(self.settings["seconds"])

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        self._rest()
        return super().present(keys)

    def write_all(self, keys: Sequence[bytes], data: memoryview) -> list[bool]:
        self._rest()
        return super().write_all(keys, data)

    def read(self, key: bytes) -> bytes | None:
        self._rest()
        return super().read(key)
