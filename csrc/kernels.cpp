#include "kernels.h"

#include <cstdlib>
#include <cstring>

#define DYNAMICEMB_DECLARE(variant)                                                              \
  namespace dynamicemb::variant {                                                                \
  void find(const IndexView&, const uint64_t*, size_t, uint32_t*);                               \
  uint32_t free_position(const uint8_t*, uint32_t);                                              \
  uint32_t victim(const Record*, uint32_t, uint32_t);                                            \
  void initialize(const Initializer&, uint64_t, float*, uint32_t);                               \
  void widen(DataType, const void*, float*, uint32_t);                                           \
  void narrow(DataType, const float*, void*, uint32_t);                                          \
  void narrow_stochastic(DataType, const float*, void*, uint32_t, uint64_t, uint64_t, uint32_t); \
  void gather(const RowSource&, const uint32_t*, size_t, DataType, void*, size_t);               \
  void pool(const RowSource&, const Bag&, DataType, void*);                                      \
  void accumulate(DataType, const void*, float, float, float*, uint32_t);                        \
  float dot(const float*, const float*, uint32_t);                                               \
  extern void (*const optimize[kOptimizerKinds])(float*, float*, float*, const float*, float*,   \
                                                 uint32_t, const OptimizerStep&);                \
  Kernels table() {                                                                              \
    Kernels k{#variant,          find,   free_position, victim,     initialize, widen, narrow,   \
              narrow_stochastic, gather, pool,          accumulate, dot,        {}};             \
    for (size_t i = 0; i < kOptimizerKinds; ++i) k.optimize[i] = optimize[i];                    \
    return k;                                                                                    \
  }                                                                                              \
  }

DYNAMICEMB_DECLARE(baseline)
#if defined(__x86_64__)
DYNAMICEMB_DECLARE(avx2)
DYNAMICEMB_DECLARE(avx512)
#endif

namespace dynamicemb {
namespace {

Kernels choose() {
#if defined(__x86_64__)
  const char* forced = std::getenv("DYNAMICEMB_ISA");
  const auto allowed = [&](const char* name) {
    if (forced == nullptr) return true;
    if (std::strcmp(forced, "avx512") == 0) return true;
    return std::strcmp(forced, name) == 0;
  };
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && allowed("avx512")) return avx512::table();
  if (avx2 && allowed("avx2")) return avx2::table();
#endif
  return baseline::table();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace dynamicemb
