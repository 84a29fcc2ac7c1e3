// What the per-instruction-set sources share. They are compiled with different flags, so nothing
// here may have external linkage: an inline function shared with other files could be merged with
// a copy that uses instructions this processor lacks.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstring>

#include "kernels.h"

#ifndef DYNAMICEMB_VARIANT
#error "compile the kernels with -DDYNAMICEMB_VARIANT=<name>"
#endif

namespace dynamicemb::DYNAMICEMB_VARIANT {

void find(const IndexView&, const uint64_t*, size_t, uint32_t*);
size_t find_values(const IndexView&, const uint32_t*, Uses&, bool, const uint64_t*, size_t,
                   uint32_t*);
void partition(uint64_t, int, const uint64_t*, size_t, uint16_t*);
uint32_t free_position(const uint8_t*, uint32_t);
uint32_t victim(const Record*, uint32_t, uint32_t);
void initialize(const Initializer&, uint64_t, float*, uint32_t);
void widen(DataType, const void*, float*, uint32_t);
void narrow(DataType, const float*, void*, uint32_t);
void narrow_stochastic(DataType, const float*, void*, uint32_t, uint64_t, uint64_t, uint32_t);
void gather(const RowSource&, const uint32_t*, size_t, bool, DataType, void*, size_t);
void pool(const RowSource&, const Bag&, DataType, void*);
void accumulate(DataType, const void*, float, float, float*, uint32_t);
float dot(const float*, const float*, uint32_t);
extern void (*const optimize[kOptimizerKinds])(float*, float*, float*, const float*, float*,
                                               uint32_t, const OptimizerStep&);
Kernels table();

// Sixteen columns in registers; the compiler splits them to what the processor has.
using Vector = float __attribute__((vector_size(64), aligned(4)));
constexpr uint32_t kLanes = 16;

// The first `count` of 16 columns, fewer than 16; the others are 0.
static inline Vector load_some(const float* from, uint32_t count) {
#if defined(__AVX512F__)
  const __m512 wide = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
  return reinterpret_cast<const Vector&>(wide);
#else
  float some[kLanes] = {};
  float* to = some;
  for (uint32_t size = kLanes / 2; size > 0; size /= 2) {
    if ((count & size) == 0) continue;
    std::memcpy(to, from, size * sizeof(float));
    from += size;
    to += size;
  }
  Vector columns;
  std::memcpy(&columns, some, sizeof columns);
  return columns;
#endif
}

// a * b of 16 columns from `column` on, 0 beyond `dim`.
static inline Vector products(const float* a, const float* b, uint32_t column, uint32_t dim) {
  if (column >= dim) return Vector{};
  if (dim - column < kLanes) {
    return load_some(a + column, dim - column) * load_some(b + column, dim - column);
  }
  Vector x, y;
  std::memcpy(&x, a + column, sizeof x);
  std::memcpy(&y, b + column, sizeof y);
  return x * y;
}

// Sums of two neighbours each, of `a` and of `b`, within every four.
static inline Vector add_neighbours(const Vector& a, const Vector& b) {
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
}

// The sums of four products each of 64 columns: number 4 k + j is in lane 4 j + k.
constexpr uint32_t kSummed = 64;

static inline Vector sum_fours(const float* a, const float* b, uint32_t column, uint32_t dim) {
  const Vector low = add_neighbours(products(a, b, column, dim), products(a, b, column + 16, dim));
  const Vector high =
      add_neighbours(products(a, b, column + 32, dim), products(a, b, column + 48, dim));
  return add_neighbours(low, high);
}

// Those of block `block` and of the blocks `stride`, 2 * stride, .. behind it, folded in halves.
// `blocks` is a power of two.
__attribute__((noinline)) static Vector sum_blocks(const float* a, const float* b, uint32_t dim,
                                                   uint32_t block, uint32_t stride,
                                                   uint32_t blocks) {
  if (stride >= blocks) return sum_fours(a, b, block * kSummed, dim);
  return sum_blocks(a, b, dim, block, 2 * stride, blocks) +
         sum_blocks(a, b, dim, block + stride, 2 * stride, blocks);
}

// Sum over columns of a * b: products of four columns, two and two, and these sums folded in
// halves, with zeros up to a power of two. The GPU kernels do the same.
static inline float dot_columns(const float* a, const float* b, uint32_t dim) {
  Vector sums;
  if (dim == kSummed) {
    sums = sum_fours(a, b, 0, kSummed);
  } else if (dim < kSummed) {
    sums = sum_fours(a, b, 0, dim);
  } else if (dim <= 2 * kSummed) {
    sums = sum_fours(a, b, 0, dim) + sum_fours(a, b, kSummed, dim);
  } else {
    uint32_t blocks = 4;
    while (blocks * kSummed < dim) blocks *= 2;
    sums = sum_blocks(a, b, dim, 0, 1, blocks);
  }
  const auto two = __builtin_shufflevector(sums, sums, 0, 1, 4, 5, 8, 9, 12, 13) +
                   __builtin_shufflevector(sums, sums, 2, 3, 6, 7, 10, 11, 14, 15);
  const auto one =
      __builtin_shufflevector(two, two, 0, 4, 2, 6) + __builtin_shufflevector(two, two, 1, 5, 3, 7);
  // Not -0: zeros beyond the row may be added or not.
  return (one[0] + one[1]) + (one[2] + one[3]) + 0.0f;
}

// Eight 32-bit words; high and low halves of their products with a constant.
using Words = uint32_t __attribute__((vector_size(32)));

static inline void multiply(const Words& a, uint32_t by, Words& high, Words& low) {
#if defined(__AVX2__)
  const __m256i wide = reinterpret_cast<const __m256i&>(a);
  const __m256i factor = _mm256_set1_epi64x(by);
  const __m256i even = _mm256_mul_epu32(wide, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(wide, 32), factor);
  reinterpret_cast<__m256i&>(low) = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
  reinterpret_cast<__m256i&>(high) = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  for (int lane = 0; lane < 8; ++lane) {
    const uint64_t product = uint64_t{by} * a[lane];
    low[lane] = static_cast<uint32_t>(product);
    high[lane] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

// 32 random bits for each of the 32 columns from `first` (a multiple of 32) on: Philox4x32-10 with
// counter (column / 4, stream, id) and key `seed`, eight blocks at a time.
static inline void philox_columns(uint64_t seed, uint64_t id, uint32_t stream, uint32_t first,
                                  uint32_t out[32]) {
  Words c0 = Words{0, 1, 2, 3, 4, 5, 6, 7} + first / 4;
  Words c1 = Words{} + stream;
  Words c2 = Words{} + static_cast<uint32_t>(id);
  Words c3 = Words{} + static_cast<uint32_t>(id >> 32);
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    Words high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int block = 0; block < 8; ++block) {
    out[4 * block] = c0[block];
    out[4 * block + 1] = c1[block];
    out[4 * block + 2] = c2[block];
    out[4 * block + 3] = c3[block];
  }
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
