"""Ids to slots 0 .. capacity - 1, on the engine's index: for tables whose rows are numbered."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dynamicemb.errors import (
    InvalidArgumentError,
    OutOfMemoryError,
    check_bool,
    check_enum,
    check_integer,
    check_number,
    wrong_type,
    wrong_value,
)
from dynamicemb.table.engine import _engine, address, threads
from dynamicemb.tracing import check_memory, refuse_tracers

MAX_SLOTS = 2**31
MAX_TIME = 2**59 - 1
MAX_COUNT = 2**32 - 1


class SlotPolicy(enum.Enum):
    """Whose slot is taken when all are: the smallest (key, slot)."""

    LRU = 0  #: key: the time of the last use
    LFU = 1  #: key: the number of uses
    DISTANCE_LFU = 2  #: key: uses / (age + 1) ** decay_exponent, age = now - last use
    LFU_LRU = 3  #: key: the logarithm of the uses, grown at random; then the time of the last use
    TTL = 4  #: key: the time of the last use; only ids whose last use is more than ttl ago


class IdSlots:
    """Ids and their slots, as tensors of their own when they are asked for."""

    def __init__(self, found: _engine.IdSlots) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    @cached_property
    def _columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty(len(self), dtype=torch.int64, device="cpu")
        slots = torch.empty(len(self), dtype=torch.int64, device="cpu")
        self._found.copy(ids.data_ptr(), slots.data_ptr())
        return ids, slots

    @property
    def ids(self) -> torch.Tensor:
        """int64 [n]."""
        return self._columns[0]

    @property
    def slots(self) -> torch.Tensor:
        """int64 [n]."""
        return self._columns[1]

    def pairs(self) -> torch.Tensor:
        """int64 [n, 2]: (id, slot)."""
        pairs = torch.empty(len(self), 2, dtype=torch.int64, device="cpu")
        self._found.copy_pairs(pairs.data_ptr())
        return pairs


@dataclass(frozen=True)
class Mapped:
    """What :meth:`SlotMap.map` did. ``slots``: int64 [n], -1 for ids that were refused;
    ``inserted``: the new ids, in the order of the batch; ``evicted``: the ids that made room, the
    first to go first; ``refused``: how many distinct ids found no slot."""

    slots: torch.Tensor
    inserted: IdSlots
    evicted: IdSlots
    refused: int


@dataclass(frozen=True)
class SlotMapState:
    """Everything a map knows, in the order of the slots: all int64 [n], and two numbers.

    ``last``: time of the last use; ``counts``: uses (LFU_LRU: their logarithm; 0 with LRU and TTL,
    which do not count); ``draws``: random numbers drawn so far. Pins are not part of it.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    counts: torch.Tensor
    time: int
    draws: int


class SlotMap:
    """A map from ids (any int64) to slots.

    Exact until full: the first ``capacity`` distinct ids have a slot of their own; new ids take the
    lowest free slots, in the order of the batch. When no slot is free, the policy says which ids
    make room; ids of the same batch and pinned slots never do. An id that finds no slot then is
    refused. Results are a function of the calls: the number of threads changes nothing.

    Time is a number that the caller gives with a batch and that never decreases: steps, seconds,
    anything. Without one, every :meth:`map` is one later than the last.

    Args:
        capacity: the number of slots, up to 2**31.
        policy: see :class:`SlotPolicy`.
        decay_exponent: of DISTANCE_LFU.
        min_used_freq_power: of LFU_LRU: the logarithm that a new id starts with, 0 to 31.
        ttl: of TTL, in the unit of the time. Each :meth:`map` evicts at most twice the number of
            its new ids, and 1,024; an expired id that comes back before its turn stays.
    """

    def __init__(
        self,
        capacity: int,
        policy: SlotPolicy = SlotPolicy.LRU,
        *,
        decay_exponent: float = 1.0,
        min_used_freq_power: int = 5,
        ttl: int | None = None,
    ) -> None:
        self.capacity = check_integer("capacity", capacity, minimum=1, maximum=MAX_SLOTS)
        self.policy = check_enum("policy", policy, SlotPolicy)
        self.decay_exponent = check_number("decay_exponent", decay_exponent, minimum=0)
        self.min_used_freq_power = check_integer(
            "min_used_freq_power", min_used_freq_power, minimum=0, maximum=31
        )
        if ttl is None and policy is SlotPolicy.TTL:
            raise wrong_value("ttl", ttl, "an integer of at least 1, with SlotPolicy.TTL")
        self.ttl = None if ttl is None else check_integer("ttl", ttl, minimum=1, maximum=MAX_TIME)
        try:
            self._engine = _engine.SlotMap(
                capacity=self.capacity,
                policy=policy.value,
                decay_exponent=self.decay_exponent,
                first_logarithm=self.min_used_freq_power,
                ttl=self.ttl or 0,
            )
        except MemoryError as error:
            raise OutOfMemoryError(f"a map of {capacity} slots: {error}") from error

    def __len__(self) -> int:
        """Slots in use."""
        return self._engine.size

    @property
    def bytes(self) -> int:
        return self._engine.bytes

    @property
    def time(self) -> int:
        """The time of the last call that had one."""
        return self._engine.time

    def find(self, ids: torch.Tensor, *, missing: int = -1, offset: int = 0) -> torch.Tensor:
        """int64 [n]: the slots of ``ids`` (int64 [n]) plus ``offset``, and ``missing`` where there
        is none. Changes nothing."""
        ids = _checked("ids", ids)
        slots = torch.empty_like(ids)
        self._engine.find(ids.data_ptr(), len(ids), threads(), slots.data_ptr(), missing, offset)
        return slots

    def map(
        self,
        ids: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
        time: int | None = None,
        evict: bool = True,
        pin: bool = False,
        out: torch.Tensor | None = None,
    ) -> Mapped:
        """Find the slots of ``ids`` (int64 [n]) and give one to those that have none.

        Every occurrence is one use, or ``counts[i]`` (int64 [n], positive) uses. With
        ``evict=False`` new ids are refused when no slot is free. ``pin`` pins the slot of each
        occurrence once; ``unpin(mapped.slots)`` undoes it. The slots go to ``out``, where given
        (int64 [n], contiguous, apart from ``ids``); ids that are refused leave their places there
        as they were.
        """
        ids = _checked("ids", ids)
        if out is not None:
            whole = _checked("out", out).data_ptr() == out.data_ptr()
            if not whole or out.shape != ids.shape:
                raise wrong_value("out.shape", tuple(out.shape), f"{tuple(ids.shape)}, contiguous")
        if counts is not None:
            counts = _checked("counts", counts)
            if counts.shape != ids.shape:
                raise wrong_value("counts.shape", tuple(counts.shape), str(tuple(ids.shape)))
            if len(counts) and int(counts.min()) < 1:
                raise wrong_value("counts", int(counts.min()), "at least 1")
        slots = torch.empty_like(ids) if out is None else out
        try:
            inserted, evicted, refused = self._engine.map(
                ids.data_ptr(),
                len(ids),
                address(counts),
                time=self._later(time),
                evict=check_bool("evict", evict),
                pin=check_bool("pin", pin),
                keep=out is not None,
                threads=threads(),
                slots=slots.data_ptr(),
            )
        except MemoryError as error:
            raise OutOfMemoryError(f"a map of {self.capacity} slots: {error}") from error
        return Mapped(slots, IdSlots(inserted), IdSlots(evicted), refused)

    def evict(self, count: int, *, expired: bool = False, time: int | None = None) -> IdSlots:
        """Free the first ``count`` slots in the order of the policy, or as many as are not pinned;
        with ``expired`` only those of expired ids (TTL). Returns them, the first to go first."""
        count = check_integer("count", count, minimum=0, maximum=MAX_SLOTS)
        now = self.time if time is None else self._later(time)
        if check_bool("expired", expired) and self.policy is not SlotPolicy.TTL:
            raise wrong_value("expired", expired, "False, unless the policy is TTL")
        return IdSlots(self._engine.evict(count, expired=expired, time=now, threads=threads()))

    def erase(self, ids: torch.Tensor) -> IdSlots:
        """Free the slots of ``ids`` that have one and are not pinned, and return them."""
        ids = _checked("ids", ids)
        return IdSlots(self._engine.erase(ids.data_ptr(), len(ids), threads()))

    def pin(self, slots: torch.Tensor) -> None:
        """Keep these slots (int64 [n]; -1 is skipped) until they are unpinned as often."""
        slots = self._checked_slots(slots)
        self._engine.pin(slots.data_ptr(), len(slots))

    def unpin(self, slots: torch.Tensor) -> None:
        """Undo one :meth:`pin` of these slots."""
        slots = self._checked_slots(slots)
        self._engine.unpin(slots.data_ptr(), len(slots))

    def used_since(self, time: int | None = None) -> IdSlots:
        """The ids that were used after ``time`` (``None``: all), in the order of their slots."""
        moment = 0 if time is None else check_integer("time", time, minimum=0, maximum=MAX_TIME)
        return IdSlots(self._engine.used_since(moment, time is None))

    def state(self) -> SlotMapState:
        """See :class:`SlotMapState`; :meth:`restore` makes an equal map of it."""
        which = self._engine.used_since(0, True)
        pairs = IdSlots(which)
        last = torch.empty(len(which), dtype=torch.int64, device="cpu")
        counts = torch.empty(len(which), dtype=torch.uint32, device="cpu")
        self._engine.uses(which, last.data_ptr(), counts.data_ptr())
        return SlotMapState(
            pairs.ids,
            pairs.slots,
            last,
            counts.to(torch.int64),
            self._engine.time,
            self._engine.draws,
        )

    def restore(self, state: SlotMapState) -> None:
        """Start again from ``state``, with no pins. Nothing changes if it is refused."""
        ids, slots = _checked("ids", state.ids), self._checked_slots(state.slots)
        last, counts = _checked("last", state.last), _checked("counts", state.counts)
        time = check_integer("time", state.time, minimum=0, maximum=MAX_TIME)
        draws = check_integer("draws", state.draws, minimum=0, maximum=2**64 - 1)
        for name, column in (("slots", slots), ("last", last), ("counts", counts)):
            if column.shape != ids.shape:
                raise wrong_value(f"{name}.shape", tuple(column.shape), str(tuple(ids.shape)))
        for name, column, limit in (
            ("slots", slots, self.capacity - 1),
            ("last", last, time),
            ("counts", counts, MAX_COUNT if self.policy is not SlotPolicy.LFU_LRU else 31),
        ):
            if len(column) and not (int(column.min()) >= 0 and int(column.max()) <= limit):
                raise wrong_value(
                    name, f"{int(column.min())} to {int(column.max())}", f"0 to {limit}"
                )
        for name, column in (("ids", ids), ("slots", slots)):
            if len(torch.unique(column)) != len(column):
                raise InvalidArgumentError(f"{name} has a number twice; allowed: distinct ones")
        slots32, counts32 = slots.to(torch.uint32), counts.to(torch.uint32)
        self._engine.restore(
            ids.data_ptr(),
            slots32.data_ptr(),
            last.data_ptr(),
            counts32.data_ptr(),
            len(ids),
            time,
            draws,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying and pickling carry the ids along, not the pins."""
        return _restored, (
            self.capacity,
            self.policy,
            self.decay_exponent,
            self.min_used_freq_power,
            self.ttl,
            self.state(),
        )

    def _later(self, time: int | None) -> int:
        now = self.time
        if time is None:
            return now + 1
        return check_integer("time", time, minimum=now, maximum=MAX_TIME)

    def _checked_slots(self, slots: object) -> torch.Tensor:
        tensor = _checked("slots", slots)
        if len(tensor) and not -1 <= int(tensor.min()) <= int(tensor.max()) < self.capacity:
            raise wrong_value(
                "slots", f"{int(tensor.min())} to {int(tensor.max())}", f"-1 to {self.capacity - 1}"
            )
        return tensor


def _restored(
    capacity: int,
    policy: SlotPolicy,
    decay_exponent: float,
    min_used_freq_power: int,
    ttl: int | None,
    state: SlotMapState,
) -> SlotMap:
    table = SlotMap(
        capacity,
        policy,
        decay_exponent=decay_exponent,
        min_used_freq_power=min_used_freq_power,
        ttl=ttl,
    )
    table.restore(state)
    return table


def _checked(name: str, tensor: object) -> torch.Tensor:
    """``tensor`` as contiguous int64 [n] in main memory (uint64 by its bits)."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int64, torch.uint64):
        raise wrong_type(name, getattr(tensor, "dtype", tensor), "a tensor of int64 or uint64")
    if tensor.dim() != 1:
        raise wrong_value(f"{name}.shape", tuple(tensor.shape), "one dimension")
    if tensor.device.type != "cpu":
        raise wrong_value(f"{name}.device", str(tensor.device), "'cpu'")
    refuse_tracers()
    check_memory(name, tensor)
    return tensor.resolve_neg().contiguous().view(torch.int64)
