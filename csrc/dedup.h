// Distinct ids of a batch that is about to travel between ranks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamicemb {

// Writes the distinct ids in the order of their first occurrence, for every id the place of it
// among them, and how often each occurs. `distinct` and `counts` have room for `count` numbers.
// Returns how many are distinct.
std::size_t distinct_ids(const std::uint64_t* ids, std::size_t count, std::uint64_t* distinct,
                         std::int64_t* places, std::int64_t* counts);

}  // namespace dynamicemb
