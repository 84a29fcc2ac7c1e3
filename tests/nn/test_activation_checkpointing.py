"""``torch.utils.checkpoint`` runs a part of a model again before backward: lookups in it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import table_options, train, wild
from torch import nn
from torch.utils.checkpoint import checkpoint

from dynamicemb import DynamicEmbedding, DynamicEmbScoreStrategy
from dynamicemb.table.rows import TableStats

STEPS = 5


def trained(
    optimizer: str | None, lookup_again: bool, head_again: bool
) -> tuple[list[float], dict[str, Any], TableStats]:
    """(losses, the module's state, its table's counts) after some steps with LFU scores."""
    torch.manual_seed(0)
    options = table_options(score_strategy=DynamicEmbScoreStrategy.LFU)
    module = DynamicEmbedding(4, options=options, optimizer=optimizer)
    head = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    whole = nn.Sequential(module, head)

    def run(ids: torch.Tensor) -> Any:
        if lookup_again:
            return checkpoint(whole, ids, use_reentrant=False)
        return checkpoint(head, module(ids), use_reentrant=False) if head_again else whole(ids)

    batches = [(wild(torch.arange(step, step + 30) // 2), torch.ones(30)) for step in range(STEPS)]
    losses = train(run, nn.Identity(), [torch.optim.Adagrad(whole.parameters(), lr=0.1)], batches)
    return losses, module.state_dict(), module.table.stats()


@pytest.mark.parametrize("optimizer", [None, "exact_adagrad"])
def test_a_lookup_that_runs_again_trains_the_same_rows_and_counts_twice(
    optimizer: str | None,
) -> None:
    losses, state, stats = trained(optimizer, False, False)
    again, twice, counted = trained(optimizer, True, True)
    assert again == losses
    assert losses[-1] < losses[0]
    for name, tensor in state.items():
        if name.endswith("scores"):
            assert torch.equal(twice[name], 2 * tensor)
        elif not name.endswith(("meta", "handle")):  # they have the number of the step
            assert torch.equal(twice[name], tensor), name
    assert counted.inserts == stats.inserts
    assert counted.hits + counted.misses == 2 * (stats.hits + stats.misses)
    assert counted.dropped_gradients == 0


@pytest.mark.parametrize("optimizer", [None, "exact_adagrad"])
def test_a_lookup_outside_of_the_part_that_runs_again_counts_once(optimizer: str | None) -> None:
    losses, state, stats = trained(optimizer, False, False)
    again, once, counted = trained(optimizer, False, True)
    assert again == losses
    assert all(torch.equal(once[name], tensor) for name, tensor in state.items())
    assert counted == stats


@pytest.mark.parametrize("optimizer", [None, "exact_adagrad"])
def test_the_reentrant_form_looks_new_ids_up_without_gradients_first(optimizer: str | None) -> None:
    """Why a lookup in training mode inserts under ``no_grad``: else it would read other rows than
    the second one, and losses would belong to other rows than gradients."""
    torch.manual_seed(0)
    made: list[Any] = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        module = DynamicEmbedding(4, seed=1, optimizer=optimizer)
        head = nn.Linear(4, 1)
        model = nn.Sequential(module, head)
        start = torch.ones(1, requires_grad=True)  # the reentrant form wants an input with one

        def run(
            ids: torch.Tensor,
            model: Any = model,
            start: torch.Tensor = start,
            reentrant: bool = reentrant,
        ) -> Any:
            def part(scale: torch.Tensor) -> Any:
                return model(ids) * scale

            return checkpoint(part, start, use_reentrant=True) if reentrant else part(start)

        batches = [(wild(torch.arange(step, step + 30)), torch.ones(30)) for step in range(STEPS)]
        optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.1)]
        losses = train(run, nn.Identity(), optimizers, batches)
        made.append((losses, module.table.find(wild(torch.arange(STEPS + 29))).embeddings))
    assert made[1][0] == made[0][0]
    assert torch.equal(made[1][1], made[0][1])
