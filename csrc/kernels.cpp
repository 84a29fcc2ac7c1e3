#include "kernels.h"

#include <cstdlib>
#include <cstring>

// One per instruction set, each from its own compilation of kernels_table.cpp.
namespace dynamicemb::baseline {
Kernels table();
}
#if defined(__x86_64__)
namespace dynamicemb::avx2 {
Kernels table();
}
namespace dynamicemb::avx512 {
Kernels table();
}
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
