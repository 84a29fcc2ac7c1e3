"""Fixtures of the store tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stores import make_ssd


@pytest.fixture
def ssd(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes SSD stores in one folder; closes them at the end."""
    made: list[Any] = []

    def make(**settings: Any) -> Any:
        made.append(make_ssd(tmp_path / "store", **settings))
        return made[-1]

    yield make
    for store in made:
        store.close()
