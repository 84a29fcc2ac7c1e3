"""What a slot map must do, written down as simply as possible."""

from __future__ import annotations

from dataclasses import dataclass

from dynamicemb.table.slot_map import SlotPolicy
from reference import hash64


@dataclass
class Use:
    id: int
    last: int
    count: int
    batch: int


class ReferenceMap:
    def __init__(
        self,
        capacity: int,
        policy: SlotPolicy,
        *,
        decay_exponent: float = 1.0,
        min_used_freq_power: int = 5,
        ttl: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.policy = policy
        self.decay_exponent = decay_exponent
        self.first = min_used_freq_power
        self.ttl = ttl
        self.slots: dict[int, Use] = {}
        self.of: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.time = self.batch = self.draws = 0

    def key(self, use: Use) -> tuple[float, int]:
        age = self.time - use.last
        return {
            SlotPolicy.LRU: (use.last, 0),
            SlotPolicy.TTL: (use.last, 0),
            SlotPolicy.LFU: (use.count, 0),
            SlotPolicy.DISTANCE_LFU: (use.count / (age + 1.0) ** self.decay_exponent, 0),
            SlotPolicy.LFU_LRU: (use.count, use.last),
        }[self.policy]

    def touch(self, use: Use, count: int) -> None:
        use.last, use.batch = self.time, self.batch
        if self.policy is not SlotPolicy.LFU_LRU:
            use.count += count
            return
        for _ in range(count):
            if use.count < 31:
                self.draws += 1
                use.count += hash64(self.draws) % 2**use.count == 0

    def remove(self, slot: int) -> tuple[int, int]:
        use = self.slots.pop(slot)
        del self.of[use.id]
        return use.id, slot

    def evict(self, count: int, *, spared: int | None = None, expired: bool = False) -> list:
        def may_go(slot: int, use: Use) -> bool:
            if self.pins.get(slot, 0) or use.batch == spared:
                return False
            return not expired or (self.ttl is not None and use.last < self.time - self.ttl)

        going = [slot for slot, use in self.slots.items() if may_go(slot, use)]
        going.sort(key=lambda slot: (self.key(self.slots[slot]), slot))
        return [self.remove(slot) for slot in going[:count]]

    def map(self, ids: list[int], counts: list[int] | None = None, *, evict: bool = True) -> tuple:
        self.time += 1
        self.batch += 1
        counts = counts or [1] * len(ids)
        new: dict[int, int] = {}
        occurrences = 0
        for i, count in zip(ids, counts, strict=True):
            if i in self.of:
                self.touch(self.slots[self.of[i]], count)
            else:
                occurrences += 1
                new[i] = new.get(i, 0) + count
        evicted = []
        if self.policy is SlotPolicy.TTL:
            evicted = self.evict(2 * occurrences + 1024, spared=self.batch, expired=True)
        elif evict:
            evicted = self.evict(
                max(0, len(self.slots) + len(new) - self.capacity), spared=self.batch
            )
        inserted = []
        free = (slot for slot in range(self.capacity) if slot not in self.slots)
        for i, count in new.items():
            slot = next(free, None)
            if slot is None:
                break
            mixed = self.policy is SlotPolicy.LFU_LRU
            use = Use(i, self.time, self.first if mixed else 0, self.batch)
            self.touch(use, count - mixed)
            self.slots[slot] = use
            self.of[i] = slot
            inserted.append((i, slot))
        return [self.of.get(i, -1) for i in ids], inserted, evicted, len(new) - len(inserted)
