"""One thread: on a busy machine torch's own barriers cost the most."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_seeded: None) -> None:
    torch.set_num_threads(1)
