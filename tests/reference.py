"""A table in plain Python: what the engine must do, written to be read and not to be fast.

It knows nothing of torch. A row's content is opaque: it keeps what it is given, and `INITIALISED`
for a row that the initialiser makes. A score is a tuple of unsigned words: one word, or
(timestamp, count) for the pair. The last word decides evictions, the first one export thresholds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

U64 = 2**64 - 1
ONE_BUCKET = 2**63 - 1  # MAX_BUCKET_CAPACITY
FAILED, REJECTED = -1, -2
INITIALISED = "initialised"

STRATEGIES = ("TIMESTAMP", "STEP", "CUSTOMIZED", "LFU", "NO_EVICTION", "TIMESTAMP_LFU")

Row = object
Score = tuple[int, ...]
Admit = Callable[[list[int], list[int]], list[bool]]


def hash64(id_: int) -> int:
    """The 64-bit finaliser of MurmurHash3, of the id as an unsigned number."""
    h = id_ & U64
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & U64
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & U64
    return h ^ h >> 33


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def initial_buckets(max_buckets: int, wanted: int) -> int:
    """The smallest ceil(max_buckets / 2^k) that is at least `wanted`."""
    buckets = max_buckets
    while buckets > 1 and ceil_div(buckets, 2) >= wanted:
        buckets = ceil_div(buckets, 2)
    return buckets


@dataclass
class Entry:
    id: int
    row: Row
    score: Score


class ReferenceTable:
    """The batch semantics, one id at a time.

    Invariants: `slots[s]` is the entry of slot s or None; `where[id]` is the slot of every id that
    is present; the slot of an id lies in `bucket_of(id)`.

    `clock()` is read once per batch by the strategies with a timestamp. `admit(ids, counts)` is
    called with the missing ids of a training batch and says which may enter.
    """

    def __init__(
        self,
        *,
        max_capacity: int,
        init_capacity: int | None = None,
        bucket_capacity: int = 128,
        max_load_factor: float = 0.5,
        strategy: str = "TIMESTAMP",
        clock: Callable[[], int] | None = None,
        admit: Admit | None = None,
    ) -> None:
        if bucket_capacity == ONE_BUCKET:
            bucket_capacity = ceil_div(max_capacity, 16) * 16
        self.bucket_capacity = bucket_capacity
        self.max_buckets = ceil_div(max_capacity, bucket_capacity)
        wanted = ceil_div(max_capacity if init_capacity is None else init_capacity, bucket_capacity)
        self.num_buckets = initial_buckets(self.max_buckets, wanted)
        self.max_load_factor = max_load_factor
        self.strategy = strategy
        self.clock = clock
        self.admit = admit
        self.slots: list[Entry | None] = [None] * self.capacity
        self.where: dict[int, int] = {}
        self.step = 1
        self.custom_score: int | None = None
        self.next_number = 0
        self.stats: Counter[str] = Counter()

    # --- looking ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self.num_buckets * self.bucket_capacity

    def __len__(self) -> int:
        return len(self.where)

    def bucket_of(self, id_: int, num_buckets: int | None = None) -> int:
        return (hash64(id_) >> 32) * (num_buckets or self.num_buckets) >> 32

    def entry(self, id_: int) -> Entry:
        entry = self.slots[self.where[id_]]
        assert entry is not None
        return entry

    def find(self, ids: Sequence[int]) -> list[Entry | None]:
        return [self.entry(i) if i in self.where else None for i in ids]

    def contains(self, ids: Sequence[int]) -> list[bool]:
        return [i in self.where for i in ids]

    def export(self, threshold: int = 0) -> Iterator[Entry]:
        """Entries in slot order, those whose first score word is at least `threshold`."""
        return (e for e in self.slots if e is not None and e.score[0] >= threshold)

    # --- one training batch ----------------------------------------------------------------------

    def find_or_insert(
        self, ids: Sequence[int], counts: Sequence[int] | None = None
    ) -> tuple[list[int], list[Entry]]:
        """Returns the slot of every position (or FAILED, REJECTED) and the evicted entries."""
        occurrences: dict[int, int] = {}  # in order of first occurrence
        for id_, n in zip(ids, counts if counts is not None else [1] * len(ids), strict=True):
            occurrences[id_] = occurrences.get(id_, 0) + n

        now = self._now()
        hits = [i for i in occurrences if i in self.where]
        missing = [i for i in occurrences if i not in self.where]
        self.stats["hits"] += len(hits)
        self.stats["misses"] += len(missing)
        for id_ in hits:
            entry = self.entry(id_)
            entry.score = self._touched(entry.score, now, occurrences[id_])

        admitted = missing
        if self.admit is not None and missing:
            verdict = self.admit(missing, [occurrences[i] for i in missing])
            admitted = [i for i, yes in zip(missing, verdict, strict=True) if yes]
        self.stats["rejections"] += len(missing) - len(admitted)

        evicted = self._place(admitted, hits)
        for id_ in admitted:
            if id_ in self.where:
                entry = self.entry(id_)
                entry.row, entry.score = INITIALISED, self._fresh(now, occurrences[id_])
        if self.strategy == "STEP":
            self.step += 1

        rejected = set(missing) - set(admitted)
        slots = [REJECTED if i in rejected else self.where.get(i, FAILED) for i in ids]
        return slots, evicted

    # --- given rows ------------------------------------------------------------------------------

    def insert(
        self, ids: Sequence[int], rows: Sequence[Row], scores: Sequence[Score] | None = None
    ) -> tuple[list[bool], list[Entry]]:
        """Inserts or overwrites; the last duplicate's data wins.

        Without scores, ids are scored as in a training batch.
        """
        last = {id_: position for position, id_ in enumerate(ids)}  # in order of first occurrence
        occurrences = Counter(ids)
        now = self._now() if scores is None else 0
        hits = [i for i in last if i in self.where]
        new = [i for i in last if i not in self.where]
        evicted = self._place(new, hits)
        for id_, position in last.items():
            if id_ in self.where:
                self.entry(id_).row = rows[position]
                if scores is not None:
                    self.entry(id_).score = scores[position]
        for id_ in hits:
            if scores is None:
                entry = self.entry(id_)
                entry.score = self._touched(entry.score, now, occurrences[id_])
        for id_ in new:
            if id_ in self.where and scores is None:
                self.entry(id_).score = self._fresh(now, occurrences[id_])
        if scores is not None:
            self._pass_numbers(ids)
        return self.contains(ids), evicted

    def assign(
        self, ids: Sequence[int], rows: Sequence[Row], scores: Sequence[Score] | None = None
    ) -> list[bool]:
        """Overwrites ids that are there. Without scores, theirs stay."""
        for position, id_ in enumerate(ids):
            if id_ in self.where:
                entry = self.entry(id_)
                entry.row = rows[position]
                if scores is not None:
                    entry.score = scores[position]
        if scores is not None:
            self._pass_numbers(ids)
        return self.contains(ids)

    def _pass_numbers(self, ids: Sequence[int]) -> None:
        """NO_EVICTION: later numbers stay above those that came in from outside."""
        if self.strategy == "NO_EVICTION":
            given = [self.entry(id_).score[0] + 1 for id_ in ids if id_ in self.where]
            self.next_number = min(max([self.next_number, *given]), U64)

    def erase(self, ids: Sequence[int]) -> list[bool]:
        erased = []
        for id_ in ids:
            slot = self.where.pop(id_, None)
            erased.append(slot is not None)
            if slot is not None:
                self.slots[slot] = None
        return erased

    def clear(self) -> None:
        self.slots = [None] * self.capacity
        self.where = {}
        self.next_number = 0

    # --- scores ----------------------------------------------------------------------------------

    def _now(self) -> int:
        """The number this batch stamps on what it touches."""
        if self.strategy in ("TIMESTAMP", "TIMESTAMP_LFU"):
            assert self.clock is not None
            return self.clock()
        if self.strategy == "STEP":
            return self.step
        if self.strategy == "CUSTOMIZED":
            assert self.custom_score is not None, "set_score was not called"
            return self.custom_score
        return 0

    def _touched(self, old: Score, now: int, occurrences: int) -> Score:
        if self.strategy == "LFU":
            return (old[0] + occurrences,)
        if self.strategy == "TIMESTAMP_LFU":
            return (now, old[1] + occurrences)
        if self.strategy == "NO_EVICTION":
            return old
        return (now,)

    def _fresh(self, now: int, occurrences: int) -> Score:
        if self.strategy == "LFU":
            return (occurrences,)
        if self.strategy == "TIMESTAMP_LFU":
            return (now, occurrences)
        if self.strategy == "NO_EVICTION":
            number = self.next_number
            self.next_number = min(number + 1, U64)
            return (number,)
        return (now,)

    # --- places ----------------------------------------------------------------------------------

    def _place(self, new: Sequence[int], hits: Sequence[int]) -> list[Entry]:
        """Gives each new id a slot, in order, or counts it as a failure; returns the evicted."""
        self._grow(len(self) + len(new))
        touched = {self.where[i] for i in hits}
        evicted = []
        for id_ in new:
            slot = self._slot_for(id_, touched)
            if slot is None:
                self.stats["failures"] += 1
                continue
            victim = self.slots[slot]
            if victim is not None:
                evicted.append(victim)
                del self.where[victim.id]
            self.slots[slot] = Entry(id_, None, ())
            self.where[id_] = slot
            touched.add(slot)
            self.stats["inserts"] += 1
        self.stats["evictions"] += len(evicted)
        return evicted

    def _slot_for(self, id_: int, touched: set[int]) -> int | None:
        """The lowest free slot of the bucket, else the smallest (score, slot) left alone so far."""
        first = self.bucket_of(id_) * self.bucket_capacity
        bucket = range(first, first + self.bucket_capacity)
        for slot in bucket:
            if self.slots[slot] is None:
                return slot
        if self.strategy == "NO_EVICTION":
            return None
        candidates = [(e.score[-1], s) for s in bucket if (e := self.slots[s]) and s not in touched]
        return min(candidates)[1] if candidates else None

    def _grow(self, rows: int) -> None:
        """Doubles the buckets, up to the maximum, until `rows` fit under the load factor."""
        buckets = self.num_buckets
        while (
            self.max_load_factor > 0
            and rows > self.max_load_factor * (buckets * self.bucket_capacity)
            and buckets < self.max_buckets
        ):
            buckets = min(2 * buckets, self.max_buckets)
        if buckets == self.num_buckets:
            return
        moved: list[list[Entry]] = [[] for _ in range(buckets)]
        for entry in self.export():
            moved[self.bucket_of(entry.id, buckets)].append(entry)
        if any(len(bucket) > self.bucket_capacity for bucket in moved):
            return  # a last step that is no doubling can overflow a bucket: stay as we are
        self.num_buckets = buckets
        self.slots = [None] * self.capacity
        for b, bucket in enumerate(moved):
            for position, entry in enumerate(bucket):
                slot = b * self.bucket_capacity + position
                self.slots[slot] = entry
                self.where[entry.id] = slot
