#include "serving.h"

#include <algorithm>
#include <cstring>

#include "hash.h"
#include "kernels.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr int kRowBits = 40;
constexpr uint64_t kRowMask = (uint64_t{1} << kRowBits) - 1;
constexpr size_t kChunk = 1024;  // ids per task
constexpr size_t kBlock = 32;    // ids that wait for memory together

uint64_t start_of(uint64_t hash, uint64_t slots) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * slots) >> 64);
}

uint64_t tag_of(uint64_t hash) { return hash << kRowBits; }

uint64_t id_of(const MappedShard& shard, uint64_t row) {
  return row < shard.rows ? shard.ids[row] : shard.removed_ids[row - shard.rows];
}

// The rows of the bucket of an id; no more than the shard has.
std::pair<uint64_t, uint64_t> bucket_rows(const MappedShard& shard, uint64_t hash) {
  const uint64_t* at = shard.first_rows + bucket_of(hash, shard.buckets);
  return {at[0], std::min(at[1], shard.rows)};
}

// The row number of an id, or kRowMask. Stops after all slots, should an index have no empty word.
uint64_t search(const MappedShard& shard, uint64_t id, uint64_t hash) {
  if (shard.buckets != 0) {
    const auto [first, end] = bucket_rows(shard, hash);
    for (uint64_t row = first; row < end; ++row)
      if (shard.ids[row] == id) return row;
    return kRowMask;
  }
  uint64_t at = shard.slots == 0 ? 0 : start_of(hash, shard.slots);
  for (uint64_t step = 0; step < shard.slots; ++step) {
    const uint64_t word = shard.index[at];
    if (word == 0) return kRowMask;
    const uint64_t row = (word & kRowMask) - 1;
    if ((word & ~kRowMask) == tag_of(hash) && row < shard.rows + shard.removed &&
        id_of(shard, row) == id)
      return row;
    if (++at == shard.slots) at = 0;
  }
  return kRowMask;
}

}  // namespace

const MappedShard& MappedLayer::owner(uint64_t id) const {
  const uint64_t world = shards.size();
  if (world == 1) return shards[0];
  if (distribution == Distribution::kContinuous && id < block * world) return shards[id / block];
  return shards[(distribution == Distribution::kHashRoundRobin ? hash_id(id) : id) % world];
}

uint64_t index_slots(uint64_t ids) { return ids == 0 ? 0 : ids + ids / 2 + 1; }

bool build_index(const MappedShard& shard, uint64_t* index) {
  const uint64_t total = shard.rows + shard.removed;
  // The ids of a dump come in the order of their hash, nearly: the words are written in order too.
  for (uint64_t row = 0; row < total; ++row) {
    if (row + kBlock < total)
      prefetch(index + start_of(hash_id(id_of(shard, row + kBlock)), shard.slots));
    const uint64_t id = id_of(shard, row), hash = hash_id(id);
    uint64_t at = start_of(hash, shard.slots);
    for (; index[at] != 0; at = at + 1 == shard.slots ? 0 : at + 1)
      if ((index[at] & ~kRowMask) == tag_of(hash) && id_of(shard, (index[at] & kRowMask) - 1) == id)
        return false;
    index[at] = tag_of(hash) | (row + 1);
  }
  return true;
}

bool count_by_bucket(const uint64_t* ids, size_t n, uint64_t buckets, uint64_t& last,
                     uint64_t* counts) {
  for (size_t i = 0; i < n; ++i) {
    const uint64_t bucket = bucket_of(hash_id(ids[i]), buckets);
    if (bucket < last) return false;
    last = bucket;
    ++counts[bucket];
  }
  return true;
}

const std::byte* MappedTable::locate(uint64_t id, uint64_t hash) const {
  for (const MappedLayer& layer : layers_) {
    const MappedShard& shard = layer.owner(id);
    const uint64_t row = search(shard, id, hash);
    if (row == kRowMask) continue;
    return row < shard.rows ? shard.values + row * row_bytes_ : nullptr;
  }
  return nullptr;
}

void MappedTable::find(const uint64_t* ids, size_t n, int threads, const std::byte* missing,
                       bool* found, std::byte* out) const {
  const size_t tasks = (n + kChunk - 1) / kChunk;
  parallel_for(threads, tasks, [&](size_t task) {
    const size_t last = std::min(n, (task + 1) * kChunk);
    for (size_t begin = task * kChunk; begin < last; begin += kBlock) {
      const size_t count = std::min(kBlock, last - begin);
      uint64_t hashes[kBlock];
      const std::byte* rows[kBlock];
      for (size_t i = 0; i < count; ++i) {
        hashes[i] = hash_id(ids[begin + i]);
        for (const MappedLayer& layer : layers_) {
          const MappedShard& shard = layer.owner(ids[begin + i]);
          if (shard.buckets != 0)
            prefetch(shard.first_rows + bucket_of(hashes[i], shard.buckets));
          else if (shard.slots != 0)
            prefetch(shard.index + start_of(hashes[i], shard.slots));
        }
      }
      // The candidates of the oldest layer, which has most ids: their ids, and the row of one.
      for (size_t i = 0; i < count && !layers_.empty(); ++i) {
        const MappedShard& shard = layers_.back().owner(ids[begin + i]);
        if (shard.buckets != 0) {
          const auto [first, end] = bucket_rows(shard, hashes[i]);
          if (first < end) prefetch_bytes(shard.ids + first, (end - first) * sizeof(uint64_t));
          continue;
        }
        if (shard.slots == 0) continue;
        const uint64_t word = shard.index[start_of(hashes[i], shard.slots)];
        const uint64_t row = (word & kRowMask) - 1;
        if (row >= shard.rows) continue;
        prefetch(shard.ids + row);
        prefetch_bytes(shard.values + row * row_bytes_, row_bytes_);
      }
      for (size_t i = 0; i < count; ++i) {
        rows[i] = locate(ids[begin + i], hashes[i]);
        if (rows[i] != nullptr) prefetch_bytes(rows[i], row_bytes_);
      }
      for (size_t i = 0; i < count; ++i) {
        found[begin + i] = rows[i] != nullptr;
        std::memcpy(out + (begin + i) * row_bytes_, rows[i] != nullptr ? rows[i] : missing,
                    row_bytes_);
      }
    }
  });
}

}  // namespace dynamicemb
