// Where an id lives. The GPU kernels compute the same numbers.
#pragma once

#include <cstdint>

namespace dynamicemb {

// The 64-bit finaliser of MurmurHash3: a bijection, so distinct ids have distinct hashes.
inline std::uint64_t hash_id(std::uint64_t id) {
  id ^= id >> 33;
  id *= 0xff51afd7ed558ccdULL;
  id ^= id >> 33;
  id *= 0xc4ceb9fe1a85ec53ULL;
  id ^= id >> 33;
  return id;
}

// Monotone in the hash: doubling the buckets splits bucket b into 2b and 2b + 1.
inline std::uint64_t bucket_of(std::uint64_t hash, std::uint64_t num_buckets) {
  return ((hash >> 32) * num_buckets) >> 32;
}

// One byte of the hash that the bucket choice does not use; 0 means an empty slot.
inline std::uint8_t digest_of(std::uint64_t hash) {
  const auto digest = static_cast<std::uint8_t>(hash);
  return digest == 0 ? 1 : digest;
}

}  // namespace dynamicemb
