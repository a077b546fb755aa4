"""Secondary tiers from their configuration: ours by name, others by module path.

Rules
1. Every problem is a ConfigError with the path of its key; tiers that were made are closed when another could not be.
2. An out-of-tree class is imported when it is asked for, and must be a
   :class:`~kvconn.offload.tiers.base.SecondaryTier`.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvconn.config import FsTierSettings, ModuleTierSettings, OffloadSettings, parse_secondary_tiers
from kvconn.errors import ConfigError
from kvconn.offload.keys import Identity
from kvconn.offload.tiers.base import SecondaryTier
from kvconn.offload.tiers.fs import FsTier

__all__ = ["make_tiers"]


def make_tiers(settings: OffloadSettings, identity: Identity, block_bytes: int) -> tuple[SecondaryTier, ...]:
    """The configured secondary tiers, fastest first. Raises ConfigError with every problem found."""
    tiers: list[SecondaryTier] = []
    problems: list[str] = []
    for path, tier in parse_secondary_tiers(settings):
        try:
            tiers.append(_make(path, tier, identity, block_bytes))
        except ConfigError as err:
            problems += [problem if problem.startswith(path) else f"{path}.{problem}" for problem in err.problems]
    if problems:
        for made in tiers:
            made.close()
        raise ConfigError(problems)
    return tuple(tiers)


def _make(path: str, tier: FsTierSettings | ModuleTierSettings, identity: Identity, block_bytes: int) -> SecondaryTier:
    if isinstance(tier, FsTierSettings):
        return FsTier(tier, identity, block_bytes)
    try:
        found: Any = getattr(importlib.import_module(tier.module_path), tier.type, None)
    except ImportError as err:
        raise ConfigError(f"{path}.module_path: cannot import {tier.module_path!r}: {err}") from None
    if not (isinstance(found, type) and issubclass(found, SecondaryTier)):
        raise ConfigError(
            f"{path}.type: expected the name of a kvconn.offload.tiers.base.SecondaryTier in {tier.module_path}, "
            f"got {tier.type!r}"
        )
    return found(tier.settings, identity, block_bytes)
