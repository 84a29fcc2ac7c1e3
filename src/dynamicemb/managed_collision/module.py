"""TorchRec's managed collision module, with every id mapped at first sight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
)
from torchrec.modules.mc_modules import ManagedCollisionModule as TorchRecModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from dynamicemb.errors import (
    InvalidArgumentError,
    UsageError,
    check_integer,
    wrong_type,
    wrong_value,
)
from dynamicemb.table.slot_map import (
    MAX_COUNT,
    MAX_SLOTS,
    MAX_TIME,
    SlotMap,
    SlotMapState,
    SlotPolicy,
)

Features = dict[str, JaggedTensor]
ThresholdFilter = Callable[[torch.Tensor], tuple[torch.Tensor, Any]]

#: What an entry without an id has in a saved state, as in TorchRec.
FREE = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class TTL_EvictionPolicy:
    """An id may go once its last use is more than ``ttl`` ago: training batches, or whatever
    ``clock`` counts. An id that is not that old never goes, so new ids can be refused."""

    ttl: int
    clock: Callable[[], int] | None = None
    threshold_filtering_func: ThresholdFilter | None = None

    def __post_init__(self) -> None:
        check_integer("ttl", self.ttl, minimum=1, maximum=MAX_TIME)


class ManagedCollisionModule(TorchRecModule):  # type: ignore[misc]
    """A drop-in for ``MCHManagedCollisionModule`` on the engine's index.

    Ids (any int64) of a training batch are mapped at once: the first ``zch_size - 1`` distinct ones
    each to a slot of their own. When all slots are taken, the policy says whose id makes room; ids
    of the same batch never do. The last slot is shared by ids that found none: all of a batch that
    has more distinct ids than slots, those that ``threshold_filtering_func`` keeps out, those of a
    TTL table without an expired id, and ids that evaluation has not seen.

    Args:
        zch_size: rows of the table, the shared one included.
        device: of the buffers that ``state_dict`` shows. The map itself is in main memory.
        eviction_policy: TorchRec's ``LRU_EvictionPolicy`` (the default), ``LFU_EvictionPolicy`` or
            ``DistanceLFU_EvictionPolicy``, or :class:`TTL_EvictionPolicy`. A threshold filter is
            asked about the ids without a slot, with their occurrences among the ids of the last
            ``eviction_interval`` batches.
        eviction_interval: batches that a threshold filter counts over; means nothing else here.
        input_hash_size, input_hash_func: as in TorchRec: ``input_hash_func(values,
            input_hash_size)`` is applied first. Sharded, 0 spreads ids over ranks by their
            remainder, other sizes in blocks.
        mch_size, mch_hash_func: accepted and ignored, as by TorchRec.
        name: for messages.
        output_global_offset, output_segments, buckets: of one shard; set by
            :meth:`rebuild_with_output_id_range`.

    ``state_dict`` has the names and the layout of ``MCHManagedCollisionModule``: either loads the
    other's.
    """

    _output_segments_tensor: torch.Tensor
    _current_iter_tensor: torch.Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: object | None = None,
        eviction_interval: int = 1,
        input_hash_size: int = 0,
        input_hash_func: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 0,
    ) -> None:
        zch_size = check_integer("zch_size", zch_size, minimum=2, maximum=MAX_SLOTS)
        offset = check_integer("output_global_offset", output_global_offset, minimum=0)
        input_hash_size = check_integer("input_hash_size", input_hash_size, minimum=0)
        eviction_interval = check_integer("eviction_interval", eviction_interval, minimum=1)
        buckets = check_integer("buckets", buckets, minimum=0)
        policy = LRU_EvictionPolicy() if eviction_policy is None else eviction_policy
        kind, options, threshold_filter, clock = _slot_policy(policy)
        if mch_size is not None or mch_hash_func is not None:
            warnings.warn("mch_size and mch_hash_func are ignored", UserWarning, stacklevel=2)
        segments = [offset, offset + zch_size] if output_segments is None else output_segments
        super().__init__(device=torch.device(device), output_segments=segments)
        self._zch_size = zch_size
        self._output_global_offset = offset
        self._input_hash_size = input_hash_size
        self._input_hash_func = input_hash_func
        self._eviction_policy = policy
        self._eviction_interval = eviction_interval
        self._buckets = buckets
        self._name = name
        self._policy, self._options = kind, options
        self._filter, self._clock = threshold_filter, clock
        self._init_output_segments_tensor = self._output_segments_tensor
        for buffer in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", *self._metadata()):
            self.register_buffer(
                buffer, torch.zeros(self._zch_size, dtype=torch.int64, device=self.device)
            )
        self._map: SlotMap | None = None
        self._loaded = False  # the buffers hold a state that the map does not know
        self._evicted: list[torch.Tensor] = []
        self._mapped: tuple[torch.Tensor, torch.Tensor] | None = None
        self._history: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.register_state_dict_pre_hook(_save_map)

    def _metadata(self) -> list[str]:
        counted = self._policy in (SlotPolicy.LFU, SlotPolicy.DISTANCE_LFU)
        timed = self._policy is not SlotPolicy.LFU
        return ["_mch_counts"] * counted + ["_mch_last_access_iter"] * timed

    @property
    def slot_map(self) -> SlotMap:
        """The map from ids to slots, without the shared one and the global offset."""
        if self._map is None:
            self._map = SlotMap(self._zch_size - 1, self._policy, **self._options)
        return self._map

    # ---- a batch ----

    def preprocess(self, features: Features) -> Features:
        """``input_hash_func`` on the values, where there is one."""
        if self._input_hash_func is None:
            return features
        return {
            name: _with_values(one, self._input_hash_func(one.values(), self._input_hash_size))
            for name, one in features.items()
        }

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """In training: give slots to the ids; in evaluation nothing. Returns ``features``."""
        if not self.training:
            return features
        values = [one.values() for one in features.values()]
        together = values[0] if len(values) == 1 else torch.cat(values)
        ids = _in_memory(together)
        if self._filter is not None:
            self._admit(ids)
        else:
            mapped = self._insert(ids)
            if len(values) == 1 and mapped.refused == 0:  # remap follows, with the same tensor
                slots = mapped.slots
                if self._output_global_offset:
                    slots += self._output_global_offset
                self._mapped = (values[0], slots)
        self._current_iter_tensor.fill_(self.slot_map.time)
        return features

    def remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> Features:
        """The ids' slots; the last slot for ids that have none. ``mutate_miss_lengths`` and
        ``write_weights`` mean nothing here, as in ``MCHManagedCollisionModule``."""
        remapped = {}
        offset, shared = self._output_global_offset, self._output_global_offset + self._zch_size - 1
        for name, one in features.items():
            values = one.values()
            if self._mapped is not None and self._mapped[0] is values:
                slots = self._mapped[1]
            else:
                slots = self.slot_map.find(_in_memory(values), missing=shared, offset=offset)
            remapped[name] = _with_values(one, slots.to(values.device))
        self._mapped = None
        return remapped

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """``features`` with ids replaced by slots; in training new ids get one."""
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)

    def _time(self) -> int | None:
        return None if self._clock is None else max(self.slot_map.time, int(self._clock()))

    def _insert(self, ids: torch.Tensor, counts: torch.Tensor | None = None) -> Any:
        mapped = self.slot_map.map(ids, counts=counts, time=self._time())
        if len(mapped.evicted):
            self._evicted.append(mapped.evicted.slots)
        return mapped

    def _admit(self, ids: torch.Tensor) -> None:
        """Give slots to the ids that the threshold filter lets in."""
        assert self._filter is not None
        distinct, counts = torch.unique(ids, return_counts=True)
        self._history.append((distinct, counts))
        seen, places = torch.unique(
            torch.cat([one for one, _ in self._history]), return_inverse=True
        )
        total = torch.zeros(len(seen), dtype=torch.int64, device="cpu").index_add_(
            0, places, torch.cat([count for _, count in self._history])
        )
        if len(self._history) == self._eviction_interval:
            del self._history[0]
        mask, _ = self._filter(total)
        known = self.slot_map.find(distinct) >= 0
        passed = known | mask.to("cpu")[torch.searchsorted(seen, distinct)]
        self._insert(distinct[passed], counts[passed])

    # ---- slots ----

    def evict(self) -> torch.Tensor | None:
        """The slots (int64, with the global offset) whose id went since the last call, each once;
        ``None`` if there are none. Their rows have to start anew. Slots that were never used before
        are not among them."""
        if not self._evicted:
            return None
        slots: torch.Tensor = torch.unique(torch.cat(self._evicted)) + self._output_global_offset
        self._evicted.clear()
        return slots.to(self._output_segments_tensor.device)

    def open_slots(self) -> torch.Tensor:
        """int64 [1]: slots without an id, the shared one not counted."""
        return torch.tensor(
            [self._zch_size - 1 - len(self.slot_map)], device=self._output_segments_tensor.device
        )

    def output_size(self) -> int:
        """The rows that the table must have."""
        return self._zch_size

    def input_size(self) -> int:
        """The range of the ids, for sharding; 0: any."""
        return self._input_hash_size

    def buckets(self) -> int:
        """A multiple of the shards it can be split into; 0: any number of shards."""
        return self._buckets

    def reset_inference_mode(self) -> None:
        """Forget which slots were evicted and not asked for."""
        self._evicted.clear()

    def follow(self, other: ManagedCollisionModule) -> torch.Tensor:
        """Give the ids the slots that they have in ``other``, a module of the same size. Returns
        the slots (int64, with the global offset) that belong to another id now."""
        after = other.slot_map.state()
        known = self.slot_map.find(after.ids)
        self.slot_map.restore(after)
        self._evicted.clear()
        self._mapped = None
        return after.slots[known != after.slots] + self._output_global_offset

    # ---- state ----

    def validate_state(self) -> None:
        """Take over the buffers if they were loaded. Refused, the map stays as it was."""
        if not self._loaded:
            return
        self._loaded = False
        start, end = self._output_global_offset, self._output_global_offset + self._zch_size
        segments = self._output_segments_tensor.tolist()
        if start not in segments or end not in segments:
            raise InvalidArgumentError(
                f"slots {start} to {end} of module {self._name!r} cannot be built out of the "
                f"segments {[one for one in segments if one >= 0]} of the saved state"
            )
        ids, slots, counts, last = saved_entries(
            dict(self.named_buffers()), self._zch_size, self._output_global_offset
        )
        time = int(self._current_iter_tensor.item())
        if len(last) and int(last.max()) > time:
            raise InvalidArgumentError(
                f"module {self._name!r}: an id was used at {int(last.max())}, after the time "
                f"{time} of the saved state"
            )
        self.slot_map.restore(SlotMapState(ids, slots, last, counts, time, draws=0))
        self._output_segments_tensor = self._init_output_segments_tensor
        self._evicted.clear()
        self._history.clear()
        self._mapped = None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._loaded = prefix + "_mch_sorted_raw_ids" in state_dict

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """An empty module for one shard of the slots, with the same options."""
        if not 0 <= output_id_range[0] < output_id_range[1]:
            raise wrong_value("output_id_range", output_id_range, "(begin, end), 0 <= begin < end")
        return type(self)(
            zch_size=output_id_range[1] - output_id_range[0],
            device=device or self.device,
            eviction_policy=self._eviction_policy,
            eviction_interval=self._eviction_interval,
            input_hash_size=self._input_hash_size,
            input_hash_func=self._input_hash_func,
            name=self._name,
            output_global_offset=output_id_range[0],
            output_segments=output_segments,
            buckets=len(output_segments) - 1,
        )

    def extra_repr(self) -> str:
        return f"zch_size={self._zch_size}, policy={self._policy.name}"


def _slot_policy(
    policy: object,
) -> tuple[SlotPolicy, dict[str, Any], ThresholdFilter | None, Callable[[], int] | None]:
    """(policy of the map, its options, threshold filter, clock)."""
    if isinstance(policy, TTL_EvictionPolicy):
        return SlotPolicy.TTL, {"ttl": policy.ttl}, policy.threshold_filtering_func, policy.clock
    kinds = {
        LRU_EvictionPolicy: SlotPolicy.LRU,
        LFU_EvictionPolicy: SlotPolicy.LFU,
        DistanceLFU_EvictionPolicy: SlotPolicy.DISTANCE_LFU,
    }
    if type(policy) not in kinds:
        allowed = [kind.__name__ for kind in (*kinds, TTL_EvictionPolicy)]
        raise wrong_type("eviction_policy", policy, f"an instance of {', '.join(allowed)}")
    kind = kinds[type(policy)]
    options = {}
    if kind is SlotPolicy.DISTANCE_LFU:
        options["decay_exponent"] = float(policy._decay_exponent)  # type: ignore[attr-defined]
    return kind, options, policy._threshold_filtering_func, None  # type: ignore[attr-defined]


def saved_entries(
    state: Mapping[str, torch.Tensor], zch_size: int, offset: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, slots, counts, last), int64 [n] each, of a saved state of TorchRec's module or ours,
    without free entries and the shared slot."""
    ids = state["_mch_sorted_raw_ids"].cpu()
    slots = state["_mch_remapped_ids_mapping"].cpu() - offset
    nothing = torch.zeros_like(ids)
    counts = state.get("_mch_counts", nothing).cpu().clamp(0, MAX_COUNT)
    last = state.get("_mch_last_access_iter", nothing).cpu()
    used = (slots != zch_size - 1) & ((ids != FREE) | (counts > 0) | (last > 0))
    return ids[used], slots[used], counts[used], last[used]


def _with_values(feature: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(
        values=values,
        lengths=feature.lengths(),
        offsets=feature.offsets(),
        weights=feature.weights_or_none(),
    )


def _in_memory(values: torch.Tensor) -> torch.Tensor:
    if values.dtype in (torch.int64, torch.uint64):
        return values.to("cpu")
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise wrong_type("values.dtype", values.dtype, "an integer type")
    return values.to("cpu", torch.int64)


def _save_map(module: ManagedCollisionModule, prefix: str, keep_vars: bool) -> None:
    """Brings the buffers up to date before they are saved: ids ascending, then free entries."""
    if module.device.type == "meta":
        return
    if module._mch_sorted_raw_ids.device.type == "meta":
        raise UsageError(f"the buffers of module {module._name!r} are on the meta device")
    state = module.slot_map.state()
    order = torch.argsort(state.ids, stable=True)
    used = len(order)
    size = module._zch_size
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    taken[state.slots] = True
    free = torch.nonzero(~taken)[:, 0]  # the shared slot is the last of them
    columns = {
        "_mch_sorted_raw_ids": (state.ids, torch.full((size - used,), FREE, device="cpu")),
        "_mch_remapped_ids_mapping": (state.slots, free),
        "_mch_counts": (state.counts, torch.zeros(size - used, dtype=torch.int64, device="cpu")),
        "_mch_last_access_iter": (
            state.last,
            torch.zeros(size - used, dtype=torch.int64, device="cpu"),
        ),
    }
    offset = {"_mch_remapped_ids_mapping": module._output_global_offset}
    with torch.no_grad():
        for name, (entries, rest) in columns.items():
            if hasattr(module, name):
                content = torch.cat([entries[order], rest]) + offset.get(name, 0)
                getattr(module, name).copy_(content)
        module._current_iter_tensor.fill_(state.time)
