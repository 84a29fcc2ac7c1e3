"""The program of OneFlow's documentation, with ``flow`` read as ``torch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dynamicemb import one_embedding

CONFIGURE = """
import oneflow as flow
import oneflow.nn as nn
import numpy as np

tables = [
    flow.one_embedding.make_table_options(
        flow.one_embedding.make_uniform_initializer(low=-0.1, high=0.1)
    ),
    flow.one_embedding.make_table_options(
        flow.one_embedding.make_uniform_initializer(low=-0.05, high=0.05)
    ),
    flow.one_embedding.make_table_options(
        flow.one_embedding.make_uniform_initializer(low=-0.15, high=0.15)
    ),
]
store_options = flow.one_embedding.make_cached_ssd_store_options(
cache_budget_mb=8142,
persistent_path="/your_path_to_ssd",
capacity=40000000,
size_factor=1,
physical_block_size=4096
)
embedding_size = 128
embedding = flow.one_embedding.MultiTableEmbedding(
    name="my_embedding",
    embedding_dim=embedding_size,
    dtype=flow.float,
    key_type=flow.int64,
    tables=tables,
    store_options=store_options,
)

embedding.to("cuda")
num_tables = 3
"""

#: Of ``TrainGraph``: the optimizers, and what ``build`` does.
TRAIN = """
optimizers = [
    flow.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.0),
    flow.optim.SGD(mlp.parameters(), lr=0.1, momentum=0.0),
]

def build(ids):
    rows = embedding(ids)
    loss = mlp(flow.reshape(rows, (-1, num_tables * embedding_size)))
    loss = loss.sum()
    loss.backward()
    return loss
"""


def in_torch(text: str, path: Path) -> str:
    """What the guide says to replace; and a folder and a device that this machine has."""
    for one, other in (
        ("import oneflow as flow", "import torch\nfrom dynamicemb import one_embedding"),
        ("import oneflow.nn as nn", "import torch.nn as nn"),
        ("flow.one_embedding.", "one_embedding."),
        ("flow.", "torch."),
        ("/your_path_to_ssd", str(path)),
        ('"cuda"', '"cpu"'),
    ):
        text = text.replace(one, other)
    return text


def test_it_runs_and_trains(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(in_torch(CONFIGURE, tmp_path), names)
    embedding = names["embedding"]
    assert isinstance(embedding, one_embedding.MultiTableEmbedding)
    torch.manual_seed(0)
    names["mlp"] = torch.nn.Sequential(
        torch.nn.Linear(3 * 128, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
    )
    exec(in_torch(TRAIN, tmp_path), names)
    ids = torch.randint(0, 10**12, (4, 3))
    before = embedding(ids).detach()
    assert before.shape == (4, 3, 128)
    assert [before[:, t].abs().max() <= bound for t, bound in enumerate((0.1, 0.05, 0.15))]
    losses = []
    for _ in range(3):
        for optimizer in names["optimizers"]:
            optimizer.zero_grad()
        losses.append(names["build"](ids).item())
        for optimizer in names["optimizers"]:
            optimizer.step()
    assert losses[2] < losses[1] < losses[0]
    assert not torch.equal(embedding(ids), before)
    embedding.save_snapshot("after")
    embedding.load_snapshot("after")
    embedding.close()
