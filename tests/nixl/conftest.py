"""What several modules of connector tests start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.told import Told, listening


@pytest.fixture
def told() -> Iterator[Told]:
    """Every line that a fault is worth is asked for by its test; what is left over then was said once too often."""
    with listening() as made:
        yield made
        made.exactly()
