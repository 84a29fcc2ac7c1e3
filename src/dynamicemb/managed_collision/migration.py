"""From managed collision to dynamic tables and back, with the rows that were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection

from dynamicemb.errors import InsertionError, InvalidArgumentError, UsageError, wrong_type
from dynamicemb.managed_collision.module import ManagedCollisionModule, saved_entries
from dynamicemb.nn.discovery import tables_of
from dynamicemb.nn.module import DynamicModule
from dynamicemb.options import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.table import Table
from dynamicemb.table.slot_map import MAX_COUNT, SlotMapState
from dynamicemb.unsharded import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    make_dynamic,
)

Collection = DynamicEmbeddingCollection | DynamicEmbeddingBagCollection


class DynamicInPlaceOfManagedCollision(nn.Module):
    """A dynamic collection that is called like the managed collision collection it replaces:
    ``forward(features)`` returns ``(embeddings, None)``, or ``(embeddings, features)`` where that
    returned remapped features (ids are not remapped any more).

    An ``input_hash_func`` of the replaced modules is still applied to the ids.
    """

    def __init__(self, replaced: BaseManagedCollisionEmbeddingCollection, dynamic: nn.Module):
        super().__init__()
        self.collection = dynamic
        self._returns_features = bool(replaced._return_remapped_features)
        managed: Any = replaced._managed_collision_collection._managed_collision_modules
        self._hashes = {
            feature: (managed[config.name]._input_hash_func, managed[config.name].input_size())
            for config in replaced._managed_collision_collection.embedding_configs()
            for feature in config.feature_names
            if getattr(managed[config.name], "_input_hash_func", None) is not None
        }

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, KeyedJaggedTensor | None]:
        """The embeddings, and the features or ``None``. ``mutate_miss_lengths`` means nothing: no
        id is missing."""
        if self._hashes:
            features = self._hashed(features)
        return self.collection(features), features if self._returns_features else None

    def _hashed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        parts = []
        for key, ids in zip(
            features.keys(), features.values().split(features.length_per_key()), strict=True
        ):
            function, size = self._hashes.get(key, (None, 0))
            parts.append(ids if function is None else function(ids, size))
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=torch.cat(parts),
            weights=features.weights_or_none(),
            lengths=features.lengths(),
            stride=features.stride(),
        )


def zch_to_dynamic(
    model: nn.Module,
    options: Mapping[str, DynamicEmbTableOptions] | None = None,
    *,
    optimizer: Any = None,
    **optimizer_args: Any,
) -> nn.Module:
    """Turn the managed collision collections of ``model`` into dynamic tables.

    Every ``ManagedCollisionEmbeddingCollection`` and ``ManagedCollisionEmbeddingBagCollection``
    (TorchRec's ``MCHManagedCollisionModule`` or ours, not sharded) is replaced in place by a
    :class:`DynamicInPlaceOfManagedCollision`; returns ``model``, or the replacement if it is one
    itself. The row of an id becomes the row of that id. Scores follow the module's metadata: LFU
    takes its counts, the others its times. The row that ids without a slot shared is left behind,
    and optimizer state starts anew.

    Args:
        options: of tables, by name. Without ``max_capacity`` a table has twice the rows, so that
            every id fits its bucket.
        optimizer, optimizer_args: as in ``make_dynamic``.

    Raises:
        UsageError: no such collection. InsertionError: an id did not fit ``max_capacity``.
    """
    found = [
        (path, one)
        for path, one in model.named_modules()
        if isinstance(one, BaseManagedCollisionEmbeddingCollection)
    ]
    if not found:
        raise UsageError("the model has no managed collision collection that is not sharded")
    made = []
    for path, one in found:  # all of them before the model changes
        made.append((path, _dynamic(one, dict(options or {}), optimizer, optimizer_args)))
    for path, replacement in made:
        if not path:
            return replacement
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, replacement)
    return model


def dynamic_to_zch(
    collection: Collection | DynamicInPlaceOfManagedCollision,
    *,
    num_embeddings: Mapping[str, int] | None = None,
    eviction_policy: object | None = None,
    return_remapped_features: bool = False,
) -> ManagedCollisionEmbeddingCollection | ManagedCollisionEmbeddingBagCollection:
    """A managed collision collection with the rows of a dynamic one (not sharded).

    Ids take slots in the order of their scores, the largest first, so that the ones to keep come
    first; the last slot, which unknown ids share, has the row that the table's ``init_fn`` makes.
    ``state_dict`` of the result loads into a model with TorchRec's own modules too.

    Args:
        num_embeddings: rows of tables, by name, one more than ids at least; default, what the
            tables' configs say.
        eviction_policy: of the new modules.

    Raises:
        InvalidArgumentError: a table has more ids than its slots, or a name is not a table.
    """
    if isinstance(collection, DynamicInPlaceOfManagedCollision):
        collection = collection.collection  # type: ignore[assignment]
    if not isinstance(collection, (DynamicEmbeddingCollection, DynamicEmbeddingBagCollection)):
        raise wrong_type(
            "collection",
            collection,
            "a dynamic collection that make_dynamic or zch_to_dynamic made",
        )
    modules = [one for one in collection.modules() if isinstance(one, DynamicModule)]
    tables = {name: table for name, (_, table) in tables_of(modules).items()}
    sizes = dict(num_embeddings or {})
    for name in sizes:
        if name not in tables:
            raise InvalidArgumentError(
                f"num_embeddings names {name!r}; allowed: {', '.join(sorted(tables))}"
            )
    configs = []
    for config in collection.configs:
        if config.name not in tables:
            raise InvalidArgumentError(
                f"table {config.name!r} is static; allowed: collections with dynamic tables only"
            )
        rows = sizes.get(config.name, config.num_embeddings)
        if len(tables[config.name]) > rows - 1:
            raise InvalidArgumentError(
                f"table {config.name!r} has {len(tables[config.name])} ids; allowed: {rows - 1}, "
                f"for num_embeddings {rows}"
            )
        configs.append(replace(config, num_embeddings=rows))
    bags = isinstance(collection, DynamicEmbeddingBagCollection)
    embedding: Any
    if bags:
        embedding = EmbeddingBagCollection(tables=configs, is_weighted=collection._weighted)
    else:
        embedding = EmbeddingCollection(tables=configs)
    managed = {}
    for config in configs:
        module = ManagedCollisionModule(
            config.num_embeddings, torch.device("cpu"), eviction_policy, name=config.name
        )
        weight = (embedding.embedding_bags if bags else embedding.embeddings)[config.name].weight
        _fill_slots(tables[config.name], module, weight)
        managed[config.name] = module
    kind: Any = (
        ManagedCollisionEmbeddingBagCollection if bags else ManagedCollisionEmbeddingCollection
    )
    made: ManagedCollisionEmbeddingCollection | ManagedCollisionEmbeddingBagCollection = kind(
        embedding,
        ManagedCollisionCollection(managed, configs),
        return_remapped_features=return_remapped_features,
    )
    return made


def _dynamic(
    replaced: BaseManagedCollisionEmbeddingCollection,
    options: dict[str, DynamicEmbTableOptions],
    optimizer: Any,
    optimizer_args: dict[str, Any],
) -> DynamicInPlaceOfManagedCollision:
    embedding: Any = replaced._embedding_module
    managed: Any = replaced._managed_collision_collection
    bags = isinstance(embedding, EmbeddingBagCollection)
    weights = embedding.embedding_bags if bags else embedding.embeddings
    chosen = {}
    for config in managed.embedding_configs():
        chosen[config.name] = options.get(config.name, DynamicEmbTableOptions())
        if chosen[config.name].max_capacity is None:
            roomy = max(2 * config.num_embeddings, 128)
            chosen[config.name] = replace(chosen[config.name], max_capacity=roomy)
    dynamic = make_dynamic(embedding, chosen, optimizer=optimizer, **optimizer_args)
    modules = [one for one in dynamic.modules() if isinstance(one, DynamicModule)]
    for name, (_, table) in tables_of(modules).items():
        module = managed._managed_collision_modules[name]
        _fill_table(table, module, weights[name].weight.detach())
    replacement = DynamicInPlaceOfManagedCollision(replaced, dynamic)
    replacement.train(replaced.training)
    return replacement


def _fill_table(table: Table, module: Any, weight: torch.Tensor) -> None:
    ids, slots, counts, last = saved_entries(
        module.state_dict(), module.output_size(), module._output_global_offset
    )
    scores: torch.Tensor | None = None
    strategy = table.options.score_strategy
    if isinstance(strategy, tuple):
        scores = torch.stack((last.clamp(min=1), counts.clamp(min=1)), dim=1)
    elif strategy is DynamicEmbScoreStrategy.LFU:
        scores = counts.clamp(min=1)
    elif strategy in (DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.STEP):
        scores = last.clamp(min=1)
    if scores is not None:
        scores = scores.to(table.device)
    rows = weight[slots.to(weight.device)].to(table.device, table.dtype)
    written = table.insert(ids.to(table.device), rows, scores=scores).written
    stored = int(table.contains(ids.to(table.device)).sum())
    if stored != len(ids) or not bool(written.all()):
        raise InsertionError(
            f"table {table.name!r}: {len(ids) - stored} of {len(ids)} ids did not fit max_capacity "
            f"{table.options.max_capacity}"
        )
    if strategy is DynamicEmbScoreStrategy.STEP and len(last):
        table.restore_scores(step=int(last.max()) + 1, custom_score=None)


def _fill_slots(table: Table, module: ManagedCollisionModule, weight: torch.Tensor) -> None:
    parts = list(table.export())
    ids = torch.cat(
        [torch.empty(0, dtype=torch.int64, device="cpu"), *(one.ids.cpu() for one in parts)]
    )
    if not len(ids):
        return
    rows = torch.cat([one.embeddings.cpu() for one in parts])
    scores = torch.cat([one.scores.cpu() for one in parts])
    single = scores[:, -1] if scores.dim() == 2 else scores
    # Scores are unsigned; the order of equal ones is that of the ids.
    order = torch.argsort(ids, stable=True)
    order = order[torch.argsort(single[order] ^ torch.iinfo(torch.int64).min, stable=True)]
    order = order.flip(0)
    ids, rows, single = ids[order], rows[order], single[order]
    counts = torch.ones_like(ids)
    strategy = table.options.score_strategy
    if isinstance(strategy, tuple) or strategy is DynamicEmbScoreStrategy.LFU:
        counts = single.clamp(1, MAX_COUNT)
    n = len(ids)
    module.slot_map.restore(
        SlotMapState(
            ids,
            torch.arange(n, device="cpu"),
            torch.arange(n, 0, -1, device="cpu"),
            counts,
            time=n,
            draws=0,
        )
    )
    with torch.no_grad():
        weight[:n] = rows.to(weight.device, weight.dtype)
