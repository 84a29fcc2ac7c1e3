"""Dynamic tables in the place of a TorchRec compute kernel."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.distributed.utils import append_prefix
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import UsageError
from dynamicemb.nn import BatchedDynamicEmbeddingTables
from dynamicemb.shard.dedup import counts_of


class DynamicFusedOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The learning rate of rows that are updated in backward: ``step`` and ``zero_grad`` take it
    over from ``param_groups``. Optimizer state lies in the rows, so there is none here."""

    def __init__(
        self, module: BatchedDynamicEmbeddingTables, params: dict[str, nn.Parameter]
    ) -> None:
        self._module = module
        group = {"params": list(params.values()), "lr": module.optimizer.args.learning_rate}
        super().__init__(params, {}, [group])

    def step(self, closure: Any = None) -> None:
        self._module.set_learning_rate(float(self.param_groups[0]["lr"]))

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._module.set_learning_rate(float(self.param_groups[0]["lr"]))


class DynamicEmbeddingKernel(BaseEmbedding, FusedOptimizerModule):  # type: ignore[misc]
    """A group of dynamic tables as TorchRec sees it.

    Each table shows one parameter, "<table>.weight", with no rows: it stands for the table where
    TorchRec and optimizers ask for parameters. ``state_dict`` has no rows either; checkpoints are
    made with ``DynamicEmbDump``.

    ``counted``: the weights of the features are counts (see :func:`~dynamicemb.shard.dedup.dedup`).
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        module: BatchedDynamicEmbeddingTables,
        *,
        counted: bool = False,
    ) -> None:
        super().__init__()
        self._config = config
        self._emb_module = module
        self._counted = counted
        self._params = {
            f"{table.name}.weight": nn.Parameter(
                torch.empty(0, table.dim, dtype=table.dtype, device=table.device)
            )
            for table in module.tables
        }
        self._optim = DynamicFusedOptimizer(module, self._params)
        for param in self._params.values():
            param._in_backward_optimizers = [self._optim]  # type: ignore[attr-defined]

    @property
    def emb_module(self) -> BatchedDynamicEmbeddingTables:
        return self._emb_module

    @property
    def config(self) -> GroupedEmbeddingConfig:
        return self._config

    @property
    def fused_optimizer(self) -> DynamicFusedOptimizer:
        return self._optim

    def _follow_freezing(self) -> None:
        """Freeze the rows if the parameters that stand for them are frozen. The module's own handle
        can freeze them too."""
        frozen = [name for name, param in self._params.items() if not param.requires_grad]
        if frozen and len(frozen) < len(self._params) and self._emb_module.training:
            raise UsageError(
                f"{', '.join(frozen)} of the tables {', '.join(self._params)}, which are looked up "
                "together, are frozen (requires_grad is False); allowed: all of them or none"
            )
        self._emb_module.frozen = bool(frozen)

    # ---- lookups ----

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """[n, dim] for sequences; [batch, sum of dims] for bags, or one dimension, rank by rank and
        feature by feature, if features have batch sizes of their own."""
        self._follow_freezing()
        module = self._emb_module
        offsets = _offsets(features)
        if len(offsets) == 1:  # no rank has an example
            columns = module.output_columns if module.pooled else module.tables[0].dim
            empty: torch.Tensor = features.values().new_zeros(
                (0, columns), dtype=module.output_dtype
            )
            return empty
        if not module.pooled:
            if self._counted and not module.prefetched:
                self.prefetch(features)
            rows: torch.Tensor = module(features.values(), offsets)
            return rows
        weights = features.weights() if self._config.is_weighted else None
        bags: torch.Tensor = module(features.values(), offsets, weights)
        if features.variable_stride_per_key():
            return _by_rank(bags, features, self._config.embedding_dims())
        return bags

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Find or insert the rows of a later forward now; see
        :meth:`~dynamicemb.BatchedDynamicEmbeddingTables.prefetch`."""
        self._follow_freezing()
        offsets = _offsets(features)
        if len(offsets) > 1:
            counts = counts_of(features) if self._counted else None
            self._emb_module.prefetch(features.values(), offsets, frequency_counters=counts)

    def flush(self) -> None:
        self._emb_module.flush()

    def purge(self) -> None:
        """Nothing to do: rows are not a cache of a state that is loaded."""

    # ---- what TorchRec asks for by name ----

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        return OrderedDict() if destination is None else destination

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._params.items():
            yield append_prefix(prefix, name), param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._params.items():
            yield name.removesuffix(".weight"), param


def _offsets(features: KeyedJaggedTensor) -> torch.Tensor:
    """int64 [features * batch + 1]; where batch sizes differ, short features end in empty bags."""
    offsets: torch.Tensor = features.offsets().to(torch.int64)
    if not features.variable_stride_per_key():
        return offsets
    strides = features.stride_per_key()
    longest = max(strides, default=0)
    parts = []
    first = 0
    for stride in strides:
        parts.append(offsets[first : first + stride])
        parts.append(offsets[first + stride].expand(longest - stride))
        first += stride
    return torch.cat([*parts, offsets[-1:]])


def _by_rank(bags: torch.Tensor, features: KeyedJaggedTensor, dims: list[int]) -> torch.Tensor:
    """The bags of features with batch sizes of their own, in TorchRec's order."""
    per_feature = bags.split(dims, dim=1)
    pieces: list[list[torch.Tensor]] = []
    for bag, strides in zip(per_feature, features.stride_per_key_per_rank(), strict=True):
        sizes = [int(stride) for stride in strides]
        pieces.append(list(bag[: sum(sizes)].split(sizes)))
    ranks = len(pieces[0])
    return torch.cat([piece[rank].reshape(-1) for rank in range(ranks) for piece in pieces])
