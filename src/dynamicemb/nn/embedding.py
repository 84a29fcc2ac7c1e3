"""``nn.Embedding`` and ``nn.EmbeddingBag`` for ids that do not fit a fixed table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dynamicemb.errors import (
    InvalidArgumentError,
    check_bool,
    check_choice,
    check_integer,
    check_number,
    wrong_type,
    wrong_value,
)
from dynamicemb.nn.checks import (
    check_device,
    check_ids,
    check_offsets,
    check_one_dimension,
    check_output_dtype,
    check_weights,
    flat_ids,
)
from dynamicemb.nn.module import DynamicModule
from dynamicemb.nn.plan import Plan
from dynamicemb.optimizers import Optimizer, OptimizerArgs
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
    is_chosen,
)
from dynamicemb.table import Pooling, create_table

#: Rows a module may hold unless it is told otherwise. Memory is taken as rows come.
DEFAULT_CAPACITY = 2**24
#: Rows start from N(0, DEFAULT_STD) unless the arguments or options set another initialiser.
DEFAULT_STD = 0.05
_FIRST_CAPACITY = 1024
_Mode = DynamicEmbInitializerMode


class _OneTable(DynamicModule):
    """One table and one feature."""

    def __init__(
        self,
        embedding_dim: int,
        *,
        padding_idx: int | None,
        max_capacity: int | None,
        dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        optimizer: Any,
        optimizer_args: OptimizerArgs | None,
        options: DynamicEmbTableOptions | None,
        init_std: float | None,
        init_range: float | tuple[float, float] | None,
        seed: int | None,
        name: str,
        device: torch.device | str | None,
    ) -> None:
        embedding_dim = check_integer("embedding_dim", embedding_dim, minimum=1)
        if max_capacity is not None:
            max_capacity = check_integer("max_capacity", max_capacity, minimum=1)
        if not isinstance(options, (DynamicEmbTableOptions, type(None))):
            raise wrong_type("options", options, "None or a DynamicEmbTableOptions")
        if options is None:
            options = DynamicEmbTableOptions(
                init_capacity=min(_FIRST_CAPACITY, max_capacity or _FIRST_CAPACITY)
            )
        if options.dim not in (None, embedding_dim):
            raise wrong_value("options.dim", options.dim, f"None or embedding_dim, {embedding_dim}")
        options = replace(
            options,
            dim=embedding_dim,
            max_capacity=max_capacity or options.max_capacity or DEFAULT_CAPACITY,
            embedding_dtype=dtype or options.embedding_dtype,
            initializer_args=_initializer(options.initializer_args, init_std, init_range),
        )
        if optimizer is None and optimizer_args is not None:
            raise InvalidArgumentError(
                "optimizer_args is set and optimizer is None; allowed: both, or none (torch.optim)"
            )
        fused = None
        if optimizer is not None:
            fused = Optimizer.from_emb_optim_type(optimizer, optimizer_args)
        table = create_table(
            options,
            optimizer=fused,
            name=name,
            seed=seed,
            device=device,
        )
        super().__init__(
            [table],
            [1],
            output_dtype=check_output_dtype(output_dtype or table.dtype),
            fused=fused is not None,
        )
        self.embedding_dim = embedding_dim
        self.padding_idx = None
        if padding_idx is not None:
            self.padding_idx = check_integer(
                "padding_idx", padding_idx, minimum=-(2**63), maximum=2**63 - 1
            )

    @property
    def table(self) -> Any:
        """The table of rows, a :class:`dynamicemb.table.Table`."""
        return self.tables[0]

    def _kept(self, ids: torch.Tensor) -> torch.Tensor | None:
        """The places of ids that are not padding, if there is padding."""
        if self.padding_idx is None:
            return None
        keep = (ids != self.padding_idx).nonzero().squeeze(1)
        return keep if len(keep) < len(ids) else None

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.embedding_dim}{padding}, rows={len(self.table)}"


def _initializer(
    of_options: DynamicEmbInitializerArgs, std: Any, bounds: Any
) -> DynamicEmbInitializerArgs:
    """The initialiser of rows: that of the options, of one of the two arguments, or the default."""
    given = {"init_std": std is not None, "init_range": bounds is not None}
    given["options.initializer_args"] = is_chosen(of_options)
    if sum(given.values()) > 1:
        names = " and ".join(name for name, there in given.items() if there)
        raise InvalidArgumentError(f"{names} are given; allowed: one of them")
    if is_chosen(of_options):
        return of_options
    if bounds is None:
        std = check_number("init_std", DEFAULT_STD if std is None else std, minimum=0.0)
        return DynamicEmbInitializerArgs(mode=_Mode.NORMAL, std_dev=std)
    if isinstance(bounds, (tuple, list)):
        if len(bounds) != 2:
            raise wrong_value("init_range", bounds, "a number, or the two bounds")
        lower, upper = (check_number("init_range", bound) for bound in bounds)
    else:
        upper = check_number("init_range", bounds, minimum=0.0)
        lower = -upper
    if lower > upper:
        raise wrong_value("init_range", bounds, "the lower bound first")
    return DynamicEmbInitializerArgs(mode=_Mode.UNIFORM, lower=lower, upper=upper)


class DynamicEmbedding(_OneTable):
    """``nn.Embedding`` without ``num_embeddings``: any 64-bit id has a row.

    An id gets its row when it is first seen in training. In evaluation an unknown id reads zeros
    (``options.eval_initializer_args``) and nothing is inserted. When ``max_capacity`` rows are
    there, the least recently used of a bucket makes room.

    Rows are trained by the ``torch.optim`` optimizer that gets ``parameters()`` (SGD, Adam, AdamW,
    Adagrad), or, with ``optimizer``, inside backward.

    Args:
        embedding_dim: columns of a row.
        padding_idx: an id that reads zeros, is never stored and takes no gradient.
        max_capacity: rows at most; default 2**24. Memory is taken as rows come.
        dtype: of the rows: float32 (default), float16, bfloat16.
        output_dtype: of the output; default ``dtype``.
        optimizer: an ``EmbOptimType``: update rows in backward. ``optimizer_args`` go with it.
        options: everything else a table can do.
        init_std: rows start from N(0, init_std); default 0.05, unless ``options`` have an
            ``initializer_args``. ``nn.Embedding`` has 1.0, from which models train worse.
        init_range: rows start from U(-init_range, init_range), or between two bounds.
        seed: of new rows; default: drawn from torch's generator.
        name: of the table, in errors and in ``state_dict``.
        device: of the table, ids and outputs: "cpu", "cuda", ...; default: torch's default device.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        max_capacity: int | None = None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        optimizer: Any = None,
        optimizer_args: OptimizerArgs | None = None,
        options: DynamicEmbTableOptions | None = None,
        init_std: float | None = None,
        init_range: float | tuple[float, float] | None = None,
        seed: int | None = None,
        name: str = "rows",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            embedding_dim,
            padding_idx=padding_idx,
            max_capacity=max_capacity,
            dtype=dtype,
            output_dtype=output_dtype,
            optimizer=optimizer,
            optimizer_args=optimizer_args,
            options=options,
            init_std=init_std,
            init_range=init_range,
            seed=seed,
            name=name,
            device=device,
        )

    @property
    def pooled(self) -> bool:
        return False

    def plan(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> Plan:
        ids = check_ids("input", ids, self.device)
        keep = self._kept(ids)
        kept = ids if keep is None else ids[keep]
        pooling = Pooling(DynamicEmbPoolingMode.NONE, self.output_dtype, self.features)
        return Plan(kept, (0, len(kept)), pooling, len(ids), keep)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ``input`` (integers of any shape): shape ``[*input.shape, embedding_dim]``."""
        rows = self.lookup(flat_ids("input", input))
        return rows.view(*input.shape, self.embedding_dim)


class DynamicEmbeddingBag(_OneTable):
    """``nn.EmbeddingBag`` without ``num_embeddings``: sums or means of rows of any 64-bit ids.

    See :class:`DynamicEmbedding` for the rows and the arguments. ``mode`` is "sum" or "mean".
    ``padding_idx`` ids take no part in a bag. An empty bag is zeros.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        max_capacity: int | None = None,
        dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
        optimizer: Any = None,
        optimizer_args: OptimizerArgs | None = None,
        options: DynamicEmbTableOptions | None = None,
        init_std: float | None = None,
        init_range: float | tuple[float, float] | None = None,
        seed: int | None = None,
        name: str = "rows",
        device: torch.device | str | None = None,
    ) -> None:
        check_choice("mode", mode, ("sum", "mean"))
        super().__init__(
            embedding_dim,
            padding_idx=padding_idx,
            max_capacity=max_capacity,
            dtype=dtype,
            output_dtype=output_dtype,
            optimizer=optimizer,
            optimizer_args=optimizer_args,
            options=options,
            init_std=init_std,
            init_range=init_range,
            seed=seed,
            name=name,
            device=device,
        )
        self.mode = mode
        self.include_last_offset = check_bool("include_last_offset", include_last_offset)

    @property
    def pooled(self) -> bool:
        return True

    def plan(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> Plan:
        ids = check_one_dimension("input", check_ids("input", ids, self.device))
        count = len(ids)
        offsets = check_offsets(offsets, count, self.device)
        if weights is not None:
            weights = check_weights(weights, count, self.device)
        keep = self._kept(ids)
        if keep is not None:
            before = torch.searchsorted(keep, offsets)  # kept ids before each bag
            ids, offsets = ids[keep], before
            weights = None if weights is None else weights[keep]
        mean = self.mode == "mean"
        pooling = Pooling(
            DynamicEmbPoolingMode.MEAN if mean else DynamicEmbPoolingMode.SUM,
            self.output_dtype,
            self.features,
            batch_size=len(offsets) - 1,
            offsets=offsets,
            weights=weights,
        )
        return Plan(ids, (0, len(ids)), pooling, count, keep)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Pooled rows, ``[bags, embedding_dim]``.

        ``input`` is [bags, length], or 1-D with ``offsets`` (the start of every bag, and the end of
        the last one if ``include_last_offset``). ``per_sample_weights`` (shape of ``input``, only
        with mode "sum") scale the rows and take a gradient.
        """
        ids = flat_ids("input", input)
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise wrong_value("mode", self.mode, "'sum' with per_sample_weights")
            if not isinstance(per_sample_weights, torch.Tensor):
                raise wrong_type("per_sample_weights", per_sample_weights, "a tensor of floats")
            if per_sample_weights.shape != input.shape:
                raise wrong_value(
                    "per_sample_weights.shape",
                    tuple(per_sample_weights.shape),
                    f"{tuple(input.shape)}, that of input",
                )
            per_sample_weights = per_sample_weights.reshape(-1)
        if input.dim() == 2:
            if offsets is not None:
                raise wrong_value("offsets", "a tensor", "None with a 2-D input")
            bags, length = input.shape
            offsets = torch.arange(bags + 1, device=self.device) * length
        elif input.dim() != 1:
            raise wrong_value("input.shape", tuple(input.shape), "one or two dimensions")
        elif offsets is None:
            raise wrong_value("offsets", None, "a tensor with a 1-D input")
        elif not isinstance(offsets, torch.Tensor):
            raise wrong_type("offsets", offsets, "a tensor of int64 or int32")
        elif not self.include_last_offset:
            check_device("offsets", check_one_dimension("offsets", offsets), self.device)
            if offsets.numel() == 0 and ids.numel() > 0:
                raise wrong_value("offsets", "empty", f"the start of every bag of {len(ids)} ids")
            end = torch.full((1,), input.shape[0], dtype=offsets.dtype, device=self.device)
            offsets = torch.cat([offsets, end])
        return self.lookup(ids, offsets, per_sample_weights)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
