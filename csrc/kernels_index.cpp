// Finding an id, a free slot and a slot to evict inside a bucket.
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "hash.h"
#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

// Bit i is set where digests[i] == digest, for 16 digests.
inline uint32_t match16(const uint8_t* digests, uint8_t digest) {
#if defined(__SSE2__)
  const __m128i line = _mm_loadu_si128(reinterpret_cast<const __m128i*>(digests));
  return static_cast<uint32_t>(
      _mm_movemask_epi8(_mm_cmpeq_epi8(line, _mm_set1_epi8(static_cast<char>(digest)))));
#elif defined(__ARM_NEON)
  static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t bits =
      vandq_u8(vceqq_u8(vld1q_u8(digests), vdupq_n_u8(digest)), vld1q_u8(weights));
  return vaddv_u8(vget_low_u8(bits)) | (static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8);
#else
  uint32_t mask = 0;
  for (uint32_t i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(digests[i] == digest) << i;
  return mask;
#endif
}

inline uint64_t match64(const uint8_t* digests, uint8_t digest) {
#if defined(__AVX512BW__)
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(digests),
                                _mm512_set1_epi8(static_cast<char>(digest)));
#elif defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(digest));
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digests));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(digests + 32));
  const auto a = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, wanted)));
  const auto b = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, wanted)));
  return a | (static_cast<uint64_t>(b) << 32);
#else
  return match16(digests, digest) | (static_cast<uint64_t>(match16(digests + 16, digest)) << 16) |
         (static_cast<uint64_t>(match16(digests + 32, digest)) << 32) |
         (static_cast<uint64_t>(match16(digests + 48, digest)) << 48);
#endif
}

constexpr size_t kDistance = 16;  // ids between a prefetch and its use
constexpr size_t kRing = 64;      // more than two distances, a power of two

// The usual width: both lines of digests are read at once, the first two candidates are fetched
// before they are compared.
void find128(const IndexView& index, const uint64_t* ids, size_t n, uint32_t* slots) {
  constexpr uint32_t kWidth = 128;
  struct Probe {
    uint32_t base;  // slot of the bucket's first position
    uint8_t digest;
    uint64_t low, high;
  } ring[kRing];
  for (size_t i = 0; i < n + 2 * kDistance; ++i) {
    if (i < n) {
      const uint64_t hash = hash_id(ids[i]);
      const auto base = static_cast<uint32_t>(bucket_of(hash, index.num_buckets) * kWidth);
      Probe& probe = ring[i % kRing];
      probe.base = base;
      probe.digest = digest_of(hash);
      prefetch(index.digests + base);
      prefetch(index.digests + base + 64);
    }
    if (i >= kDistance && i - kDistance < n) {
      Probe& probe = ring[(i - kDistance) % kRing];
      const uint8_t* digests = index.digests + probe.base;
      uint64_t low = match64(digests, probe.digest);
      uint64_t high = match64(digests + 64, probe.digest);
      probe.low = low;
      probe.high = high;
      const uint64_t* keys = index.keys + probe.base;
      if (low != 0) prefetch(keys + __builtin_ctzll(low));
      low &= low - 1;
      if (low != 0) prefetch(keys + __builtin_ctzll(low));
      if (high != 0) prefetch(keys + 64 + __builtin_ctzll(high));
    }
    if (i >= 2 * kDistance) {
      const size_t at = i - 2 * kDistance;
      const Probe& probe = ring[at % kRing];
      const uint64_t id = ids[at];
      const uint64_t* keys = index.keys + probe.base;
      uint32_t slot = kNoSlot;
      for (uint64_t mask = probe.low; mask != 0; mask &= mask - 1) {
        const auto position = static_cast<uint32_t>(__builtin_ctzll(mask));
        if (keys[position] == id) {
          slot = probe.base + position;
          break;
        }
      }
      if (slot == kNoSlot) {
        for (uint64_t mask = probe.high; mask != 0; mask &= mask - 1) {
          const auto position = 64 + static_cast<uint32_t>(__builtin_ctzll(mask));
          if (keys[position] == id) {
            slot = probe.base + position;
            break;
          }
        }
      }
      slots[at] = slot;
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
  if (index.width == 128) {
    find128(index, ids, n, slots);
  } else {
    find_any(index, ids, n, slots);
  }
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
