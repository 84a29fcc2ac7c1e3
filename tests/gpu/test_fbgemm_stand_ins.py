"""What stands in for FBGEMM's CUDA kernels does what FBGEMM does, as far as its CPU kernels go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("fbgemm_gpu")

from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

import fbgemm_on_cuda


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN, PoolingMode.NONE])
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("sgd", EmbOptimType.EXACT_SGD),
        ("adagrad", EmbOptimType.EXACT_ADAGRAD),
        ("rowwise_adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_lookups(
    monkeypatch: pytest.MonkeyPatch, kind: str, optimizer: EmbOptimType, pooling: PoolingMode
) -> None:
    def trained() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        dims = (4, 4) if pooling is PoolingMode.NONE else (4, 8)
        host = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        tables: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(30, dims[0], *host), (20, dims[1], *host)],
            feature_table_map=[0, 0, 1],
            optimizer=optimizer,
            learning_rate=0.3,
            pooling_mode=pooling,
        )
        generator = torch.Generator().manual_seed(7)
        for one in tables.split_embedding_weights():
            one.copy_(torch.rand(one.shape, generator=generator))
        outputs = []
        for _ in range(5):
            lengths = torch.randint(0, 4, (3 * 6,), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            ids = torch.randint(0, 20, (int(offsets[-1]),), generator=generator)
            out = tables(ids, offsets)
            (out * torch.rand(out.shape, generator=generator)).sum().backward()
            outputs.append(out.detach())
        states = [one for some in tables.split_optimizer_states() for one in some]
        return outputs, [*(one.detach() for one in tables.split_embedding_weights()), *states]

    outputs, rows = trained()
    module = getattr(invokers, f"lookup_{kind}")
    monkeypatch.setattr(module, "invoke", fbgemm_on_cuda.lookup(kind, None))
    other_outputs, other_rows = trained()
    for one, other in zip([*outputs, *rows], [*other_outputs, *other_rows], strict=True):
        assert torch.allclose(one, other, atol=1e-5)
