#include "kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

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
  const char* variable = std::getenv("DYNAMICEMB_ISA");
  const std::string_view best = variable == nullptr ? "avx512" : variable;
  if (best != "baseline" && best != "avx2" && best != "avx512")
    throw std::invalid_argument("DYNAMICEMB_ISA is '" + std::string(best) +
                                "'; allowed: baseline, avx2, avx512");
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && best == "avx512") return avx512::table();
  if (avx2 && best != "baseline") return avx2::table();
#endif
  return baseline::table();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace dynamicemb
