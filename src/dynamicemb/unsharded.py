"""TorchRec collections with dynamic tables in one process, without sharding. Needs torchrec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dynamicemb.errors import check_bool, missing_package, wrong_type, wrong_value

try:
    import torchrec  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_package("dynamicemb.unsharded", "torchrec", "torchrec") from error

from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from dynamicemb.nn import BatchedDynamicEmbeddingTables
from dynamicemb.options import DynamicEmbPoolingMode, DynamicEmbTableOptions
from dynamicemb.planner.constraints import complete_options
from dynamicemb.shard.tables import agreed_seed, table_seed
from dynamicemb.tracing import refuse

__all__ = ["DynamicEmbeddingBagCollection", "DynamicEmbeddingCollection", "make_dynamic"]


def make_dynamic(
    model: nn.Module,
    tables: Mapping[str, DynamicEmbTableOptions] | Sequence[str] | None = None,
    *,
    optimizer: Any = None,
    keep_rows: bool = False,
    device: torch.device | str | None = None,
    **optimizer_args: Any,
) -> nn.Module:
    """Make tables of the ``EmbeddingCollection``s and ``EmbeddingBagCollection``s in ``model``
    dynamic; returns ``model``, changed in place, or the new collection if it is one itself.

    Args:
        tables: the tables to change with their options, or their names (default options); ``None``:
            all tables. Others stay as they are.
        optimizer: an ``EmbOptimType`` to update rows in backward, with its numbers as further
            keywords. ``None``: a ``torch.optim`` optimizer over ``model.parameters()`` does it.
        keep_rows: the rows of a table that is replaced become the rows of ids 0, 1, 2, ...
        device: of the new tables; default, where the replaced ones are (CPU for "meta").

    A collection is called and answers as before; ids may be any 64-bit integers, and a table has
    room for ``num_embeddings`` rows (see ``get_sharded_table_capacity``) before it evicts.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", model, "a torch.nn.Module")
    check_bool("keep_rows", keep_rows)
    found = [
        (path, one)
        for path, one in model.named_modules()
        if isinstance(one, (EmbeddingCollection, EmbeddingBagCollection))
    ]
    known = {config.name for _, one in found for config in _configs(one)}
    options = _checked_tables(tables, known)
    settings = {
        "optimizer": optimizer,
        "keep_rows": keep_rows,
        "device": device,
        "optimizer_args": optimizer_args,
    }
    for path, collection in found:
        if not any(config.name in options for config in _configs(collection)):
            continue
        if isinstance(collection, EmbeddingBagCollection):
            replacement: nn.Module = DynamicEmbeddingBagCollection(collection, options, **settings)
        else:
            replacement = DynamicEmbeddingCollection(collection, options, **settings)
        replacement.train(collection.training)
        if not path:
            return replacement
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replacement)
    return model


def _checked_tables(tables: Any, known: set[str]) -> dict[str, DynamicEmbTableOptions]:
    if tables is None:
        tables = sorted(known)
    if isinstance(tables, (list, tuple)):
        tables = {name: DynamicEmbTableOptions() for name in tables}
    if not isinstance(tables, Mapping):
        raise wrong_type("tables", tables, "None, names, or a dictionary from names to options")
    for name, options in tables.items():
        if name not in known:
            allowed = ", ".join(sorted(known)) or "nothing: the model has no collection"
            raise wrong_value("a table in tables", name, allowed)
        if not isinstance(options, DynamicEmbTableOptions):
            raise wrong_type(f"tables[{name!r}]", options, "DynamicEmbTableOptions")
    return dict(tables)


def _configs(collection: Any) -> list[BaseEmbeddingConfig]:
    if isinstance(collection, EmbeddingBagCollection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


class _Group(nn.Module):
    """Dynamic tables that are looked up together, and the features they take."""

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        options: Mapping[str, DynamicEmbTableOptions],
        mode: DynamicEmbPoolingMode,
        seed: int,
        device: torch.device | str,
        optimizer: Any,
        optimizer_args: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.features = [feature for one in configs for feature in one.feature_names]
        self.dims = [one.embedding_dim for one in configs for _ in one.feature_names]
        self.tables = BatchedDynamicEmbeddingTables(
            [complete_options(one, options[one.name], 1) for one in configs],
            [one.name for one in configs],
            [t for t, one in enumerate(configs) for _ in one.feature_names],
            pooling_mode=mode,
            device=device,
            optimizer="sgd" if optimizer is None else optimizer,
            separate_step=optimizer is None,
            seed=[table_seed(seed, one.name) for one in configs],
            **optimizer_args,
        )

    def select(
        self, features: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(ids, lengths [features, batch], weights) in the order of the tables' features."""
        order = [features.keys().index(feature) for feature in self.features]
        lengths = features.lengths().view(len(features.keys()), -1)
        ids, weights = features.values(), features.weights_or_none()
        if ids.dtype is torch.uint64:
            ids = ids.view(torch.int64)
        if order != list(range(len(features.keys()))):
            sizes = features.length_per_key()
            lengths = lengths[order]
            ids = torch.cat([ids.split(sizes)[feature] for feature in order])
            if weights is not None:
                weights = torch.cat([weights.split(sizes)[feature] for feature in order])
        return ids, lengths, weights


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(lengths.reshape(-1).to(torch.int64).cumsum(0), (1, 0))


class _DynamicCollection(nn.Module, ABC):
    """What the two collections share: dynamic groups beside the tables that stay static."""

    is_dynamic_collection = True

    def __init__(
        self,
        collection: Any,
        options: Mapping[str, DynamicEmbTableOptions],
        *,
        optimizer: Any,
        keep_rows: bool,
        device: torch.device | str | None,
        optimizer_args: Mapping[str, Any],
    ) -> None:
        super().__init__()
        configs = self.configs = _configs(collection)
        names = get_embedding_names_by_table(configs)
        self.names = [name for of_table in names for name in of_table]
        self._names_of = {one.name: of for one, of in zip(configs, names, strict=True)}
        if device is None:
            device = "cpu" if collection.device.type == "meta" else collection.device
        seed = agreed_seed(None, None)
        dynamic = [one for one in configs if one.name in options]
        self.groups = nn.ModuleList(
            _Group(tables, options, mode, seed, device, optimizer, optimizer_args)
            for mode, tables in self._modes(dynamic).items()
        )
        static = [one for one in configs if one.name not in options]
        self.static = self._static(collection, static) if static else None
        self._static_names = {
            short: full
            for one, of_table in zip(static, get_embedding_names_by_table(static), strict=True)
            for short, full in zip(of_table, self._names_of[one.name], strict=True)
        }
        if keep_rows:
            self._keep_rows(self._modules_of(collection))

    @property
    def device(self) -> torch.device:
        """Where the dynamic tables are."""
        first: Any = self.groups[0]
        return first.tables.device  # type: ignore[no-any-return]

    def group_names(self, group: _Group) -> list[str]:
        """The output names of a group's features."""
        return [name for table in group.tables.table_names for name in self._names_of[table]]

    @staticmethod
    @abstractmethod
    def _modes(
        configs: Sequence[BaseEmbeddingConfig],
    ) -> dict[DynamicEmbPoolingMode, list[BaseEmbeddingConfig]]:
        """The tables of each group."""

    @staticmethod
    @abstractmethod
    def _modules_of(collection: Any) -> nn.ModuleDict:
        """The collection's tables."""

    def _static(self, collection: Any, configs: list[BaseEmbeddingConfig]) -> nn.Module:
        """A TorchRec collection of some tables, with the very parameters they have."""
        static = self._empty_copy(collection, configs)
        for one in configs:
            self._modules_of(static)[one.name] = self._modules_of(collection)[one.name]
        return static

    @staticmethod
    @abstractmethod
    def _empty_copy(collection: Any, configs: list[BaseEmbeddingConfig]) -> nn.Module:
        """A TorchRec collection like this one, of some of its tables."""

    def _keep_rows(self, modules: nn.ModuleDict) -> None:
        for group in self.groups:
            assert isinstance(group, _Group)
            for table in group.tables.tables:
                weight: Any = modules[table.name].weight
                if weight.is_meta:
                    raise wrong_value("keep_rows", True, "False for a collection on device 'meta'")
                ids = torch.arange(len(weight), device=table.device)
                table.insert(ids, weight.detach().to(table.device, table.dtype))

    @staticmethod
    def _check(features: Any) -> None:
        if isinstance(features, torch.fx.Proxy):
            refuse("torch.fx.symbolic_trace")
        if not isinstance(features, KeyedJaggedTensor):
            raise wrong_type("features", features, "a KeyedJaggedTensor")
        if features.variable_stride_per_key():
            raise wrong_value(
                "features", "a batch size for each feature", "one batch size for all features"
            )


class DynamicEmbeddingCollection(_DynamicCollection):
    """An ``EmbeddingCollection`` with dynamic tables; made by :func:`make_dynamic`.

    ``forward(KeyedJaggedTensor)`` returns ``{feature: JaggedTensor}`` as TorchRec's does.
    """

    def __init__(self, collection: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(collection, *args, **kwargs)
        self._need_indices = collection.need_indices()

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """The configs of the tables, in their order."""
        return self.configs

    def embedding_dim(self) -> int:
        """Columns of a row; all tables have the same."""
        return int(self.configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the result that come from each table."""
        return list(self._names_of.values())

    def need_indices(self) -> bool:
        """Whether results carry their ids."""
        return bool(self._need_indices)

    @staticmethod
    def _modes(
        configs: Sequence[BaseEmbeddingConfig],
    ) -> dict[DynamicEmbPoolingMode, list[BaseEmbeddingConfig]]:
        return {DynamicEmbPoolingMode.NONE: list(configs)}

    @staticmethod
    def _modules_of(collection: Any) -> nn.ModuleDict:
        modules: nn.ModuleDict = collection.embeddings
        return modules

    @staticmethod
    def _empty_copy(collection: Any, configs: list[BaseEmbeddingConfig]) -> nn.Module:
        copy: nn.Module = EmbeddingCollection(
            tables=configs, device=torch.device("meta"), need_indices=collection.need_indices()
        )
        return copy

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of every feature's ids, by embedding name, as TorchRec's collection gives them."""
        self._check(features)
        result: dict[str, JaggedTensor] = {}
        if self.static is not None:
            for name, jagged in self.static(features).items():
                result[self._static_names[name]] = jagged
        for group in self.groups:
            assert isinstance(group, _Group)
            ids, lengths, _ = group.select(features)
            rows = group.tables(ids, _offsets(lengths))
            sizes = lengths.sum(1).tolist()
            per_feature = zip(
                self.group_names(group), rows.split(sizes), ids.split(sizes), lengths, strict=True
            )
            for name, values, indices, length in per_feature:
                result[name] = JaggedTensor(
                    values=values, lengths=length, weights=indices if self._need_indices else None
                )
        return {name: result[name] for name in self.names}


class DynamicEmbeddingBagCollection(_DynamicCollection):
    """An ``EmbeddingBagCollection`` with dynamic tables; made by :func:`make_dynamic`.

    ``forward(KeyedJaggedTensor)`` returns a ``KeyedTensor`` as TorchRec's does. Weights of a
    weighted collection take a gradient.
    """

    def __init__(self, collection: EmbeddingBagCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(collection, *args, **kwargs)
        self._weighted = bool(collection.is_weighted())

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        """The configs of the tables, in their order."""
        return self.configs

    def is_weighted(self) -> bool:
        """Whether bags are weighted by the weights of the features."""
        return self._weighted

    @staticmethod
    def _modes(
        configs: Sequence[BaseEmbeddingConfig],
    ) -> dict[DynamicEmbPoolingMode, list[BaseEmbeddingConfig]]:
        modes: dict[DynamicEmbPoolingMode, list[BaseEmbeddingConfig]] = {}
        for one in configs:
            mean = one.pooling is PoolingType.MEAN
            mode = DynamicEmbPoolingMode.MEAN if mean else DynamicEmbPoolingMode.SUM
            modes.setdefault(mode, []).append(one)
        return modes

    @staticmethod
    def _modules_of(collection: Any) -> nn.ModuleDict:
        modules: nn.ModuleDict = collection.embedding_bags
        return modules

    @staticmethod
    def _empty_copy(collection: Any, configs: list[BaseEmbeddingConfig]) -> nn.Module:
        copy: nn.Module = EmbeddingBagCollection(
            tables=configs, device=torch.device("meta"), is_weighted=collection.is_weighted()
        )
        return copy

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Bags of every feature, by embedding name, as TorchRec's collection gives them."""
        self._check(features)
        found: dict[str, torch.Tensor] = {}
        if self.static is not None:
            static = self.static(features)
            for name in static.keys():  # noqa: SIM118  a KeyedTensor is no dictionary
                found[self._static_names[name]] = static[name]
        for group in self.groups:
            assert isinstance(group, _Group)
            ids, lengths, weights = group.select(features)
            bags = group.tables(ids, _offsets(lengths), weights if self._weighted else None)
            pieces = bags.split(group.dims, dim=1)
            found.update(zip(self.group_names(group), pieces, strict=True))
        values = [found[name] for name in self.names]
        return KeyedTensor(
            keys=self.names,
            length_per_key=[one.shape[1] for one in values],
            values=torch.cat(values, dim=1),
        )
