// Moving rows: gather, pooling, gradient sums, number formats.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels_variant.h"

namespace dynamicemb::DYNAMICEMB_VARIANT {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(Half value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t exponent = (value.bits >> 10) & 31, mantissa = value.bits & 0x3ff;
  if (exponent == 31)  // a NaN becomes a quiet one, as in hardware
    return float_of(sign | 0x7f800000 | (mantissa << 13) | (mantissa != 0 ? 0x400000 : 0));
  if (exponent != 0) return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return float_of(sign | bits_of(tiny));
#endif
}

inline void from_float(float value, float& out) { out = value; }
inline void from_float(float value, BFloat& out) {
  const uint32_t bits = bits_of(value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
}
inline void from_float(float value, Half& out) {
#if defined(__F16C__)
  out.bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or more
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // below the smallest normal: a multiple of 2^-24
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    half = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
#endif
}

inline void load(const float* from, Vector& to) { std::memcpy(&to, from, sizeof(Vector)); }
inline void load(const BFloat* from, Vector& to) {
  for (uint32_t lane = 0; lane < kLanes; ++lane) to[lane] = to_float(from[lane]);
}
inline void load(const Half* from, Vector& to) {
#if defined(__F16C__)
  const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const __m256 high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)));
  std::memcpy(&to, &low, sizeof low);
  std::memcpy(reinterpret_cast<char*>(&to) + sizeof low, &high, sizeof high);
#else
  for (uint32_t lane = 0; lane < kLanes; ++lane) to[lane] = to_float(from[lane]);
#endif
}

inline void store(const Vector& from, float* to) { std::memcpy(to, &from, sizeof(Vector)); }
template <class T>
inline void store(const Vector& from, T* to) {
  for (uint32_t lane = 0; lane < kLanes; ++lane) from_float(from[lane], to[lane]);
}

template <class In, class Out>
inline void copy_row(const In* in, Out* out, uint32_t dim) {
  uint32_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) {
    Vector value;
    load(in + column, value);
    store(value, out + column);
  }
  for (; column < dim; ++column) from_float(to_float(in[column]), out[column]);
}

// Copies whole lines past the caches; `out` starts at one.
inline void stream_lines(const std::byte* in, std::byte* out, size_t bytes) {
#if defined(__AVX512F__)
  for (size_t at = 0; at < bytes; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(out + at), _mm512_loadu_si512(in + at));
#elif defined(__AVX2__)
  for (size_t at = 0; at < bytes; at += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at)));
#elif defined(__SSE2__)
  for (size_t at = 0; at < bytes; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(out + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at)));
#else
  std::memcpy(out, in, bytes);
#endif
}

inline void end_of_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

constexpr size_t kDistance = 32;  // rows between a prefetch and its use

// Calls copy(row, i) for the n rows.
template <class Copy>
inline void for_each_row(const RowSource& source, const uint32_t* rows, size_t n, size_t bytes,
                         const Copy& copy) {
  for (size_t i = 0; i < (n < kDistance ? n : kDistance); ++i)
    prefetch_bytes(source.at(rows[i]), bytes);
  for (size_t i = 0; i < n; ++i) {
    if (i + kDistance < n) prefetch_bytes(source.at(rows[i + kDistance]), bytes);
    copy(source.at(rows[i]), i);
  }
}

template <class In, class Out>
void gather_rows(const RowSource& source, const uint32_t* rows, size_t n, bool stream, Out* out,
                 size_t out_stride) {
  const size_t bytes = source.dim * sizeof(In);
  if constexpr (std::is_same_v<In, Out>) {
    const bool lines = bytes % 64 == 0 && out_stride * sizeof(Out) % 64 == 0 &&
                       reinterpret_cast<uintptr_t>(out) % 64 == 0;
    if (stream && lines) {
      for_each_row(source, rows, n, bytes, [&](const std::byte* row, size_t i) {
        stream_lines(row, reinterpret_cast<std::byte*>(out + i * out_stride), bytes);
      });
      return end_of_stream();
    }
  }
  for_each_row(source, rows, n, bytes, [&](const std::byte* row, size_t i) {
    copy_row(reinterpret_cast<const In*>(row), out + i * out_stride, source.dim);
  });
}

// Columns [first, first + 16 * kVectors) of a bag.
template <uint32_t kVectors, bool kWeighted, class In, class Out>
inline void pool_block(const RowSource& source, const Bag& bag, uint32_t first, Out* out) {
  Vector sum[kVectors] = {};
  for (size_t i = 0; i < bag.length; ++i) {
    const In* row = reinterpret_cast<const In*>(source.at(bag.rows[i])) + first;
    for (uint32_t v = 0; v < kVectors; ++v) {
      Vector value;
      load(row + v * kLanes, value);
      if constexpr (kWeighted) value *= bag.weights[i];
      sum[v] += value;
    }
  }
  for (uint32_t v = 0; v < kVectors; ++v) {
    if (bag.divisor != 1) sum[v] /= bag.divisor;
    store(sum[v], out + first + v * kLanes);
  }
}

template <bool kWeighted, class In, class Out>
void pool_bag(const RowSource& source, const Bag& bag, Out* out) {
  uint32_t column = 0;
  for (; column + 4 * kLanes <= source.dim; column += 4 * kLanes)
    pool_block<4, kWeighted, In>(source, bag, column, out);
  for (; column + kLanes <= source.dim; column += kLanes)
    pool_block<1, kWeighted, In>(source, bag, column, out);
  for (; column < source.dim; ++column) {
    float sum = 0;
    for (size_t i = 0; i < bag.length; ++i) {
      float value = to_float(reinterpret_cast<const In*>(source.at(bag.rows[i]))[column]);
      if constexpr (kWeighted) value *= bag.weights[i];
      sum += value;
    }
    if (bag.divisor != 1) sum /= bag.divisor;
    from_float(sum, out[column]);
  }
}

// Calls f with a null pointer of the C++ type of `type`.
template <class F>
inline void with_type(DataType type, F&& f) {
  switch (type) {
    case DataType::kFloat32:
      f(static_cast<float*>(nullptr));
      break;
    case DataType::kFloat16:
      f(static_cast<Half*>(nullptr));
      break;
    case DataType::kBFloat16:
      f(static_cast<BFloat*>(nullptr));
      break;
  }
}

template <class T>
void accumulate_row(const T* gradient, float clamp, float scale, float* sum, uint32_t dim) {
  if (clamp > 0) {
    for (uint32_t column = 0; column < dim; ++column) {
      float value = to_float(gradient[column]);
      value = value < -clamp ? -clamp : value;
      value = value > clamp ? clamp : value;
      sum[column] += value * scale;
    }
    return;
  }
  uint32_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) {
    Vector value, total;
    load(gradient + column, value);
    load(sum + column, total);
    total += value * scale;
    store(total, sum + column);
  }
  for (; column < dim; ++column) sum[column] += to_float(gradient[column]) * scale;
}

inline void round_stochastic(float value, uint32_t random, BFloat& out) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7f800000) == 0x7f800000) return from_float(value, out);  // a NaN stays one
  out.bits = static_cast<uint16_t>((bits + (random & 0xffff)) >> 16);
}

inline void round_stochastic(float value, uint32_t random, Half& out) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  if (magnitude >= 0x477fe000) return from_float(value, out);  // the largest half and above
  uint32_t half;
  if (magnitude < 0x38800000) {
    const float unit = static_cast<float>(random >> 8) * 0x1p-24f;
    half = static_cast<uint32_t>(float_of(magnitude) * 0x1p24f + unit);
  } else {
    half = (magnitude + (random & 0x1fff) - 0x38000000) >> 13;
  }
  out.bits = static_cast<uint16_t>(((bits >> 16) & 0x8000) | half);
}

inline void round_stochastic(float value, uint32_t, float& out) { out = value; }

constexpr uint32_t kRoundingStream = 0x80000000u;  // apart from the streams of initialisers

}  // namespace

void widen(DataType type, const void* from, float* to, uint32_t dim) {
  with_type(type, [&](auto* tag) {
    copy_row(static_cast<decltype(tag)>(const_cast<void*>(from)), to, dim);
  });
}

void narrow(DataType type, const float* from, void* to, uint32_t dim) {
  with_type(type, [&](auto* tag) { copy_row(from, static_cast<decltype(tag)>(to), dim); });
}

void narrow_stochastic(DataType type, const float* from, void* to, uint32_t dim, uint64_t seed,
                       uint64_t id, uint32_t step) {
  with_type(type, [&](auto* tag) {
    auto* out = static_cast<decltype(tag)>(to);
    for (uint32_t first = 0; first < dim; first += 32) {
      uint32_t random[32];
      philox_columns(seed, id, kRoundingStream | step, first, random);
      const uint32_t count = dim - first < 32 ? dim - first : 32;
      for (uint32_t i = 0; i < count; ++i)
        round_stochastic(from[first + i], random[i], out[first + i]);
    }
  });
}

void gather(const RowSource& source, const uint32_t* rows, size_t n, bool stream, DataType out_type,
            void* out, size_t out_stride) {
  with_type(source.type, [&](auto* in) {
    with_type(out_type, [&](auto* to) {
      gather_rows<std::remove_pointer_t<decltype(in)>>(source, rows, n, stream,
                                                       static_cast<decltype(to)>(out), out_stride);
    });
  });
}

void pool(const RowSource& source, const Bag& bag, DataType out_type, void* out) {
  with_type(source.type, [&](auto* in) {
    with_type(out_type, [&](auto* to) {
      using In = std::remove_pointer_t<decltype(in)>;
      auto* into = static_cast<decltype(to)>(out);
      if (bag.weights != nullptr) {
        pool_bag<true, In>(source, bag, into);
      } else {
        pool_bag<false, In>(source, bag, into);
      }
    });
  });
}

void accumulate(DataType type, const void* gradient, float clamp, float scale, float* sum,
                uint32_t dim) {
  with_type(type, [&](auto* tag) {
    accumulate_row(static_cast<decltype(tag)>(const_cast<void*>(gradient)), clamp, scale, sum, dim);
  });
}

float dot(const float* a, const float* b, uint32_t dim) { return dot_columns(a, b, dim); }

}  // namespace dynamicemb::DYNAMICEMB_VARIANT
