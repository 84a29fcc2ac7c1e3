"""TorchRec's train pipelines ask for batches ahead; their slots are not given away meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from piped_models import model_of, most_distinct, trained
from static_models import IDS, data, fill_server, rows_of, weights_of, with_spread_ids
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

import torchrec_dynamic_embedding as tde
from dynamicemb.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 40


@pytest.mark.parametrize(
    ("kind", "make", "in_flight", "num_prefetch"),
    [
        ("sequence", TrainPipelineSparseDist, 2, 0),
        ("sequence", TrainPipelineBase, 1, 2),
        ("bags", TrainPipelineSparseDist, 2, 3),
    ],
)
def test_tables_that_just_hold_what_is_in_flight_train_as_full_ones(
    memory: str, kind: str, make: Any, in_flight: int, num_prefetch: int
) -> None:
    torch.manual_seed(3)
    batches = data(STEPS)
    full = model_of(kind, IDS)
    small = model_of(kind, most_distinct(batches, 1 + in_flight + num_prefetch))
    fill_server(memory, full)
    cpu = torch.device("cpu")
    expected = trained(make(full, full.fused_optimizer, cpu), batches)
    loader = tde.wrap(
        memory,
        with_spread_ids(batches),
        small,
        small.configs,
        eviction_config={"type": "lfu"},  # ids that are new, as those in flight are, go first
        num_prefetch=num_prefetch,
        in_flight=in_flight,
    )
    losses = trained(make(small, small.fused_optimizer, cpu), loader)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-6, rel=1e-6)
    after = rows_of(small, memory)
    for name, rows in weights_of(full).items():
        assert torch.allclose(after[name], rows, atol=1e-6)


def test_a_pipeline_that_asks_for_more_than_in_flight_is_refused(memory: str) -> None:
    model = model_of("sequence", 500)
    loader = tde.wrap(memory, data(10), model, model.configs, in_flight=1)
    pipeline = TrainPipelineSparseDist(model, model.fused_optimizer, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"2 batches before one is trained.*in_flight=2"):
        trained(pipeline, loader)
