"""The slots that a full bucket evicts next, so that it reads few scores for a newcomer.

A bucket's queue is some positions, in the order of their (score, slot), and a limit: rows that
are not in it have at least that score, and come after those in it that have the same. Batches write
scores that no row had before, so a queued row with a score up to the limit was not used since, and
leaves before all others; those that were used are passed over. What writes any other score empties
the queue: its limit becomes 0. Which slots are queued changes no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dynamicemb.kernels.layout import RECORD

#: Bytes of a bucket's queue: the limit, int64, up to LONGEST positions, uint8, and how many of them
#: are passed over, uint8.
QUEUE = tl.constexpr(32)
LONGEST = tl.constexpr(23)
#: A queue is filled anew when fewer are left in it than this.
FEW = tl.constexpr(4)
#: Differences of scores from here on count as equal when a queue is filled.
FAR = tl.constexpr(2**55)
#: The top bit of 64: unsigned order by signed comparison.
SIGN = tl.constexpr(-(2**63))
#: The high half of a key that is taken: after all others.
LAST = tl.constexpr(2**31 - 1)


@triton.jit
def empty_queue(queues, mask):
    """Forget the queues at some addresses."""
    tl.store(queues.to(tl.pointer_type(tl.int64)), 0, mask=mask)


@triton.jit
def queued(first, second, third, number):
    """The position at a place of a queue whose bytes after the limit are given."""
    word = tl.where(number < 8, first, tl.where(number < 16, second, third))
    return ((word >> ((number & 7) * 8).to(tl.int64)) & 255).to(tl.int32)


@triton.jit
def score_of(scores_at, position, mask):
    """The score at a position of a bucket, in the order of signed numbers."""
    scores = (scores_at + position * RECORD).to(tl.pointer_type(tl.int64))
    return tl.load(scores, mask=mask, other=-1) ^ SIGN


@triton.jit
def take_queued(queues, scores_at, order, wanted, mask, QUEUED: tl.constexpr):
    """(position, enough): the position of the row of a bucket that leaves after ``order`` others,
    if the queue has the ``wanted`` rows that leave; ``enough``: 0 if not, 1 if few are left then,
    else 2. ``scores_at``: the address of the bucket's first score. QUEUED: positions of a queue."""
    words = queues.to(tl.pointer_type(tl.int64))
    limit = tl.load(words, mask=mask, other=0)
    first = tl.load(words + 1, mask=mask, other=0)
    second = tl.load(words + 2, mask=mask, other=0)
    third = tl.load(words + 3, mask=mask, other=0)
    passed = queued(first, second, third, tl.zeros_like(order) + LONGEST)
    number = passed
    begin = passed
    found = tl.zeros_like(order)
    position = tl.full(order.shape, -1, tl.int32)
    looking = mask & (limit != 0) & (number < QUEUED)
    limit = limit ^ SIGN
    while tl.max(looking.to(tl.int32), axis=0) > 0:
        # Two at a time: their scores are on the way together.
        a = queued(first, second, third, number)
        b = queued(first, second, third, number + 1)
        score_a = score_of(scores_at, a, looking)
        score_b = score_of(scores_at, b, looking & (number + 1 < QUEUED))
        unused = looking & (score_a <= limit)
        position = tl.where(unused & (found == order), a, position)
        begin = tl.where(looking & (found == 0) & (unused == 0), number + 1, begin)
        found += unused.to(tl.int32)
        unused = looking & (score_b <= limit)
        position = tl.where(unused & (found == order), b, position)
        begin = tl.where(looking & (found == 0) & (unused == 0), number + 2, begin)
        found += unused.to(tl.int32)
        number += 2
        looking = looking & (found < wanted) & (number < QUEUED)
    begin = tl.minimum(begin, QUEUED)
    # Rows that were used stay so: it does not matter when others of the bucket see this.
    places = (queues + 8 + LONGEST).to(tl.pointer_type(tl.uint8))
    tl.store(places, begin.to(tl.uint8), mask=mask & (order == 0) & (begin > passed))
    left = tl.where(begin + wanted > QUEUED - FEW, 1, 2)
    return position, tl.where(found >= wanted, left, 0)


@triton.jit
def part_scores(keys_at, mask, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Scores of a part of 32 slots of each bucket, in the order of signed numbers: its threads are
    those of one warp."""
    word = tl.arange(0, 64) + 64 * PART
    words = tl.multiple_of(keys_at.to(tl.pointer_type(tl.int64)), 16)[:, None] + word[None, :]
    inside = mask[:, None] & (word < 2 * WIDTH)[None, :]
    _, score = tl.split(tl.reshape(tl.load(words, mask=inside, other=-1), (BLOCK, 32, 2)))
    return score ^ SIGN


@triton.jit
def part_keys(score, least, PART: tl.constexpr, WIDTH: tl.constexpr):
    """Score and position in one number, by its halves. Rows far above the lowest score are not in
    the order of their scores then; they are above the limit."""
    above = (score - least[:, None]).to(tl.uint64)
    position = tl.arange(0, 32)[None, :] + 32 * PART
    key = tl.where(above < FAR, above, FAR).to(tl.int64) * WIDTH + position
    return (key >> 32).to(tl.int32), (key & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def lowest(a, b, c, d):
    """The lowest number of each bucket, of its four parts."""
    return tl.min(tl.minimum(tl.minimum(a, b), tl.minimum(c, d)), axis=1)


@triton.jit
def where_equal(high, first, low):
    """The low halves of keys whose high half is ``first``."""
    return tl.where(high == first[:, None], low, 0xFFFFFFFF)


@triton.jit
def without(high, low, first, second):
    """The high halves, that of the key (first, second) as taken."""
    return tl.where((high == first[:, None]) & (low == second[:, None]), LAST, high)


@triton.jit
def fill_queues(
    queues, keys_at, now, mask, WIDTH: tl.constexpr, QUEUED: tl.constexpr, BLOCK: tl.constexpr
):
    """Queue the rows of BLOCK buckets that have the lowest scores below ``now``, the score of the
    batch. Others may write that score to rows of the buckets meanwhile. ``keys_at``: the addresses
    of the buckets' first ids; scores lie between ids."""
    a = part_scores(keys_at, mask, 0, WIDTH, BLOCK)
    b = part_scores(keys_at, mask, 1, WIDTH, BLOCK)
    c = part_scores(keys_at, mask, 2, WIDTH, BLOCK)
    d = part_scores(keys_at, mask, 3, WIDTH, BLOCK)
    least = lowest(a, b, c, d)
    high_a, low_a = part_keys(a, least, 0, WIDTH)
    high_b, low_b = part_keys(b, least, 1, WIDTH)
    high_c, low_c = part_keys(c, least, 2, WIDTH)
    high_d, low_d = part_keys(d, least, 3, WIDTH)
    places = (queues + 8).to(tl.pointer_type(tl.uint8))
    first, second = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.uint32)
    number = 0
    while number <= QUEUED:  # one more, which is the limit
        first = lowest(high_a, high_b, high_c, high_d)
        second = lowest(
            where_equal(high_a, first, low_a),
            where_equal(high_b, first, low_b),
            where_equal(high_c, first, low_c),
            where_equal(high_d, first, low_d),
        )
        tl.store(places + number, (second % WIDTH).to(tl.uint8), mask=mask & (number < QUEUED))
        high_a = without(high_a, low_a, first, second)
        high_b = without(high_b, low_b, first, second)
        high_c = without(high_c, low_c, first, second)
        high_d = without(high_d, low_d, first, second)
        number += 1
    tl.store(places + LONGEST, tl.zeros([BLOCK], tl.uint8), mask=mask)
    following = ((first.to(tl.int64) << 32) | second.to(tl.int64)) // WIDTH
    below = tl.where(now == 0, 0, now - 1) ^ SIGN
    limit = tl.minimum(least + following, below) ^ SIGN
    tl.store(queues.to(tl.pointer_type(tl.int64)), limit, mask=mask)
