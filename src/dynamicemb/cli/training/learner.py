"""A model that learns from batches, with tables of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dynamicemb.cli.training.batch import Batch, Schema
from dynamicemb.cli.training.hashed import SPARSE_OPTIMIZERS, make_hashed
from dynamicemb.cli.training.measured import (
    Measured,
    MeasuredDynamic,
    MeasuredHashed,
    MeasuredZch,
)
from dynamicemb.cli.training.models import ClickModel
from dynamicemb.cli.training.options import DYNAMIC, ZCH, TrainOptions
from dynamicemb.cli.training.tables import (
    OPTIMIZERS,
    hashed_capacity,
    row_bytes,
    stored_options,
    table_options,
    tables_of,
)
from dynamicemb.cli.training.timer import Timer
from dynamicemb.cli.training.zch import make_zch, zch_capacity, zch_modules
from dynamicemb.managed_collision import reset_evicted_rows
from dynamicemb.nn.module import DynamicModule
from dynamicemb.unsharded import make_dynamic


class Learner:
    """A model with the optimizers of its parameters. Rows of dynamic tables are updated in
    backward. ``tables``: those of this process; ``spread``: whether others have parts of them."""

    spread = False

    def __init__(self, model: nn.Module, schema: Schema, tables: Sequence[Measured]) -> None:
        self.model, self.tables = model, list(tables)
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
        """What is the same on all ranks, beside the rows of dynamic tables."""
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

    def own_state(self) -> dict[str, Any]:
        """What only this rank has, beside the rows of dynamic tables."""
        maps = zch_modules(self.model)
        if not maps:
            return {}
        return {
            "maps": {name: module.map_state() for name, module in maps.items()},
            "random": _random_state(),  # rows that start anew are drawn from it
        }

    def restore_own(self, state: dict[str, Any]) -> None:
        maps = zch_modules(self.model)
        for name, saved in state.get("maps", {}).items():
            maps[name].restore_map(saved)
        if "random" in state:
            _set_random_state(state["random"])


def _random_state() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def _set_random_state(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states[1])


def slots_of(kind: str, options: TrainOptions) -> int:
    """Rows of a full table, over all processes."""
    if kind == DYNAMIC:
        return options.nproc * int(table_options(options).max_capacity or 0)
    return zch_capacity(options) if kind == ZCH else hashed_capacity(options)


def new_model(kind: str, options: TrainOptions, schema: Schema) -> ClickModel:
    """A model whose tables, without memory yet, have the rows of that kind; the dense layers are
    the same for every kind."""
    rows = dict.fromkeys(schema.tables, slots_of(kind, options))
    torch.manual_seed(options.seed)
    return ClickModel(options.model, schema, options.dim, rows)


def new_learner(
    kind: str, options: TrainOptions, schema: Schema, device: torch.device, start: dict[str, int]
) -> Learner:
    """A model in this process alone; ``start``: the capacities of dynamic tables to be loaded."""
    model = new_model(kind, options, schema)
    torch.manual_seed(options.seed)  # the seed of new rows
    if kind == DYNAMIC:
        return _dynamic(model, options, schema, device, start)
    rows = (make_zch if kind == ZCH else make_hashed)(model, options, device)
    learner = Learner(model.to(device), schema, [])
    known = {id(one) for one in rows}
    dense = [one for one in learner.parameters().values() if id(one) not in known]
    sparse = SPARSE_OPTIMIZERS[options.optimizer](rows, lr=options.lr)
    learner.optimizers += [torch.optim.Adam(dense, lr=options.dense_lr), sparse]
    learner.tables = static_tables(kind, model, options, schema)
    if kind == ZCH:
        reset_evicted_rows(model, sparse)
    return learner


def _dynamic(
    model: ClickModel,
    options: TrainOptions,
    schema: Schema,
    device: torch.device,
    start: dict[str, int],
) -> Learner:
    make_dynamic(
        model,
        {name: stored_options(options, name, start.get(name)) for name in schema.tables},
        optimizer=OPTIMIZERS[options.optimizer],
        learning_rate=options.lr,
        device=device,
    )
    learner = Learner(model.to(device), schema, [MeasuredDynamic(one) for one in tables_of(model)])
    dense = list(learner.parameters().values())
    learner.optimizers.append(torch.optim.Adam(dense, lr=options.dense_lr))
    return learner


def static_tables(
    kind: str, model: nn.Module, options: TrainOptions, schema: Schema, *, first: bool = True
) -> list[Measured]:
    """The tables of a model as they are measured; ``first``: on the first rank."""
    size = row_bytes(options)
    if kind == ZCH:
        return [MeasuredZch(name, one, size) for name, one in zch_modules(model).items()]
    rows = hashed_capacity(options) if first else 0  # there is nothing to count on each rank
    return [MeasuredHashed(name, rows, size) for name in schema.tables]
