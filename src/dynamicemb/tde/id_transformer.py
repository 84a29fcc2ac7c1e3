"""From ids to the slots of a table of fixed size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dynamicemb.errors import check_integer, wrong_type, wrong_value
from dynamicemb.table.slot_map import SlotMap, SlotPolicy
from dynamicemb.tde.tensor_list import TensorList

_POLICIES = {
    "mixed_lru_lfu": SlotPolicy.LFU_LRU,
    "lru": SlotPolicy.LRU,
    "lfu": SlotPolicy.LFU,
}


class TransformResult(NamedTuple):
    """Whether every id has a slot, and the new ids: int64 [n, 2] of (id, slot)."""

    success: bool
    ids_to_fetch: torch.Tensor


def make_slot_map(
    num_embedding: int, eviction_config: Any = None, transform_config: Any = None
) -> SlotMap:
    """The map that the configurations describe; see :class:`IDTransformer`."""
    eviction = _checked("eviction_config", eviction_config, {"type": "mixed_lru_lfu"})
    transform = _checked("transform_config", transform_config, {"type": "naive"})
    if eviction["type"] not in _POLICIES:
        raise wrong_value("eviction_config['type']", eviction["type"], ", ".join(_POLICIES))
    if transform["type"] not in ("naive", "cacheline"):
        raise wrong_value("transform_config['type']", transform["type"], "naive, cacheline")
    power = eviction.get("min_used_freq_power", 5)
    _only("eviction_config", eviction, ("type", "min_used_freq_power"))
    _only("transform_config", transform, ("type",))
    check_integer("eviction_config['min_used_freq_power']", power, minimum=0, maximum=31)
    check_integer("num_embedding", num_embedding, minimum=1, maximum=2**31)
    return SlotMap(num_embedding, _POLICIES[eviction["type"]], min_used_freq_power=power)


def _checked(name: str, config: Any, default: dict[str, Any]) -> Mapping[str, Any]:
    if config is None:
        return default
    if not isinstance(config, Mapping):
        raise wrong_type(name, config, f"a dictionary such as {default}")
    if "type" not in config:
        raise wrong_value(name, dict(config), f"a dictionary with a type, such as {default}")
    return config


def _only(name: str, config: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in config:
        if key not in allowed:
            raise wrong_value(f"a key of {name}", key, ", ".join(allowed))


def _can_be_written(slots: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether the engine can write slots straight there while it reads the ids."""
    plain = slots.dtype == torch.int64 and slots.device.type == "cpu" and slots.is_contiguous()
    apart = slots.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr()
    return plain and apart and not slots.is_neg()


class IDTransformer:
    """Gives ids (any int64) slots 0 .. num_embedding - 1.

    Args:
        num_embedding: slots.
        eviction_config: ``{"type": "mixed_lru_lfu", "min_used_freq_power": 5}``, or a type of
            "lru" or "lfu".
        transform_config: ``{"type": "naive"}`` or "cacheline", which are the same here: the
            engine's index.
    """

    def __init__(
        self,
        num_embedding: int,
        eviction_config: Mapping[str, Any] | None = None,
        transform_config: Mapping[str, Any] | None = None,
    ) -> None:
        self._num_embedding = num_embedding
        self._transformer = make_slot_map(num_embedding, eviction_config, transform_config)
        self._saved: int | None = None

    def transform(
        self, global_ids: TensorList, cache_ids: TensorList, time: int
    ) -> TransformResult:
        """Write the slots of ``global_ids`` into ``cache_ids``, tensor by tensor, in place.

        New ids take the lowest free slots, in order. ``success`` is False if there are more than
        free slots: those without one keep what their place in ``cache_ids`` held. ``time`` must not
        be less than before.
        """
        if len(global_ids) != len(cache_ids):
            raise wrong_value("len(cache_ids)", len(cache_ids), str(len(global_ids)))
        sizes = [tensor.numel() for tensor in global_ids]
        for index, tensor in enumerate(cache_ids):
            if tensor.shape != global_ids[index].shape:
                shape = tuple(global_ids[index].shape)
                raise wrong_value(f"cache_ids[{index}].shape", tuple(tensor.shape), str(shape))
        now = check_integer("time", time, minimum=0)
        if now < self._transformer.time:
            raise wrong_value("time", now, f"{self._transformer.time} or more: it cannot go back")
        ids = [tensor.reshape(-1).cpu() for tensor in global_ids]
        if len(ids) == 1 and _can_be_written(cache_ids[0], ids[0]):
            mapped = self._transformer.map(ids[0], time=now, evict=False, out=cache_ids[0].view(-1))
            return TransformResult(mapped.refused == 0, mapped.inserted.pairs())
        joined = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *ids])
        mapped = self._transformer.map(joined, time=now, evict=False)
        for tensor, slots in zip(cache_ids, mapped.slots.split(sizes), strict=True):
            slots = slots.view(tensor.shape)
            if mapped.refused:
                slots = torch.where(slots >= 0, slots, tensor.to(slots))
            tensor.copy_(slots)
        return TransformResult(mapped.refused == 0, mapped.inserted.pairs())

    def evict(self, num_to_evict: int) -> torch.Tensor:
        """Forget up to ``num_to_evict`` ids, those used least first; int64 [n, 2] (id, slot)."""
        return self._transformer.evict(num_to_evict).pairs()

    def save(self) -> torch.Tensor:
        """int64 [n, 2] (id, slot) of the ids used since the last call."""
        used = self._transformer.used_since(self._saved).pairs()
        self._saved = self._transformer.time
        return used
