"""What a vLLM wheel needs, without the torch family: ``python requirements.py DIRECTORY_WITH_THE_WHEEL``."""

from __future__ import annotations

import email
import re
import sys
import zipfile
from pathlib import Path

TORCH = {"torch", "torchaudio", "torchvision", "torchcodec"}


def requirements(wheel: Path) -> list[str]:
    """Requirements without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    plain = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    return [r for r in plain if re.split(r"[^A-Za-z0-9._-]", r)[0].lower() not in TORCH]


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).glob("*.whl")
    print("\n".join(requirements(found)))
