// Finding an id, a free slot and a slot to evict inside a bucket.
#include "hash.h"
#include "kernels_match.h"
#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

constexpr size_t kBlock = 24;     // ids that go through a step together
constexpr size_t kDistance = 16;  // ids between a prefetch and its use
constexpr size_t kRing = 64;      // more than two distances, a power of two

// The usual width, 128: two lines of digests per bucket. Ids pass in blocks through steps that are
// a block apart, so that memory answers while other blocks are worked on.
struct Block {
  uint32_t base[kBlock];  // slot of the bucket's first position
  uint32_t digest[kBlock];
  uint64_t low[kBlock];   // candidates in the first line
  uint64_t high[kBlock];  // and in the second
};

// Ids in a block of a call with n: the last block may be short.
inline size_t block_size(size_t n, size_t block) {
  const size_t begin = block * kBlock;
  return n - begin < kBlock ? n - begin : kBlock;
}

// Hashes in one loop without branches or memory accesses, which vectorises.
inline void hash_step(const IndexView& index, const uint64_t* ids, size_t count, Block& block) {
  const auto hash_one = [&, buckets = index.num_buckets](size_t i) {
    const uint64_t hash = hash_id(ids[i]);
    block.base[i] = static_cast<uint32_t>(bucket_of(hash, buckets) * 128);
    block.digest[i] = digest_of(hash);
  };
  if (count == kBlock) {  // a known length
    for (size_t i = 0; i < kBlock; ++i) hash_one(i);
  } else {
    for (size_t i = 0; i < count; ++i) hash_one(i);
  }
  for (size_t i = 0; i < count; ++i) prefetch(index.digests + block.base[i]);
}

inline uint32_t first_equal(const uint64_t* keys, uint64_t mask, uint64_t id) {
  for (; mask != 0; mask &= mask - 1) {
    const auto position = static_cast<uint32_t>(__builtin_ctzll(mask));
    if (keys[position] == id) return position;
  }
  return kNoSlot;
}

inline uint32_t compare_step(const IndexView& index, uint64_t id, uint32_t base, uint64_t low,
                             uint64_t high) {
  const uint64_t* keys = index.keys + base;
  uint32_t position = first_equal(keys, low, id);
  if (position != kNoSlot) return base + position;
  position = first_equal(keys + 64, high, id);
  return position == kNoSlot ? kNoSlot : base + 64 + position;
}

inline uint64_t match_line(const IndexView& index, uint32_t at, uint32_t digest) {
  return match64(index.digests + at, static_cast<uint8_t>(digest));
}

// Buckets that are about half full: the second line is fetched only for ids without a candidate
// in the first. Lines come in two steps, first to the second-level cache, then to the first.
void find128_sparse(const IndexView& index, const uint64_t* ids, size_t n, uint32_t* slots) {
  Block ring[8];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 4; ++step) {
    if (step < blocks) hash_step(index, ids + step * kBlock, block_size(n, step), ring[step % 8]);
    if (step >= 1 && step - 1 < blocks) {
      const size_t count = block_size(n, step - 1);
      const Block& block = ring[(step - 1) % 8];
      for (size_t i = 0; i < count; ++i) prefetch_near(index.digests + block.base[i]);
    }
    if (step >= 2 && step - 2 < blocks) {
      const size_t count = block_size(n, step - 2);
      Block& block = ring[(step - 2) % 8];
      for (size_t i = 0; i < count; ++i) {
        const uint64_t low = match_line(index, block.base[i], block.digest[i]);
        block.low[i] = low;
        const void* key = index.keys + block.base[i] + __builtin_ctzll(low | (uint64_t{1} << 63));
        prefetch(low != 0 ? key : index.digests + block.base[i] + 64);
      }
    }
    if (step >= 3 && step - 3 < blocks) {
      const size_t count = block_size(n, step - 3);
      Block& block = ring[(step - 3) % 8];
      for (size_t i = 0; i < count; ++i) {
        const uint64_t low = block.low[i], more = low & (low - 1);
        if (low != 0) {
          const uint64_t* keys = index.keys + block.base[i];
          prefetch(keys + __builtin_ctzll(more != 0 ? more : low));  // no branch: it would go wrong
          prefetch_near(keys + __builtin_ctzll(low));
          continue;
        }
        const uint64_t high = match_line(index, block.base[i] + 64, block.digest[i]);
        block.high[i] = high;
        if (high != 0) prefetch(index.keys + block.base[i] + 64 + __builtin_ctzll(high));
      }
    }
    if (step >= 4) {
      const size_t begin = (step - 4) * kBlock, count = block_size(n, step - 4);
      const Block& block = ring[(step - 4) % 8];
      for (size_t i = 0; i < count; ++i) {
        const uint32_t base = block.base[i];
        const uint64_t low = block.low[i];
        const uint32_t position = first_equal(index.keys + base, low, ids[begin + i]);
        if (position != kNoSlot) {
          slots[begin + i] = base + position;
          continue;
        }
        const uint64_t high =  // with false candidates in the first line, not looked at yet
            low == 0 ? block.high[i] : match_line(index, base + 64, block.digest[i]);
        slots[begin + i] = compare_step(index, ids[begin + i], base, 0, high);
      }
    }
  }
}

// Full buckets: both lines are fetched at once. The second step does not pay here.
void find128_dense(const IndexView& index, const uint64_t* ids, size_t n, uint32_t* slots) {
  Block ring[4];
  const size_t blocks = (n + kBlock - 1) / kBlock;
  for (size_t step = 0; step < blocks + 2; ++step) {
    if (step < blocks) {
      const size_t count = block_size(n, step);
      Block& block = ring[step % 4];
      hash_step(index, ids + step * kBlock, count, block);
      for (size_t i = 0; i < count; ++i) prefetch(index.digests + block.base[i] + 64);
    }
    if (step >= 1 && step - 1 < blocks) {
      const size_t count = block_size(n, step - 1);
      Block& block = ring[(step - 1) % 4];
      for (size_t i = 0; i < count; ++i) {
        const uint64_t low = match_line(index, block.base[i], block.digest[i]);
        const uint64_t high = match_line(index, block.base[i] + 64, block.digest[i]);
        block.low[i] = low;
        block.high[i] = high;
        const uint64_t* keys = index.keys + block.base[i];
        if (low != 0) prefetch(keys + __builtin_ctzll(low));
        if (high != 0) prefetch(keys + 64 + __builtin_ctzll(high));
      }
    }
    if (step >= 2) {
      const size_t begin = (step - 2) * kBlock, count = block_size(n, step - 2);
      const Block& block = ring[(step - 2) % 4];
      for (size_t i = 0; i < count; ++i)
        slots[begin + i] =
            compare_step(index, ids[begin + i], block.base[i], block.low[i], block.high[i]);
    }
  }
}

// Any other width: 16 positions at a time.
uint32_t find_in_bucket(const IndexView& index, uint32_t base, uint8_t digest, uint64_t id) {
  for (uint32_t group = 0; group < index.width; group += 16) {
    for (uint32_t mask = match16(index.digests + base + group, digest); mask != 0;
         mask &= mask - 1) {
      const uint32_t slot = base + group + static_cast<uint32_t>(__builtin_ctz(mask));
      if (index.keys[slot] == id) return slot;
    }
  }
  return kNoSlot;
}

void find_any(const IndexView& index, const uint64_t* ids, size_t n, uint32_t* slots) {
  struct Probe {
    uint32_t base;
    uint8_t digest;
  } ring[kRing];
  const uint32_t prefetched = index.width < 256 ? index.width : 256;
  for (size_t i = 0; i < n + 2 * kDistance; ++i) {
    if (i < n) {
      const uint64_t hash = hash_id(ids[i]);
      Probe& probe = ring[i % kRing];
      probe.base = static_cast<uint32_t>(bucket_of(hash, index.num_buckets) * index.width);
      probe.digest = digest_of(hash);
      prefetch_bytes(index.digests + probe.base, prefetched);
    }
    if (i >= kDistance && i - kDistance < n) {
      const Probe& probe = ring[(i - kDistance) % kRing];
      for (uint32_t group = 0; group < prefetched; group += 16) {
        const uint32_t mask = match16(index.digests + probe.base + group, probe.digest);
        if (mask != 0) {
          prefetch(index.keys + probe.base + group + __builtin_ctz(mask));
          break;
        }
      }
    }
    if (i >= 2 * kDistance) {
      const size_t at = i - 2 * kDistance;
      const Probe& probe = ring[at % kRing];
      slots[at] = find_in_bucket(index, probe.base, probe.digest, ids[at]);
    }
  }
}

}  // namespace

void find(const IndexView& index, const uint64_t* ids, size_t n, uint32_t* slots) {
  if (index.width != 128) return find_any(index, ids, n, slots);
  if (index.sparse) return find128_sparse(index, ids, n, slots);
  find128_dense(index, ids, n, slots);
}

void partition(uint64_t num_buckets, int shift, const uint64_t* ids, size_t n, uint16_t* numbers) {
  for (size_t i = 0; i < n; ++i)
    numbers[i] = static_cast<uint16_t>(bucket_of(hash_id(ids[i]), num_buckets) >> shift);
}

uint32_t free_position(const uint8_t* digests, uint32_t width) {
  for (uint32_t group = 0; group < width; group += 16) {
    const uint32_t mask = match16(digests + group, 0);
    if (mask != 0) return group + static_cast<uint32_t>(__builtin_ctz(mask));
  }
  return width;
}

uint32_t victim(const Record* records, uint32_t width, uint32_t stamp) {
  // Four independent minima hide the latency of the compare; the lowest position wins a tie
  // because positions of a lane ascend and lanes are merged by (score, position).
  constexpr uint32_t kLanes = 4;
  uint64_t best[kLanes];
  uint32_t where[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    best[lane] = ~uint64_t{0};
    where[lane] = kNoSlot;
  }
  for (uint32_t base = 0; base < width; base += kLanes) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const Record& record = records[base + lane];
      const bool better =
          record.stamp != stamp && (record.score < best[lane] || where[lane] == kNoSlot);
      best[lane] = better ? record.score : best[lane];
      where[lane] = better ? base + lane : where[lane];
    }
  }
  uint64_t score = ~uint64_t{0};
  uint32_t position = kNoSlot;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    if (where[lane] == kNoSlot) continue;
    if (position == kNoSlot || best[lane] < score ||
        (best[lane] == score && where[lane] < position)) {
      score = best[lane];
      position = where[lane];
    }
  }
  return position;
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
