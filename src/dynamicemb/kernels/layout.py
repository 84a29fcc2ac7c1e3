"""What kernels know of the tables of a call: one column per table in two small arrays.

Addresses and integers are int64 ``[INTEGERS, tables]``, numbers of the initialiser and of the
optimizer step float32 ``[FLOATS, tables]`` and ``[STEP_NUMBERS, tables]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Rows of the integer array.
DIGESTS = tl.constexpr(0)  # uint8 per slot; 0: empty
KEYS = tl.constexpr(1)  # int64 per slot, followed by its score
SCORES = tl.constexpr(2)  # 8 bytes after the keys
TIMES = tl.constexpr(3)  # int64 per slot, of the pair strategy
TOUCHED = tl.constexpr(4)  # uint8 per slot: the number of the batch that used it last
HEADS = tl.constexpr(5)  # HEAD bytes per bucket: see below
ROWS = tl.constexpr(6)
STATE = tl.constexpr(7)
BUCKETS = tl.constexpr(8)
SEED = tl.constexpr(9)
CLASS = tl.constexpr(10)
COUNTERS = tl.constexpr(11)  # int64 [8]
STAMPS = tl.constexpr(12)  # int32 per slot: when its row changed last; 0: not written down
QUEUES = tl.constexpr(13)  # QUEUE bytes per bucket: see kernels/queues.py
INTEGERS = 14

#: Bytes from the id, or the score, of a slot to that of the next: one access brings both.
RECORD = tl.constexpr(16)

#: Bytes of a bucket's head: the first of its newcomers, int32, -1 between batches; where the slots
#: that it evicts are listed in a batch, int32.
HEAD = tl.constexpr(8)
LISTED_AT = tl.constexpr(4)

#: Rows of a batch's array, int64 [BATCH_NUMBERS, tables].
SCORE = tl.constexpr(0)  # what rows that the batch meets take as score
TIME = tl.constexpr(1)  # the same of the pair strategy's time
MARK = tl.constexpr(2)  # the number of the batch in TOUCHED
BATCH_NUMBERS = 3

#: Rows of the initialiser's array.
VALUE = tl.constexpr(0)
LOWER = tl.constexpr(1)
UPPER = tl.constexpr(2)
MEAN = tl.constexpr(3)
SPREAD = tl.constexpr(4)
CDF_LOWER = tl.constexpr(5)
CDF_UPPER = tl.constexpr(6)
MISSING = tl.constexpr(7)
INITIAL = tl.constexpr(8)  # of the optimizer's state
FLOATS = 9

#: A table's counters on the device.
HITS, MISSES, INSERTS, EVICTIONS, FAILURES, REJECTIONS, DROPPED, SIZE = map(tl.constexpr, range(8))
COUNTER_NAMES = (
    "hits",
    "misses",
    "inserts",
    "evictions",
    "failures",
    "rejections",
    "dropped_gradients",
    "size",
)

#: What an entry's slot can be besides a slot: no slot was free; the row went since; and from
#: REJECTED downwards, not admitted, with row REJECTED - slot of the side rows.
FAILED = tl.constexpr(-1)
GONE = tl.constexpr(-2)
REJECTED = tl.constexpr(-3)

#: What ``fresh`` says of an entry that took the slot of an evicted row.
EVICTED = tl.constexpr(2)

#: Score strategies, by the engine's numbers.
LFU = tl.constexpr(3)
NO_EVICTION = tl.constexpr(4)
PAIR = tl.constexpr(5)


@triton.jit
def table_of(places, bounds_ptr, bounds_step, tables, mask, ONE: tl.constexpr):
    """The table of each place: bounds[t * step] <= place < bounds[(t + 1) * step]."""
    low = places * 0
    if not ONE:
        high = low + tables
        steps = tables
        while steps > 1:
            middle = (low + high) // 2
            after = places >= tl.load(bounds_ptr + middle * bounds_step, mask=mask, other=0)
            wider = (high - low) > 1
            low = tl.where(wider & after, middle, low)
            high = tl.where(wider & (after == 0), middle, high)
            steps = (steps + 1) // 2
    return low


@triton.jit
def entry_table(tables_ptr, entries, mask, ONE: tl.constexpr):
    """The table of each entry of a batch."""
    if ONE:
        return entries * 0
    else:
        return tl.load(tables_ptr + entries, mask=mask, other=0)


@triton.jit
def field(meta_ptr, tables, row, table, mask):
    """A number of each element's table."""
    return tl.load(meta_ptr + row * tables + table, mask=mask, other=0)


@triton.jit
def of_class(meta_ptr, tables, table, mask, number, ONE_CLASS: tl.constexpr):
    """Which elements belong to tables of class ``number``."""
    if ONE_CLASS:
        return mask
    else:
        return mask & (field(meta_ptr, tables, CLASS, table, mask) == number)


#: Rows of an optimizer step's array: float32 by their bits, and the number of the step.
STEP_NAMES = (
    "learning_rate",
    "epsilon",
    "beta2",
    "one_minus_beta1",
    "one_minus_beta2",
    "adam_rate",
    "bias_correction2_sqrt",
    "momentum",
    "one_minus_dampening",
    "weight_decay",
    "decay_factor",
    "lambda1",
    "lambda2",
    "ftrl_beta",
    "max_gradient",
)
(
    LEARNING_RATE,
    EPSILON,
    BETA2,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ADAM_RATE,
    BIAS_CORRECTION2_SQRT,
    MOMENTUM,
    ONE_MINUS_DAMPENING,
    WEIGHT_DECAY,
    DECAY_FACTOR,
    LAMBDA1,
    LAMBDA2,
    FTRL_BETA,
    MAX_GRADIENT,
    STEP_NUMBER,
) = map(tl.constexpr, range(16))
STEP_NUMBERS = 16
