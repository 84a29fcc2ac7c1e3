"""What a table on a GPU does not take; asked before a GPU is looked for."""

from __future__ import annotations

import pytest

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.errors import InvalidArgumentError
from dynamicemb.optimizers import Optimizer, OptimizerArgs, OptimizerKind
from dynamicemb.table import create_table


def test_an_optimizer_without_a_kernel_is_refused() -> None:
    optimizer = Optimizer(OptimizerKind.SMART_DECAY_ADAM, OptimizerArgs())
    options = DynamicEmbTableOptions(dim=4, max_capacity=256)
    with pytest.raises(InvalidArgumentError, match="on a GPU is 'SMART_DECAY_ADAM'; allowed: SGD"):
        create_table(options, optimizer=optimizer, device="cuda")
