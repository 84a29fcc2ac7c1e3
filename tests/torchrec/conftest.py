from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torchrec")

from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that functions run in."""
    pool = Ranks()
    yield pool
    pool.close()
