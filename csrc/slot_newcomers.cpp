// The ids of a batch that have no slot yet: counted, given slots and entered in the index.
//
// They are split by ranges of buckets. A part owns its buckets, so parts run on any threads; slots
// go to ids in the order of their first occurrence in the batch, whatever the parts.
#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "batch.h"
#include "hash.h"
#include "parallel.h"
#include "slot_map.h"

namespace dynamicemb {
namespace {

constexpr size_t kPartIds = 1024;  // aimed at: the dedup of a part fits the first-level cache
constexpr size_t kMostParts = 256;
constexpr size_t kChunk = 4096;  // ids per task while splitting
constexpr uint32_t kRefused = kNoSlot;

}  // namespace

class SlotMap::Newcomers {
 public:
  Newcomers(SlotMap& map, const uint64_t* ids, const int64_t* counts,
            const std::vector<uint32_t>& missing, int threads)
      : map_(map),
        ids_(ids),
        counts_(counts),
        missing_(missing),
        threads_(threads),
        parts_(std::clamp<size_t>(missing.size() / kPartIds, 1, kMostParts)),
        begin_(parts_ + 1),
        distinct_(parts_),
        full_(parts_),
        memory_(2 * Scratch::bytes_for<uint64_t>(missing.size()) +
                5 * Scratch::bytes_for<uint32_t>(missing.size())) {
    const size_t n = missing.size();
    part_ids_ = memory_.take<uint64_t>(n);
    entry_ids_ = memory_.take<uint64_t>(n);
    part_at_ = memory_.take<uint32_t>(n);
    entry_of_ = memory_.take<uint32_t>(n);
    entry_counts_ = memory_.take<uint32_t>(n);
    entry_first_ = memory_.take<uint32_t>(n);
    number_ = memory_.take<uint32_t>(n);
  }

  // Returns how many ids are distinct.
  size_t count() {
    split();
    parallel_for(threads_, parts_, [&](size_t part) { find_distinct(part); });
    // The first occurrence of an id was marked with 1; the others with 0.
    uint32_t distinct = 0;
    for (size_t i = 0; i < missing_.size(); ++i)
      number_[i] = std::exchange(distinct, distinct + number_[i]);
    return distinct;
  }

  // The first of them, and how often they occur, in the order of the batch.
  void list(std::vector<uint64_t>& ids, std::vector<uint32_t>& counts) const {
    parallel_for(threads_, parts_, [&](size_t part) {
      for (size_t e = begin_[part]; e < begin_[part] + distinct_[part]; ++e) {
        const uint32_t number = number_[entry_first_[e]];
        if (number >= ids.size()) continue;
        ids[number] = entry_ids_[e];
        counts[number] = entry_counts_[e];
      }
    });
  }

  // Enters them in the index with these slots and counts, and writes the slots of all occurrences.
  void insert(const std::vector<uint32_t>& new_slots, const std::vector<uint32_t>& counts,
              int64_t* slots) {
    parallel_for(threads_, parts_, [&](size_t part) { insert_part(part, new_slots, counts); });
    map_.index_.size_ += new_slots.size();
    for (const auto& entries : full_)
      for (const uint32_t e : entries) {
        const uint32_t number = number_[entry_first_[e]];
        --map_.index_.size_;
        map_.place_or_grow(entry_ids_[e], new_slots[number], {map_.time_, counts[number], 0, 0});
      }
    parallel_for(threads_, parts_, [&](size_t part) {
      for (size_t i = begin_[part]; i < begin_[part + 1]; ++i) {
        const uint32_t number = number_[entry_first_[entry_of_[i]]];
        if (number < new_slots.size()) slots[missing_[part_at_[i]]] = new_slots[number];
      }
    });
  }

 private:
  void split() {
    const size_t n = missing_.size();
    const uint64_t buckets = map_.index_.buckets_;
    const uint64_t scale = (uint64_t{parts_} << 32) / buckets;  // monotone in the bucket
    const auto part_of = [&](uint64_t id) { return bucket_of(hash_id(id), buckets) * scale >> 32; };
    if (parts_ == 1) {
      for (size_t i = 0; i < n; ++i) {
        part_ids_[i] = ids_[missing_[i]];
        part_at_[i] = static_cast<uint32_t>(i);
      }
      begin_[1] = n;
      return;
    }
    const size_t chunks = (n + kChunk - 1) / kChunk;
    std::vector<uint32_t> next(chunks * parts_);  // chunk by chunk: ids of a part, then their place
    uint32_t* part = entry_of_;                   // memory that is not needed yet
    parallel_for(threads_, chunks, [&](size_t chunk) {
      uint32_t* counts = next.data() + chunk * parts_;
      for (size_t i = chunk * kChunk; i < std::min(n, (chunk + 1) * kChunk); ++i) {
        entry_ids_[i] = ids_[missing_[i]];
        part[i] = static_cast<uint32_t>(part_of(entry_ids_[i]));
        ++counts[part[i]];
      }
    });
    uint32_t place = 0;
    for (size_t p = 0; p < parts_; ++p) {
      begin_[p] = place;
      for (size_t chunk = 0; chunk < chunks; ++chunk)
        place += std::exchange(next[chunk * parts_ + p], place);
    }
    begin_[parts_] = place;
    parallel_for(threads_, chunks, [&](size_t chunk) {
      uint32_t* places = next.data() + chunk * parts_;
      for (size_t i = chunk * kChunk; i < std::min(n, (chunk + 1) * kChunk); ++i) {
        const uint32_t to = places[part[i]]++;
        part_ids_[to] = entry_ids_[i];
        part_at_[to] = static_cast<uint32_t>(i);
      }
    });
  }

  void find_distinct(size_t part) {
    const size_t begin = begin_[part], count = begin_[part + 1] - begin;
    const size_t mask = std::bit_ceil(2 * count + 1) - 1;
    std::vector<uint32_t> place(mask + 1);  // open addressing: entry of the part + 1
    size_t distinct = 0;
    for (size_t i = begin; i < begin + count; ++i) {
      const uint64_t id = part_ids_[i];
      const uint32_t at_batch = part_at_[i];
      const uint32_t uses = use_count(at_batch);
      size_t at = hash_id(id) & mask;
      while (place[at] != 0 && entry_ids_[begin + place[at] - 1] != id) at = (at + 1) & mask;
      if (place[at] != 0) {
        const size_t e = begin + place[at] - 1;
        entry_of_[i] = static_cast<uint32_t>(e);
        entry_counts_[e] = add_saturated(entry_counts_[e], uses);
        number_[at_batch] = 0;
        continue;
      }
      const size_t e = begin + distinct;
      place[at] = static_cast<uint32_t>(++distinct);
      entry_ids_[e] = id;
      entry_counts_[e] = uses;
      entry_first_[e] = at_batch;
      entry_of_[i] = static_cast<uint32_t>(e);
      number_[at_batch] = 1;
    }
    distinct_[part] = distinct;
  }

  uint32_t use_count(uint32_t at) const {
    if (counts_ == nullptr) return 1;
    return static_cast<uint32_t>(
        std::min<int64_t>(counts_[missing_[at]], std::numeric_limits<uint32_t>::max()));
  }

  void insert_part(size_t part, const std::vector<uint32_t>& new_slots,
                   const std::vector<uint32_t>& counts) {
    constexpr size_t kAhead = 16;
    Table& index = map_.index_;
    const size_t begin = begin_[part], end = begin + distinct_[part];
    const auto base_of = [&](size_t e) {
      return static_cast<uint32_t>(bucket_of(hash_id(entry_ids_[e]), index.buckets_) * kWidth);
    };
    // The positions first, while the places for ids and slots are fetched.
    std::vector<uint32_t> positions(end - begin, kRefused);
    for (size_t e = begin; e < end; ++e) {
      if (e + kAhead < end) prefetch_near(index.digests_.data() + base_of(e + kAhead));
      const uint32_t number = number_[entry_first_[e]];
      if (number >= new_slots.size()) continue;
      const uint64_t hash = hash_id(entry_ids_[e]);
      const auto base = static_cast<uint32_t>(bucket_of(hash, index.buckets_) * kWidth);
      const uint32_t position = kernels().free_position(index.digests_.data() + base, kWidth);
      if (position == kWidth) {
        full_[part].push_back(static_cast<uint32_t>(e));
        continue;
      }
      index.digests_[base + position] = digest_of(hash);
      positions[e - begin] = base + position;
      prefetch(&index.keys_[base + position]);
      prefetch(&map_.slot_of_[base + position]);
      prefetch(&map_.uses_[new_slots[number]]);
    }
    for (size_t e = begin; e < end; ++e) {
      const uint32_t position = positions[e - begin];
      if (position == kRefused) continue;
      const uint32_t number = number_[entry_first_[e]], slot = new_slots[number];
      index.keys_[position] = entry_ids_[e];
      map_.slot_of_[position] = slot;
      map_.uses_[slot] = {map_.time_, counts[number], position + 1, entry_ids_[e]};
    }
  }

  SlotMap& map_;
  const uint64_t* ids_;
  const int64_t* counts_;
  const std::vector<uint32_t>& missing_;
  int threads_;
  size_t parts_;
  std::vector<size_t> begin_;                // of the parts
  std::vector<size_t> distinct_;             // entries of the parts
  std::vector<std::vector<uint32_t>> full_;  // entries of the parts that found a bucket full
  Scratch memory_;
  uint64_t* part_ids_ = nullptr;      // by part, then in the order of the batch
  uint32_t* part_at_ = nullptr;       // their places in `missing`
  uint32_t* entry_of_ = nullptr;      // their entries
  uint64_t* entry_ids_ = nullptr;     // distinct, from the begin of the part on
  uint32_t* entry_counts_ = nullptr;  // occurrences
  uint32_t* entry_first_ = nullptr;   // place of the first occurrence in `missing`
  uint32_t* number_ = nullptr;        // by place in `missing`: distinct ids before it
};

void SlotMap::insert_missing(const uint64_t* ids, const int64_t* counts,
                             const std::vector<uint32_t>& missing, bool evict,
                             SlotOrder::Request request, int64_t* slots, Mapped& mapped) {
  Newcomers newcomers(*this, ids, counts, missing, request.threads);
  const size_t total = newcomers.count();
  if (evict && config_.policy != SlotPolicy::kTtl && free_.size() < total) {
    request.wanted = total - free_.size();
    release(request, mapped.evicted);
  }
  const size_t accepted = std::min<size_t>(total, free_.size());
  mapped.refused = total - accepted;
  IdSlots& inserted = mapped.inserted;
  inserted.ids.resize(accepted);
  inserted.slots.resize(accepted);
  std::vector<uint32_t> uses(accepted);
  newcomers.list(inserted.ids, uses);
  if (!counts_uses()) std::fill(uses.begin(), uses.end(), 0);
  if (config_.policy == SlotPolicy::kLfuLru)
    for (uint32_t& use : uses) {  // the first use of an id does not draw
      SlotUse first{time_, config_.first_logarithm, 0, 0};
      count_use(first, use - 1);
      use = first.count;
    }
  free_.take_lowest(accepted, inserted.slots.data());
  newcomers.insert(inserted.slots, uses, slots);
  order_.note(inserted.slots, uses.data(), time_);
}

}  // namespace dynamicemb
