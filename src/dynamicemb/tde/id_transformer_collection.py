"""The ids of a collection's features become slots of its tables."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.errors import (
    InvalidArgumentError,
    UsageError,
    check_integer,
    wrong_type,
    wrong_value,
)
from dynamicemb.options import (
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbTableOptions,
)
from dynamicemb.shard.tables import table_seed
from dynamicemb.table.cpu import CpuTable
from dynamicemb.table.slot_map import SlotMap
from dynamicemb.tde.distributed import Exchange
from dynamicemb.tde.id_transformer import make_slot_map
from dynamicemb.tde.ps import PS, FetchHandle, NewRows, PSCollection


class _TableIds:
    """One table: its map from ids to slots, and its rows at the server."""

    def __init__(
        self, config: BaseEmbeddingConfig, slot_map: SlotMap, ps: PS | None, seed: int
    ) -> None:
        self.config = config
        self.map = slot_map
        self.ps = ps
        self.new_rows = _new_rows(config, seed)
        self.saved: int | None = None
        self.in_flight: deque[torch.Tensor] = deque()  # slots of batches, the oldest first

    def release(self, hold: int) -> None:
        """Let all but the last ``hold`` batches go."""
        while len(self.in_flight) > hold:
            self.map.unpin(self.in_flight.popleft())

    def give_slots(self, ids: torch.Tensor, time: int, hold: int) -> tuple[torch.Tensor, Any]:
        """(the slots of ``ids``, a handle that waits for their rows or None)."""
        self.release(hold)
        mapped = self.map.map(ids, time=time, pin=True)
        if self.ps is not None and len(mapped.evicted):
            self.ps.put(mapped.evicted.pairs())  # before their slots are written
        if mapped.refused:
            self.map.unpin(mapped.slots)
            self.map.erase(mapped.inserted.ids)
            raise UsageError(
                f"{mapped.refused} ids of a batch of {len(ids)} find no slot in table "
                f"{self.config.name!r}: its {self.map.capacity} slots are taken by the batch and "
                f"the {hold} before it that are in flight. Raise num_embeddings, or lower "
                "num_prefetch or the batch size"
            )
        self.in_flight.append(mapped.slots)
        handle = None
        if self.ps is not None and len(mapped.inserted):
            handle = self.ps.begin_fetch(mapped.inserted.pairs(), self.new_rows)
        return mapped.slots, handle

    def save(self) -> None:
        """Write the rows that may have changed since the last time."""
        if self.ps is None:
            raise UsageError(f"table {self.config.name!r} has no parameter server")
        self.ps.settle()
        now = self.map.time
        self.ps.put(self.map.used_since(self.saved).pairs())
        self.ps.flush()
        # Batches that are in flight will still be trained.
        self.saved = max(0, now - len(self.in_flight))


def _new_rows(config: BaseEmbeddingConfig, seed: int) -> NewRows:
    """The weights of new ids: a function of (seed, id, column), uniform in the config's range, or
    what the config's own init_fn makes of them."""
    dim, given = config.embedding_dim, config.init_fn
    is_default = isinstance(given, functools.partial) and given.func is torch.nn.init.uniform_
    if given is not None and not is_default:

        def by_function(ids: torch.Tensor) -> torch.Tensor:
            rows = torch.empty(len(ids), dim, device="cpu")
            made = given(rows)
            return rows if made is None else made

        return by_function
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    args = DynamicEmbInitializerArgs(
        mode=DynamicEmbInitializerMode.UNIFORM, lower=float(low), upper=float(high)
    )
    if not low < high:
        args = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=float(low))
    options = DynamicEmbTableOptions(dim=dim, max_capacity=16, initializer_args=args)
    return CpuTable(options, name=config.name or "table", seed=seed).initial_rows


class IDTransformerCollection:
    """Gives the ids of a collection's features slots in its tables, and moves rows to and from a
    parameter server as ids come and go.

    Works without a process group, and on CPU and CUDA alike. With several ranks, all of them call
    :meth:`transform` together, and give each id the same slot.

    Args:
        tables: the configs of the collection; ``num_embeddings`` are the slots. Where
            ``feature_names`` is empty, the table's name is its feature.
        eviction_config, transform_config: see :class:`IDTransformer`.
        ps_collection: the parameter server; None: rows of ids that leave are lost, and new ids get
            the row that is there.
        seed: of new rows, the same on all ranks; default: 0.
    """

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
        ps_collection: PSCollection | None = None,
        *,
        seed: int = 0,
        exchange: Exchange | None = None,
    ) -> None:
        self._exchange = Exchange() if exchange is None else exchange
        self._lock = threading.RLock()
        self._time = 0
        #: Batches before the present one whose slots are not given to others.
        self.hold = 0
        self._tables: dict[str, _TableIds] = {}
        self._features: dict[str, str] = {}
        for config in tables:
            if config.name in self._tables:
                raise wrong_value("the name of a table", config.name, "a name of its own")
            if not config.feature_names:
                config.feature_names = [config.name]
            for feature in config.feature_names:
                if feature in self._features:
                    raise InvalidArgumentError(
                        f"feature {feature!r} is of tables {self._features[feature]!r} and "
                        f"{config.name!r}; allowed: of one table"
                    )
                self._features[feature] = config.name
            slot_map = make_slot_map(config.num_embeddings, eviction_config, transform_config)
            ps = None if ps_collection is None else ps_collection[config.name]
            self._tables[config.name] = _TableIds(
                config, slot_map, ps, table_seed(seed, config.name)
            )

    @property
    def devices(self) -> set[torch.device]:
        """Those that rows are on."""
        servers = (table.ps for table in self._tables.values())
        return {device for ps in servers if ps is not None for device in ps.devices}

    @property
    def parts(self) -> int:
        """Tensors of :meth:`collect`."""
        return len(self._tables)

    def collect(self, kjt: KeyedJaggedTensor) -> list[torch.Tensor]:
        """The ids of each table, in the order of its features. Changes nothing; raises what went
        wrong with the server since the last batch."""
        if not isinstance(kjt, KeyedJaggedTensor):
            raise wrong_type("the features", kjt, "a KeyedJaggedTensor")
        for table in self._tables.values():
            if table.ps is not None:
                table.ps.raise_error()
        values = kjt.values().detach().to("cpu", torch.int64)
        pieces = dict(zip(kjt.keys(), values.split(kjt.length_per_key()), strict=True))
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        out = []
        for table in self._tables.values():
            names = [one for one in table.config.feature_names if one in pieces]
            out.append(torch.cat([pieces[one] for one in names]) if names else empty)
        return out

    def apply(
        self, kjt: KeyedJaggedTensor, everyone: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[KeyedJaggedTensor, list[FetchHandle]]:
        """Replace the ids of ``kjt`` by slots. ``everyone``: [rank][table] what all ranks
        collected."""
        pieces = dict(zip(kjt.keys(), kjt.values().split(kjt.length_per_key()), strict=True))
        handles: list[FetchHandle] = []
        with self._lock:
            self._time += 1
            for number, table in enumerate(self._tables.values()):
                ids = [rank[number] for rank in everyone]
                slots, handle = table.give_slots(torch.cat(ids), self._time, self.hold)
                if handle is not None:
                    handles.append(handle)
                mine = slots.split([len(one) for one in ids])[self._exchange.rank]
                names = [one for one in table.config.feature_names if one in pieces]
                sizes = [len(pieces[one]) for one in names]
                for name, part in zip(names, mine.split(sizes), strict=True):
                    pieces[name] = part.to(kjt.values().device, kjt.values().dtype)
        return _with_values(kjt, torch.cat(list(pieces.values()))), handles

    def transform(
        self, global_features: KeyedJaggedTensor
    ) -> tuple[KeyedJaggedTensor, list[FetchHandle]]:
        """(the same features with slots for ids, handles to wait for before the rows are used).

        Features of no table stay as they are. UsageError if the distinct ids do not fit."""
        everyone = self._exchange.gather(self.collect(global_features))
        return self.apply(global_features, everyone)

    def release(self) -> None:
        """No batch is in flight any more."""
        with self._lock:
            for table in self._tables.values():
                table.release(0)

    def save(self) -> None:
        """Write all rows that changed since the last call to the parameter server."""
        with self._lock:
            for table in self._tables.values():
                table.save()

    def set_hold(self, batches: int) -> None:
        """Keep the slots of so many batches before the present one."""
        with self._lock:
            self.hold = check_integer("batches", batches, minimum=0)


def _with_values(kjt: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    strides: dict[str, Any] = {"stride": None if kjt.variable_stride_per_key() else kjt.stride()}
    if kjt.variable_stride_per_key():
        strides = {"stride_per_key_per_rank": kjt.stride_per_key_per_rank()}
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=values,
        weights=kjt.weights_or_none(),
        lengths=kjt.lengths(),
        **strides,
    )
