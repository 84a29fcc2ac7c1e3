"""The models, from TorchRec's modules. Each takes (dense, KeyedJaggedTensor) and returns logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

from dynamicemb.cli.training.batch import Schema

HIDDEN = 64


def dlrm(collection: EmbeddingBagCollection, dense: int, dim: int) -> nn.Module:
    """Dot products of all pairs of embeddings, then dense layers."""
    model: nn.Module = DLRM(collection, dense, [HIDDEN, dim], [HIDDEN, HIDDEN // 2, 1])
    return model


def dcn(collection: EmbeddingBagCollection, dense: int, dim: int) -> nn.Module:
    """Deep & cross (version 2): two low-rank cross layers, then dense layers."""
    model: nn.Module = DLRM_DCN(
        collection, dense, [HIDDEN, dim], [HIDDEN, HIDDEN // 2, 1], 2, max(1, dim // 2)
    )
    return model


def deepfm(collection: EmbeddingBagCollection, dense: int, dim: int) -> nn.Module:
    """A factorisation machine and a deep network over the same embeddings."""
    model: Any = SimpleDeepFMNN(dense, collection, HIDDEN, HIDDEN // 2)
    model.over_arch = model.over_arch.model[0]  # logits: without the sigmoid after it
    whole: nn.Module = model
    return whole


MODELS: Mapping[str, Callable[[EmbeddingBagCollection, int, int], nn.Module]] = {
    "dlrm": dlrm,
    "deepfm": deepfm,
    "dcn": dcn,
}


class ClickModel(nn.Module):
    """A model over the columns of a schema. A source without dense columns gives a column of 1."""

    def __init__(self, name: str, schema: Schema, dim: int, rows: Mapping[str, int]) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=table,
                embedding_dim=dim,
                num_embeddings=rows[table],
                feature_names=list(features),
                pooling=PoolingType.MEAN,
            )
            for table, features in schema.tables.items()
        ]
        # "meta": no memory for rows before it is known what the tables are made of.
        collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.net = MODELS[name](collection, max(1, len(schema.dense)), dim)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        if dense.shape[1] == 0:
            dense = dense.new_ones(dense.shape[0], 1)
        logits: torch.Tensor = self.net(dense, sparse)
        return logits.squeeze(1)
