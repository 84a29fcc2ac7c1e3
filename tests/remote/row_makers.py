"""Rows of bytes for the tests."""

from __future__ import annotations

import torch

from dynamicemb.tiers.remote.rows import Part, RowFormat

FORMAT = RowFormat((Part("weight", torch.float32, 4), Part("momentum1", torch.float32, 1)))
IDS = torch.tensor([0, 7, 7 + 2**32, -1, -4, 2**63 - 1, -(2**63)])


def make(ids: torch.Tensor, version: int = 0, row_format: RowFormat = FORMAT) -> torch.Tensor:
    """Rows that are a function of (id, version)."""
    columns = torch.arange(row_format.nbytes)
    return ((ids[:, None] * 31 + version * 17 + columns) % 251).to(torch.uint8)
