"""The long form of tests/table/test_model_based.py: 10^6 operations, seeds of its own."""

from __future__ import annotations

import pytest

from reference import STRATEGIES
from twin import SIZES, random_lives, width_name

OPERATIONS = 1_000_000


@pytest.mark.stress
@pytest.mark.parametrize("width", SIZES, ids=width_name)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_million_random_operations_agree_with_the_reference(strategy: str, width: int) -> None:
    random_lives(strategy, width, OPERATIONS // (len(STRATEGIES) * len(SIZES)) + 1, seed=2)
