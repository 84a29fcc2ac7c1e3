// The kernels of one instruction set, together.
#include "kernels_variant.h"

#define DYNAMICEMB_TEXT_OF(name) #name
#define DYNAMICEMB_TEXT(name) DYNAMICEMB_TEXT_OF(name)

namespace dynamicemb::DYNAMICEMB_VARIANT {

Kernels table() {
  Kernels kernels{DYNAMICEMB_TEXT(DYNAMICEMB_VARIANT),
                  find,
                  find_values,
                  partition,
                  free_position,
                  victim,
                  initialize,
                  widen,
                  narrow,
                  narrow_stochastic,
                  gather,
                  pool,
                  accumulate,
                  dot,
                  {}};
  for (size_t i = 0; i < kOptimizerKinds; ++i) kernels.optimize[i] = optimize[i];
  return kernels;
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
