// The values of a new row. Only +, -, *, / and sqrt, so that every device gives the same bits.
#include <cmath>
#include <cstring>

#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

constexpr uint64_t kDebugModulus = 100000;

inline float open_unit(uint32_t random) {  // in (0, 1)
  return static_cast<float>(random >> 8) * 0x1p-24f + 0x1p-25f;
}

inline float closed_unit(uint32_t random) {  // in [0, 1)
  return static_cast<float>(random >> 8) * 0x1p-24f;
}

// Natural logarithm of a positive normal number: argument reduction to [sqrt(1/2), sqrt(2)) and
// the polynomial of the Cephes library.
inline float log_of(float value) {
  auto bits = __builtin_bit_cast(uint32_t, value);
  auto exponent = static_cast<float>(static_cast<int>(bits >> 23) - 126);
  bits = (bits & 0x007fffff) | 0x3f000000;  // [0.5, 1)
  const auto m = __builtin_bit_cast(float, bits);
  const bool low = m < 0.70710678f;
  exponent = low ? exponent - 1.0f : exponent;
  const float x = (low ? m + m : m) - 1.0f;
  const float z = x * x;
  float y = 7.0376836292e-2f;
  y = y * x - 1.1514610310e-1f;
  y = y * x + 1.1676998740e-1f;
  y = y * x - 1.2420140846e-1f;
  y = y * x + 1.4249322787e-1f;
  y = y * x - 1.6668057665e-1f;
  y = y * x + 2.0000714765e-1f;
  y = y * x - 2.4999993993e-1f;
  y = y * x + 3.3333331174e-1f;
  y = y * x * z;
  y = y + -2.12194440e-4f * exponent;
  y = y - 0.5f * z;
  return x + y + 0.693359375f * exponent;
}

// Quantile of the standard normal distribution, algorithm AS 241 (Wichura 1988), PPND7.
inline float normal_quantile(float p) {
  const float q = p - 0.5f;
  const float r = 0.180625f - q * q;
  const float centre =
      q * (((5.9109374720e+1f * r + 1.5929113202e+2f) * r + 5.0434271938e+1f) * r + 3.3871327179f) /
      (((6.7187563600e+1f * r + 7.8757757664e+1f) * r + 1.7895169469e+1f) * r + 1.0f);
  const float tail_p = q < 0 ? p : 1.0f - p;
  const float s = std::sqrt(-log_of(tail_p));
  const float t = s - 1.6f;
  const float near =
      (((1.7023821103e-1f * t + 1.3067284816f) * t + 2.7568153900f) * t + 1.4234372777f) /
      ((1.2021132975e-1f * t + 7.3700164250e-1f) * t + 1.0f);
  const float u = s - 5.0f;
  const float far =
      (((1.7337203997e-2f * u + 4.2868294337e-1f) * u + 3.0812263860f) * u + 6.6579051150f) /
      ((1.2258202635e-2f * u + 2.4197894225e-1f) * u + 1.0f);
  const float tail = s <= 5.0f ? near : far;
  const float magnitude = q < 0 ? -tail : tail;
  return r >= 0 ? centre : magnitude;
}

// Calls value(random bits) for every column.
template <class F>
inline void each_column(const Initializer& initializer, uint64_t id, float* row, uint32_t dim,
                        F&& value) {
  for (uint32_t first = 0; first < dim; first += 32) {
    uint32_t random[32];
    float values[32];
    philox_columns(initializer.seed, id, 0, first, random);
    for (uint32_t i = 0; i < 32; ++i) values[i] = value(random[i]);
    const uint32_t count = dim - first < 32 ? dim - first : 32;
    std::memcpy(row + first, values, count * sizeof(float));
  }
}

}  // namespace

void initialize(const Initializer& initializer, uint64_t id, float* row, uint32_t dim) {
  const Initializer& with = initializer;
  switch (with.mode) {
    case InitializerMode::kConstant:
      for (uint32_t i = 0; i < dim; ++i) row[i] = with.value;
      return;
    case InitializerMode::kDebug:
      for (uint32_t i = 0; i < dim; ++i) row[i] = static_cast<float>(id % kDebugModulus);
      return;
    case InitializerMode::kUniform: {
      const float range = with.upper - with.lower;
      each_column(with, id, row, dim,
                  [&](uint32_t random) { return with.lower + range * closed_unit(random); });
      return;
    }
    case InitializerMode::kNormal:
      each_column(with, id, row, dim, [&](uint32_t random) {
        return with.mean + with.std_dev * normal_quantile(open_unit(random));
      });
      return;
    case InitializerMode::kTruncatedNormal: {
      const float range = with.cdf_upper - with.cdf_lower;
      each_column(with, id, row, dim, [&](uint32_t random) {
        float p = with.cdf_lower + range * open_unit(random);
        p = p < 0x1p-126f ? 0x1p-126f : p;  // the quantile is finite inside (0, 1)
        p = p > 1 - 0x1p-24f ? 1 - 0x1p-24f : p;
        float value = with.mean + with.std_dev * normal_quantile(p);
        value = value < with.lower ? with.lower : value;
        return value > with.upper ? with.upper : value;
      });
      return;
    }
  }
}

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
