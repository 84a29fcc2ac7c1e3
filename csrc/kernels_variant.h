// What the per-instruction-set sources share. They are compiled with different flags, so nothing
// here may have external linkage: an inline function shared with other files could be merged with
// a copy that uses instructions this processor lacks.
#pragma once

#include "kernels.h"

#ifndef DYNAMICEMB_VARIANT
#error "compile the kernels with -DDYNAMICEMB_VARIANT=<name>"
#endif

namespace dynamicemb::DYNAMICEMB_VARIANT {

void find(const IndexView&, const uint64_t*, size_t, uint32_t*);
uint32_t free_position(const uint8_t*, uint32_t);
uint32_t victim(const Record*, uint32_t, uint32_t);
void initialize(const Initializer&, uint64_t, float*, uint32_t);
void widen(DataType, const void*, float*, uint32_t);
void narrow(DataType, const float*, void*, uint32_t);
void narrow_stochastic(DataType, const float*, void*, uint32_t, uint64_t, uint64_t, uint32_t);
void gather(const RowSource&, const uint32_t*, size_t, DataType, void*, size_t);
void pool(const RowSource&, const Bag&, DataType, void*);
void accumulate(DataType, const void*, float, float, float*, uint32_t);
float dot(const float*, const float*, uint32_t);
extern void (*const optimize[kOptimizerKinds])(float*, float*, float*, const float*, float*,
                                               uint32_t, const OptimizerStep&);

// 32 random bits for each of the 32 columns from `first` (a multiple of 4) on: Philox4x32-10 with
// counter (column / 4, stream, id) and key `seed`, eight blocks at a time.
static inline void philox_columns(uint64_t seed, uint64_t id, uint32_t stream, uint32_t first,
                                  uint32_t out[32]) {
  constexpr int kBlocks = 8;
  uint32_t c0[kBlocks], c1[kBlocks], c2[kBlocks], c3[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    c0[b] = first / 4 + static_cast<uint32_t>(b);
    c1[b] = stream;
    c2[b] = static_cast<uint32_t>(id);
    c3[b] = static_cast<uint32_t>(id >> 32);
  }
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int b = 0; b < kBlocks; ++b) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0[b];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2[b];
      c0[b] = static_cast<uint32_t>(p1 >> 32) ^ c1[b] ^ k0;
      c2[b] = static_cast<uint32_t>(p0 >> 32) ^ c3[b] ^ k1;
      c1[b] = static_cast<uint32_t>(p1);
      c3[b] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int b = 0; b < kBlocks; ++b) {
    out[4 * b] = c0[b];
    out[4 * b + 1] = c1[b];
    out[4 * b + 2] = c2[b];
    out[4 * b + 3] = c3[b];
  }
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
