// Lookups in the files of a checkpoint, mapped into memory as they are.
//
// Where the ids of a shard come in the order of `buckets` equal parts of the range of their hashes,
// as tables export them, `first_rows` says where each part begins, and the ids of one are compared
// one by one.
//
// Else, or for speed, it has an index: an open-addressing table of `slots` words over its ids. 0 is
// empty, else the low 40 bits are a row number plus 1 and the high 24 bits a tag from the hash. The
// search for an id starts at (hash * slots) >> 64 and goes on to the next word, round the end. Row
// numbers from `rows` on are those of ids that were removed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace dynamicemb {

inline constexpr std::uint64_t kMaxIndexedRows = (std::uint64_t{1} << 40) - 2;

// How ids are spread over the shards of a layer; see routing.py.
enum class Distribution : std::uint8_t { kRoundRobin = 0, kHashRoundRobin, kContinuous };

struct MappedShard {
  const std::uint64_t* index = nullptr;
  std::uint64_t slots = 0;
  const std::uint64_t* ids = nullptr;
  std::uint64_t rows = 0;
  const std::uint64_t* removed_ids = nullptr;
  std::uint64_t removed = 0;
  const std::byte* values = nullptr;
  const std::uint64_t* first_rows = nullptr;  // [buckets + 1]
  std::uint64_t buckets = 0;                  // 0: there is an index
};

// The shards of one checkpoint or delta.
struct MappedLayer {
  Distribution distribution = Distribution::kRoundRobin;
  std::uint64_t block = 0;
  std::vector<MappedShard> shards;

  const MappedShard& owner(std::uint64_t id) const;
};

// Words of an index for this many ids.
std::uint64_t index_slots(std::uint64_t ids);
// Fills `shard.index`, which must be zero, from its ids. False if an id comes twice.
bool build_index(const MappedShard& shard, std::uint64_t* index);

// Counts ids by bucket, in the order in which they come: false once an id is of an earlier bucket
// than one before it. `last` is the bucket of the last id.
bool count_by_bucket(const std::uint64_t* ids, std::size_t n, std::uint64_t buckets,
                     std::uint64_t& last, std::uint64_t* counts);

// Layers from the newest to the oldest: the first that knows an id has its row, or its removal.
// Does not own what it points to. Rows that the files do not have are never read, whatever an index
// or first rows say.
class MappedTable {
 public:
  MappedTable(std::size_t row_bytes, std::vector<MappedLayer> layers)
      : row_bytes_(row_bytes), layers_(std::move(layers)) {}

  // found[i], and out + i * row_bytes = the row of ids[i] or `missing`.
  void find(const std::uint64_t* ids, std::size_t n, int threads, const std::byte* missing,
            bool* found, std::byte* out) const;

 private:
  const std::byte* locate(std::uint64_t id, std::uint64_t hash) const;

  std::size_t row_bytes_;
  std::vector<MappedLayer> layers_;
};

}  // namespace dynamicemb
