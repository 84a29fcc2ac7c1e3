#include "checksum.h"

#include <bit>
#include <cstring>
#include <initializer_list>

namespace dynamicemb {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5;

// Little-endian numbers at any address.
template <class T>
uint64_t load(const unsigned char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  if constexpr (std::endian::native == std::endian::big) {
    T swapped = 0;
    for (std::size_t i = 0; i < sizeof value; ++i)
      swapped = static_cast<T>(swapped << 8 | ((value >> (8 * i)) & 0xff));
    value = swapped;
  }
  return value;
}

uint64_t round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

uint64_t merge(uint64_t sum, uint64_t lane) { return (sum ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

uint64_t xxh64(const void* data, std::size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  const auto* const end = p + size;
  uint64_t sum = kPrime5;
  if (size >= 32) {
    uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
    for (; end - p >= 32; p += 32) {
      a = round(a, load<uint64_t>(p));
      b = round(b, load<uint64_t>(p + 8));
      c = round(c, load<uint64_t>(p + 16));
      d = round(d, load<uint64_t>(p + 24));
    }
    sum = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
    for (const uint64_t lane : {a, b, c, d}) sum = merge(sum, lane);
  }
  sum += size;
  for (; end - p >= 8; p += 8)
    sum = std::rotl(sum ^ round(0, load<uint64_t>(p)), 27) * kPrime1 + kPrime4;
  if (end - p >= 4) {
    sum = std::rotl(sum ^ load<uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3;
    p += 4;
  }
  for (; p < end; ++p) sum = std::rotl(sum ^ *p * kPrime5, 11) * kPrime1;
  sum = (sum ^ sum >> 33) * kPrime2;
  sum = (sum ^ sum >> 29) * kPrime3;
  return sum ^ sum >> 32;
}

}  // namespace dynamicemb
