// Which digests of a bucket equal a given one. For the per-instruction-set sources: no external
// linkage, as in kernels_variant.h.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {

// Bit i is set where digests[i] == digest, for 16 digests.
static inline uint32_t match16(const uint8_t* digests, uint8_t digest) {
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

static inline uint64_t match64(const uint8_t* digests, uint8_t digest) {
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

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
