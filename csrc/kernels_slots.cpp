// Finding the numbers kept with ids, in buckets of 64: one line of digests. And what was used.
#include <type_traits>

#include "hash.h"
#include "kernels_match.h"
#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

constexpr uint32_t kWidth = 64;
constexpr size_t kAhead = 256;  // ids fetched in advance
constexpr size_t kRing = 8;     // blocks on their way

// Ids pass in blocks through steps that are kDelay blocks apart, while their lines are fetched.
struct Near {  // straight to the first-level cache: most lines are near; for such ids the other way
               // takes two to three times as long at times (Zen 4)
  static constexpr size_t kBlock = 24, kDelay = 1;
  static constexpr bool kTwice = false;
  [[gnu::always_inline]] static void fetch(const void* line) { prefetch_near(line); }
};
struct Far {  // to the second level, which can wait for more lines, then to the first
  static constexpr size_t kBlock = 16, kDelay = 2;
  static constexpr bool kTwice = true;
  [[gnu::always_inline]] static void fetch(const void* line) { prefetch(line); }
};

template <class Way>
struct Block {
  uint32_t base[Way::kBlock];  // slot of the bucket's first position
  uint32_t digest[Way::kBlock];
  uint64_t mask[Way::kBlock];  // candidates
};

inline uint32_t first_candidate(uint64_t mask) {
  return static_cast<uint32_t>(__builtin_ctzll(mask | (uint64_t{1} << 63)));
}

inline uint32_t other_candidate(const IndexView& index, const uint32_t* values, uint32_t base,
                                uint64_t mask, uint64_t id) {
  for (; mask != 0; mask &= mask - 1) {
    const uint32_t slot = base + static_cast<uint32_t>(__builtin_ctzll(mask));
    if (index.keys[slot] == id) return values[slot];
  }
  return kNoSlot;
}

// In the order of the ids: so are random numbers drawn. Unless kAll were found, those that were not
// use a slot that is nobody's: a branch would often go wrong.
template <bool kAll, size_t kMost>
inline void write_down(Uses& uses, const uint32_t* found, size_t count) {
  SlotUse nobody;
  const auto each = [&](auto&& use) {
    for (size_t i = 0; i < count; ++i) {
      const bool there = kAll || found[i] != kNoSlot;
      use(there ? uses.slots[found[i]] : nobody, there);
    }
  };
  switch (uses.rule) {
    case UseRule::kNone:
      return;
    case UseRule::kStamp:
      return each([&](SlotUse& use, bool) {
        // Another thread may do the same; a line that is up to date stays where it is.
        if (__atomic_load_n(&use.last, __ATOMIC_RELAXED) != uses.now)
          __atomic_store_n(&use.last, uses.now, __ATOMIC_RELAXED);
      });
    case UseRule::kAdd:
      return each([&](SlotUse& use, bool) {
        use.last = uses.now;
        use.count += use.count != ~uint32_t{0};
      });
    case UseRule::kDraw: {
      uint64_t drawn[kMost];
      for (size_t i = 0; i < kMost; ++i) drawn[i] = hash_id(uses.draws + 1 + i);
      size_t next = 0;
      each([&](SlotUse& use, bool there) {
        const bool draws = there & (use.count < kLargestLogarithm);
        const uint64_t low_bits = (uint64_t{1} << (use.count & 63)) - 1;
        use.last = uses.now;
        use.count += draws & ((drawn[next] & low_bits) == 0);
        next += draws;
      });
      uses.draws += next;
    }
  }
}

template <class Way>
size_t find_in_blocks(const IndexView& index, const uint32_t* values, Uses& uses,
                      const uint64_t* ids, size_t n, uint32_t* found) {
  constexpr size_t kBlock = Way::kBlock, kDelay = Way::kDelay;
  static_assert(3 * kDelay < kRing);
  Block<Way> ring[kRing];
  size_t missing = 0;
  const size_t blocks = (n + kBlock - 1) / kBlock;
  const auto at_step = [&](size_t step, size_t delay, auto&& work) {
    if (step < delay || step - delay >= blocks) return;
    const size_t block = step - delay, begin = block * kBlock;
    if (n - begin >= kBlock)  // a known length
      work(ring[block % kRing], begin, std::integral_constant<size_t, kBlock>{});
    else
      work(ring[block % kRing], begin, n - begin);
  };
  const auto again = [&](size_t step, size_t delay, auto&& line) {
    if constexpr (Way::kTwice)
      at_step(step, delay + 1, [&](Block<Way>& block, size_t begin, auto count) {
        for (size_t i = 0; i < count; ++i) line(block, begin + i, i);
      });
  };
  for (size_t step = 0; step < blocks + 3 * kDelay; ++step) {
    at_step(step, 0, [&](Block<Way>& block, size_t begin, auto count) {
      const auto hash_one = [&, buckets = index.num_buckets](size_t i) {
        const uint64_t hash = hash_id(ids[begin + i]);
        block.base[i] = static_cast<uint32_t>(bucket_of(hash, buckets) * kWidth);
        block.digest[i] = digest_of(hash);
      };
      for (size_t i = 0; i < count; ++i) hash_one(i);
      for (size_t i = begin + kAhead; i < begin + kAhead + count && i < n; i += 8)
        prefetch_near(ids + i);
      for (size_t i = 0; i < count; ++i) Way::fetch(index.digests + block.base[i]);
    });
    again(step, 0, [&](Block<Way>& block, size_t, size_t i) {
      prefetch_near(index.digests + block.base[i]);
    });
    at_step(step, kDelay, [&](Block<Way>& block, size_t, auto count) {
      for (size_t i = 0; i < count; ++i) {
        block.mask[i] =
            match64(index.digests + block.base[i], static_cast<uint8_t>(block.digest[i]));
        Way::fetch(values + block.base[i] + first_candidate(block.mask[i]));
      }
    });
    again(step, kDelay, [&](Block<Way>& block, size_t, size_t i) {
      prefetch_near(values + block.base[i] + first_candidate(block.mask[i]));
    });
    at_step(step, 2 * kDelay, [&](Block<Way>& block, size_t begin, auto count) {
      for (size_t i = 0; i < count; ++i) {
        const uint32_t value = values[block.base[i] + first_candidate(block.mask[i])];
        found[begin + i] = value;
        Way::fetch(uses.slots + value);
      }
    });
    again(step, 2 * kDelay,
          [&](Block<Way>&, size_t at, size_t) { prefetch_near(uses.slots + found[at]); });
    at_step(step, 3 * kDelay, [&](Block<Way>& block, size_t begin, auto count) {
      const size_t before = missing;
      for (size_t i = 0; i < count; ++i) {
        const uint64_t id = ids[begin + i], mask = block.mask[i];
        if (mask != 0 && uses.slots[found[begin + i]].id == id) continue;
        const uint64_t others = mask & (mask - 1);
        found[begin + i] = other_candidate(index, values, block.base[i], others, id);
        missing += found[begin + i] == kNoSlot;
      }
      if (missing == before)
        write_down<true, kBlock>(uses, found + begin, count);
      else
        write_down<false, kBlock>(uses, found + begin, count);
    });
  }
  return missing;
}

}  // namespace

size_t find_values(const IndexView& index, const uint32_t* values, Uses& uses, bool repeated,
                   const uint64_t* ids, size_t n, uint32_t* found) {
  return repeated ? find_in_blocks<Near>(index, values, uses, ids, n, found)
                  : find_in_blocks<Far>(index, values, uses, ids, n, found);
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
