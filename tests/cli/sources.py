"""Rows to be written as a checkpoint, whatever they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dynamicemb.checkpoint.writer import TableSource
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.options import DynamicEmbScoreStrategy
from dynamicemb.table import Progress, Rows


def source_of(content: Rows, **changes: Any) -> TableSource:
    """The table ``model/t`` with these rows."""
    source = TableSource(
        collection="model",
        name="t",
        dim=content.embeddings.shape[1],
        dtype=torch.float32,
        value_dtype=torch.float32,
        strategy=DynamicEmbScoreStrategy.STEP,
        scores=True,
        state=False,
        optimizer=Optimizer(OptimizerKind.SGD, OptimizerArgs()),
        routing=None,
        clock=0,
        progress=Progress(1, None, 0, 0, 0, 0),
        options={},
        opt_args={},
        rows=len(content),
        batches=lambda: [content],
    )
    return replace(source, **changes)
