"""Several tables and features in one lookup, with a fused optimizer."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from dynamicemb.errors import (
    InvalidArgumentError,
    check_enum,
    check_integer,
    wrong_type,
    wrong_value,
)
from dynamicemb.nn.checks import (
    check_ids,
    check_offsets,
    check_one_dimension,
    check_output_dtype,
    check_weights,
)
from dynamicemb.nn.incremental import collect_rows, current_scores, dump_increment
from dynamicemb.nn.module import DynamicModule
from dynamicemb.nn.plan import Plan, Prefetched
from dynamicemb.optimizers import Optimizer, OptimizerArgs
from dynamicemb.options import (
    BATCH_SIZE_PER_DUMP,
    DynamicEmbPoolingMode,
    DynamicEmbTableOptions,
)
from dynamicemb.table import Pooling, Table, create_table
from dynamicemb.table.cuda_streams import current_stream


class BatchedDynamicEmbeddingTables(DynamicModule):
    """Several tables, several features each, looked up together.

    Args:
        table_options: one per table; ``dim`` and ``max_capacity`` must be set. Every table keeps
            its own options: initialiser, scores, bucket width, data type, admission.
        table_names: unique; default "t0", "t1", ...
        feature_table_map: the table of every feature, in table order; default one each.
        pooling_mode: SUM, MEAN, or NONE (then all tables have one dim).
        output_dtype: float32, float16 or bfloat16; pooling is in float32.
        device: of the tables, ids and outputs: "cpu", "cuda", ...; default: torch's default device.
        optimizer: an ``EmbOptimType`` or its name. The numbers of ``OptimizerArgs`` follow as
            keywords (``learning_rate``, ``eps``, ``beta1``, ``weight_decay``, ...).
        separate_step: backward only keeps gradients; :meth:`step`, or a ``torch.optim`` optimizer
            over ``parameters()``, updates the rows with their sum.
        seed: of new rows; default: drawn from torch's generator. A list has one for each table.

    Accepted so that existing code runs, without effect: ``use_index_dedup`` (lookups always dedup),
    ``prefetch_pipeline``, ``enforce_hbm``, ``bounds_check_mode`` (every id is in bounds).
    """

    def __init__(
        self,
        table_options: Sequence[DynamicEmbTableOptions],
        table_names: Sequence[str] | None = None,
        feature_table_map: Sequence[int] | None = None,
        use_index_dedup: bool = False,
        prefetch_pipeline: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        enforce_hbm: bool = False,
        bounds_check_mode: Any = None,
        optimizer: Any = "sgd",
        *,
        separate_step: bool = False,
        seed: int | Sequence[int] | None = None,
        **optimizer_args: Any,
    ) -> None:
        options = _checked_options(table_options)
        names = _checked_names(table_names, len(options))
        features = _features_per_table(feature_table_map, len(options))
        mode = check_enum("pooling_mode", pooling_mode, DynamicEmbPoolingMode)
        dims = {one.dim for one in options}
        if mode is DynamicEmbPoolingMode.NONE and len(dims) > 1:
            raise wrong_value(
                "dim of the tables", sorted(map(str, dims)), "one dim for all with pooling NONE"
            )
        output_dtype = check_output_dtype(output_dtype)
        args = _optimizer_args(optimizer_args)
        seeds = _checked_seeds(seed, len(options))
        tables = [
            create_table(
                one,
                optimizer=Optimizer.from_emb_optim_type(optimizer, args),
                name=name,
                seed=one_seed,
                device=device,
            )
            for one, name, one_seed in zip(options, names, seeds, strict=True)
        ]
        super().__init__(tables, features, output_dtype=output_dtype, fused=not separate_step)
        self.pooling_mode = mode

    def _attach(self) -> None:
        super()._attach()
        #: Of each stream: a batch size, and the bags where the ids of tables begin then.
        self._first_bags: dict[int | None, tuple[int, torch.Tensor]] = {}

    @property
    def table_names(self) -> list[str]:
        """The names of the tables, in their order."""
        return [table.name for table in self.tables]

    @property
    def optimizer(self) -> Optimizer:
        """The first table's; all have the same kind and numbers."""
        return self.tables[0].optimizer

    @property
    def pooled(self) -> bool:
        return self.pooling_mode is not DynamicEmbPoolingMode.NONE

    # ---- lookups ----

    def plan(
        self, ids: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None
    ) -> Plan:
        device = self.device
        ids = check_one_dimension("indices", check_ids("indices", ids, device))
        count = ids.numel()
        offsets = check_offsets(offsets, count, device)
        features, bags = sum(self.features), offsets.numel() - 1
        if bags % features or bags == 0:
            raise wrong_value(
                "len(offsets)", bags + 1, f"a positive multiple of {features} features, plus 1"
            )
        batch_size = bags // features
        if weights is not None:
            if not self.pooled:
                raise wrong_value("per_sample_weights", "a tensor", "None with pooling NONE")
            weights = check_weights(weights, count, device)
        pooling = Pooling(
            self.pooling_mode, self.output_dtype, self.features, batch_size, offsets, weights
        )
        return Plan(ids, self._bounds(offsets, batch_size, count), pooling, count)

    def _bounds(
        self, offsets: torch.Tensor, batch_size: int, count: int
    ) -> tuple[int, ...] | torch.Tensor:
        """Where the ids of each table begin; on a GPU they are not read by the host."""
        if len(self.tables) == 1:
            return (0, count)
        on_gpu = self.device.type != "cpu"
        if on_gpu and batch_size and len(set(self.features)) == 1:
            return offsets[:: batch_size * self.features[0]]  # a view: every so many offsets
        firsts = [batch_size * n for n in itertools.accumulate(self.features, initial=0)]
        if on_gpu:
            stream = current_stream(self.device)  # prefetching has another one
            known = self._first_bags.get(stream)
            if known is None or known[0] != batch_size:
                places = torch.tensor(firsts, device="cpu").to(self.device, non_blocking=True)
                known = self._first_bags[stream] = batch_size, places
            return offsets.index_select(0, known[1])
        return (0, *(int(offsets[first]) for first in firsts[1:-1]), count)

    def forward(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        per_sample_weights: torch.Tensor | None = None,
        feature_requires_grad: torch.Tensor | None = None,
        batch_size_per_feature_per_rank: Any = None,
        total_unique_indices: int | None = None,
    ) -> torch.Tensor:
        """Rows of ``indices``; bag b of feature f is ``offsets[f * B + b]`` to the next offset.

        Returns [len(indices), dim] for NONE, else [B, sum of the features' dims].
        ``per_sample_weights`` (one float per id) scale rows when pooling and take a gradient. After
        :meth:`prefetch`, the oldest prefetched batch is used, which must be this one.
        ``feature_requires_grad`` and ``total_unique_indices`` are accepted without effect;
        ``batch_size_per_feature_per_rank`` must be ``None``: all features have one batch size.
        """
        _refuse_variable_batches(batch_size_per_feature_per_rank)
        return self.lookup(indices, offsets, per_sample_weights)

    def prefetch(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: Any = None,
        frequency_counters: torch.Tensor | None = None,
    ) -> None:
        """Do the table's part of a later training forward now: find, admit, insert, evict. Where
        tables have a store below, its rows are read in the background instead, and the rest waits
        for the forward: results are those without prefetching.

        Batches are used by ``forward`` in the order of prefetching; their rows are not evicted by
        batches that are prefetched after them. ``frequency_counters`` (int64, one per id): how many
        occurrences each id stands for. On a GPU the current stream may be another one than that of
        ``forward``, which waits for it (``forward_stream`` is not needed). Does nothing in
        evaluation, or if the module is frozen.
        """
        _refuse_variable_batches(batch_size_per_feature_per_rank)
        plan = self.plan(indices, offsets, None)
        if not self.learns:
            return
        self.check_written()
        counts = None
        if frequency_counters is not None:
            counts = check_ids("frequency_counters", frequency_counters, self.device)
            counts = self.tables[0].check_counts(counts, plan.count)
        # The caller may reuse its buffers before forward compares the ids.
        bounds = plan.bounds
        if isinstance(bounds, torch.Tensor):
            bounds = bounds.clone(memory_format=torch.contiguous_format)
        plan = replace(plan, ids=plan.ids.clone(), bounds=bounds)
        lookup = None
        if self._group.read_ahead(plan.ids, plan.bounds):
            counts = None if counts is None else counts.clone()
        else:
            lookup = self.find_or_insert(plan, counts)
        self._prefetched.append(Prefetched(plan, lookup, counts))

    # ---- scores ----

    def set_score(self, named_score: Mapping[str, int]) -> None:
        """``{table name: score}``; see :meth:`dynamicemb.table.Table.set_score`."""
        _check_mapping("named_score", named_score)
        tables = [(self._table(name), score) for name, score in named_score.items()]
        for table, score in tables:  # all or none
            table.check_score(score)
        for table, score in tables:
            table.set_score(score)

    def get_score(self) -> dict[str, int]:
        """``{table name: score of the next training batch}``."""
        return current_scores({table.name: table for table in self.tables})

    # ---- content ----

    def export_keys_values(
        self,
        table_name: str,
        device: torch.device | str = "cpu",
        batch_size: int = BATCH_SIZE_PER_DUMP,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All ids int64 [n] and rows float32 [n, dim] of a table."""
        self.check_written()
        return collect_rows(
            self._table(table_name),
            None,
            dtype=torch.float32,
            device=device,
            batch_size=batch_size,
        )

    def incremental_dump(
        self, named_thresholds: Mapping[str, int], pg: Any = None
    ) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, int]]:
        """Rows with a score of at least the table's threshold, and the next thresholds.

        Returns ``{table: (ids [n], rows [n, dim])}`` and ``{table: score}``. With ``pg``, the rows
        of all its ranks, in rank order. See :func:`dynamicemb.incremental_dump.incremental_dump`.
        """
        _check_mapping("named_thresholds", named_thresholds)
        self.check_written()
        tables = {name: self._table(name) for name in named_thresholds}
        increment = dump_increment(tables, named_thresholds, group=pg)
        return increment.rows, increment.scores

    def flush(self) -> None:
        """Write rows that are only in memory to the stores below the tables that have one, and make
        them survive a crash, where the store can."""
        for table in self.tables:
            table.flush()

    def reset_cache_states(self) -> None:
        """:meth:`flush`, then empty the caches of tables with a store below. No row is lost."""
        for table in self.tables:
            table.drop_cache()

    def _table(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        raise wrong_value("table name", name, ", ".join(self.table_names))

    def extra_repr(self) -> str:
        tables = ", ".join(f"{table.name}: {table.dim} x {len(table)}" for table in self.tables)
        return f"{tables}, pooling={self.pooling_mode.name}"


#: The later upstream name of the same module.
BatchedDynamicEmbeddingTablesV2 = BatchedDynamicEmbeddingTables


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "a dictionary from table names to integers")


def _refuse_variable_batches(value: Any) -> None:
    if value is not None:
        raise wrong_value(
            "batch_size_per_feature_per_rank", value, "None (all features have one batch size)"
        )


def _checked_options(table_options: Any) -> list[DynamicEmbTableOptions]:
    if not isinstance(table_options, (list, tuple)) or not table_options:
        raise wrong_type("table_options", table_options, "a list of DynamicEmbTableOptions")
    for one in table_options:
        if not isinstance(one, DynamicEmbTableOptions):
            raise wrong_type("table_options", one, "a list of DynamicEmbTableOptions")
    return list(table_options)


def _checked_names(table_names: Any, count: int) -> list[str]:
    if table_names is None:
        return [f"t{t}" for t in range(count)]
    if not isinstance(table_names, (list, tuple)):
        raise wrong_type("table_names", table_names, "None or a list of strings")
    names = list(table_names)
    for name in names:
        if not isinstance(name, str) or not name:
            raise wrong_value("table_names", names, "strings that are not empty")
    if len(names) != count:
        raise wrong_value("len(table_names)", len(names), f"{count}, as many as table_options")
    if len(set(names)) != count:
        raise wrong_value("table_names", names, "different names")
    return names


def _checked_seeds(seed: Any, count: int) -> list[int]:
    if isinstance(seed, (list, tuple)):
        if len(seed) != count:
            raise wrong_value("len(seed)", len(seed), f"{count}, as many as table_options")
        return [check_integer("seed", one, minimum=-(2**63), maximum=2**64 - 1) for one in seed]
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    seed = check_integer("seed", seed, minimum=-(2**63), maximum=2**64 - 1)
    # Apart from each other: equal ids of two tables must not start equal.
    return [(seed + t * 0x9E3779B97F4A7C15) % 2**64 for t in range(count)]


def _features_per_table(feature_table_map: Any, count: int) -> list[int]:
    if feature_table_map is None:
        return [1] * count
    if not isinstance(feature_table_map, (list, tuple)):
        raise wrong_type("feature_table_map", feature_table_map, "None or a list of table numbers")
    tables = [check_integer("feature_table_map", one) for one in feature_table_map]
    if tables != sorted(tables) or set(tables) != set(range(count)):
        raise wrong_value(
            "feature_table_map",
            tables,
            f"table numbers in ascending order, with every table of 0..{count - 1}",
        )
    return [tables.count(t) for t in range(count)]


def _optimizer_args(given: dict[str, Any]) -> OptimizerArgs:
    known = [field.name for field in fields(OptimizerArgs)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgumentError(
                f"unknown argument {name!r}{hint} Allowed: {', '.join(known)}"
            )
    return OptimizerArgs(**given)
