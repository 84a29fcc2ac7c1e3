#include "dedup.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <vector>

#include "hash.h"

namespace dynamicemb {

namespace {

constexpr std::size_t kAhead = 16;  // ids whose place in the map is fetched in advance
constexpr std::uint32_t kEmpty = 0;

}  // namespace

std::size_t distinct_ids(const std::uint64_t* ids, std::size_t count, std::uint64_t* distinct,
                         std::int64_t* places, std::int64_t* counts) {
  if (count >= std::numeric_limits<std::uint32_t>::max())
    throw std::length_error("a batch of 2^32 ids or more");
  // Open addressing over places + 1, at most half full; the ids themselves are in `distinct`.
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(2 * count, 16));
  const std::size_t mask = size - 1;
  std::vector<std::uint32_t> map(size, kEmpty);
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(&map[hash_id(ids[i + kAhead]) & mask], 1);
    const std::uint64_t id = ids[i];
    std::size_t at = hash_id(id) & mask;
    while (map[at] != kEmpty && distinct[map[at] - 1] != id) at = (at + 1) & mask;
    if (map[at] == kEmpty) {
      distinct[found] = id;
      counts[found] = 0;
      map[at] = static_cast<std::uint32_t>(++found);
    }
    const std::size_t place = map[at] - 1;
    places[i] = static_cast<std::int64_t>(place);
    ++counts[place];
  }
  return found;
}

}  // namespace dynamicemb
