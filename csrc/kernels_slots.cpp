// Finding the numbers kept with ids, in buckets of 64: one line of digests.
#include "hash.h"
#include "kernels_match.h"
#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

constexpr size_t kBlock = 16;  // ids that go through a step together
constexpr uint32_t kWidth = 64;

struct Block {
  uint32_t base[kBlock];  // slot of the bucket's first position
  uint32_t digest[kBlock];
  uint64_t mask[kBlock];  // candidates
};

inline void hash_step(const IndexView& index, const uint64_t* ids, size_t count, Block& block) {
  const auto hash_one = [&, buckets = index.num_buckets](size_t i) {
    const uint64_t hash = hash_id(ids[i]);
    block.base[i] = static_cast<uint32_t>(bucket_of(hash, buckets) * kWidth);
    block.digest[i] = digest_of(hash);
  };
  if (count == kBlock) {  // a known length
    for (size_t i = 0; i < kBlock; ++i) hash_one(i);
  } else {
    for (size_t i = 0; i < count; ++i) hash_one(i);
  }
  for (size_t i = 0; i < count; ++i) prefetch(index.digests + block.base[i]);
}

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

}  // namespace

// Ids pass in blocks through steps that are a block apart; lines come first to the second-level
// cache, then to the first.
void find_values(const IndexView& index, const uint32_t* values, const ValueRecord* records,
                 const uint64_t* ids, size_t n, uint32_t* found) {
  Block ring[8];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  const auto at_step = [&](size_t step, size_t delay, auto&& work) {
    if (step < delay || step - delay >= blocks) return;
    const size_t block = step - delay, begin = block * kBlock;
    work(ring[block % 8], begin, n - begin < kBlock ? n - begin : kBlock);
  };
  for (size_t step = 0; step < blocks + 4; ++step) {
    at_step(step, 0, [&](Block& block, size_t begin, size_t count) {
      hash_step(index, ids + begin, count, block);
    });
    at_step(step, 1, [&](Block& block, size_t, size_t count) {
      for (size_t i = 0; i < count; ++i) prefetch_near(index.digests + block.base[i]);
    });
    at_step(step, 2, [&](Block& block, size_t, size_t count) {
      for (size_t i = 0; i < count; ++i) {
        const uint64_t mask =
            match64(index.digests + block.base[i], static_cast<uint8_t>(block.digest[i]));
        block.mask[i] = mask;
        const uint32_t slot = block.base[i] + first_candidate(mask);
        prefetch(index.keys + slot);
        prefetch(values + slot);
      }
    });
    at_step(step, 3, [&](Block& block, size_t, size_t count) {
      for (size_t i = 0; i < count; ++i) {
        const uint32_t slot = block.base[i] + first_candidate(block.mask[i]);
        prefetch_near(index.keys + slot);
        prefetch_near(values + slot);
      }
    });
    at_step(step, 4, [&](Block& block, size_t begin, size_t count) {
      for (size_t i = 0; i < count; ++i) {
        const uint64_t id = ids[begin + i], mask = block.mask[i];
        const uint32_t slot = block.base[i] + first_candidate(mask);
        uint32_t value = kNoSlot;
        if (mask != 0)
          value = index.keys[slot] == id
                      ? values[slot]
                      : other_candidate(index, values, block.base[i], mask & (mask - 1), id);
        found[begin + i] = value;
        if (records != nullptr && value != kNoSlot) prefetch(records + value);
      }
    });
  }
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
