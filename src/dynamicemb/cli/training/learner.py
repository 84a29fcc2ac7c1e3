"""A model that learns from batches: the one with dynamic tables, or the hashed baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from dynamicemb.cli.training.batch import Batch, Schema
from dynamicemb.cli.training.hashed import SPARSE_OPTIMIZERS, make_hashed
from dynamicemb.cli.training.models import ClickModel
from dynamicemb.cli.training.options import TrainOptions
from dynamicemb.cli.training.tables import OPTIMIZERS, hashed_capacity, stored_options
from dynamicemb.cli.training.timer import Timer
from dynamicemb.nn.module import DynamicModule
from dynamicemb.unsharded import make_dynamic


class Learner:
    """A model with the optimizers of its parameters. Rows of dynamic tables are updated in
    backward."""

    def __init__(self, model: nn.Module, schema: Schema) -> None:
        self.model = model
        self.features = schema.features
        self.optimizers: list[torch.optim.Optimizer] = []

    def learn(
        self, batch: Batch, timer: Timer, prefix: str = "", *, weight: float = 1.0
    ) -> np.ndarray:
        """Predict, then train on the same examples; returns the logits of the prediction.

        ``weight``: of the loss, where shares of ranks are not of one size.
        """
        with timer.phase(prefix + "forward"):
            logits = self.model(batch.dense, batch.keyed(self.features))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            loss = loss if weight == 1.0 else loss * weight
        with timer.phase(prefix + "backward"):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
        with timer.phase(prefix + "optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
            result: np.ndarray = logits.detach().cpu().numpy()
        return result

    def parameters(self) -> dict[str, nn.Parameter]:
        """All but the handles of dynamic tables, whose rows are saved by themselves."""
        handles = {
            id(module.handle)
            for module in self.model.modules()
            if isinstance(module, DynamicModule)
        }
        return {name: one for name, one in self.model.named_parameters() if id(one) not in handles}

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the rows of dynamic tables."""
        return {
            "parameters": {name: one.detach().cpu() for name, one in self.parameters().items()},
            "optimizers": [one.state_dict() for one in self.optimizers],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        parameters = self.parameters()
        for name, value in state["parameters"].items():
            parameters[name].copy_(value)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def dynamic_learner(
    options: TrainOptions, schema: Schema, device: torch.device, start: dict[str, int]
) -> Learner:
    """The model with dynamic tables; ``start``: the capacities of tables that are loaded."""
    torch.manual_seed(options.seed)
    rows = dict.fromkeys(schema.tables, options.capacity)
    model: nn.Module = ClickModel(options.model, schema, options.dim, rows)
    tables = {name: stored_options(options, name, start.get(name)) for name in schema.tables}
    torch.manual_seed(options.seed)  # the seed of new rows
    make_dynamic(
        model,
        tables,
        optimizer=OPTIMIZERS[options.optimizer],
        learning_rate=options.lr,
        device=device,
    )
    learner = Learner(model.to(device), schema)
    dense = list(learner.parameters().values())
    learner.optimizers.append(torch.optim.Adam(dense, lr=options.dense_lr))
    return learner


def hashed_learner(options: TrainOptions, schema: Schema, device: torch.device) -> Learner:
    """The same model, from the same dense layers, with static tables."""
    torch.manual_seed(options.seed)
    rows = {name: hashed_capacity(options) for name in schema.tables}
    model = ClickModel(options.model, schema, options.dim, rows)
    static = make_hashed(model, std=options.init_std, device=device)
    learner = Learner(model.to(device), schema)
    known = {id(one) for one in static}
    dense = [one for one in learner.parameters().values() if id(one) not in known]
    learner.optimizers.append(torch.optim.Adam(dense, lr=options.dense_lr))
    learner.optimizers.append(SPARSE_OPTIMIZERS[options.optimizer](static, lr=options.lr))
    return learner
