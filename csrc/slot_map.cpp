#include "slot_map.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "batch.h"
#include "dedup.h"
#include "hash.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr uint32_t kWidth = 128;
constexpr size_t kChunk = 2048;   // ids per task
constexpr size_t kAhead = 16;     // places fetched in advance
constexpr size_t kFarAhead = 64;  // in loops that do little else than wait for memory
constexpr uint32_t kLargestLogarithm = 31;

TableConfig index_config(uint64_t capacity) {
  // At this load one bucket in 10^8 overflows, and lookups mostly read one line of digests.
  constexpr double kLoad = 0.6;
  TableConfig config;
  config.width = kWidth;
  config.init_buckets = static_cast<uint64_t>(static_cast<double>(capacity) / kLoad / kWidth) + 1;
  config.max_buckets = config.init_buckets;
  config.strategy = ScoreStrategy::kNoEviction;
  return config;
}

}  // namespace

// ---- free slots ----

FreeSlots::FreeSlots(uint64_t capacity) : size_(capacity) {
  uint64_t bits = capacity;
  do {
    std::vector<uint64_t> words((bits + 63) / 64, ~uint64_t{0});
    if (bits % 64 != 0) words.back() = (uint64_t{1} << bits % 64) - 1;
    bits = words.size();
    levels_.push_back(std::move(words));
  } while (bits > 1);
}

uint32_t FreeSlots::take_lowest() {
  uint64_t at = 0;
  for (size_t level = levels_.size(); level-- > 0;)
    at = at * 64 + static_cast<uint64_t>(std::countr_zero(levels_[level][at]));
  take(static_cast<uint32_t>(at));
  return static_cast<uint32_t>(at);
}

void FreeSlots::take(uint32_t slot) {
  --size_;
  uint64_t at = slot;
  for (auto& words : levels_) {
    words[at / 64] &= ~(uint64_t{1} << at % 64);
    if (words[at / 64] != 0) return;
    at /= 64;
  }
}

void FreeSlots::release(uint32_t slot) {
  ++size_;
  uint64_t at = slot;
  for (auto& words : levels_) {
    const bool was_empty = words[at / 64] == 0;
    words[at / 64] |= uint64_t{1} << at % 64;
    if (!was_empty) return;
    at /= 64;
  }
}

// ---- the map ----

SlotMap::SlotMap(const SlotMapConfig& config)
    : config_(config),
      index_(index_config(config.capacity), {}),
      slot_of_(index_.capacity()),
      owner_(config.capacity),
      uses_(config.capacity),
      free_(config.capacity),
      order_(config.policy, config.decay_exponent) {}

uint64_t SlotMap::bytes() const {
  return index_.digests_.bytes() + index_.keys_.bytes() + slot_of_.bytes() + owner_.bytes() +
         uses_.bytes() + sizeof(uint32_t) * pins_.size();
}

void SlotMap::begin_batch(uint64_t time) {
  time_ = time;
  if (++stamp_ == 0) {  // 2^32 batches: forget the old stamps
    for (size_t slot = 0; slot < uses_.size(); ++slot) uses_[slot].stamp = uses_[slot].stamp != 0;
    stamp_ = 2;
  }
}

void SlotMap::touch(SlotUse& use, uint64_t count) {
  use.last = time_;
  use.stamp = stamp_;
  if (config_.policy != SlotPolicy::kLfuLru) {
    use.count =
        add_saturated(use.count, static_cast<uint32_t>(std::min<uint64_t>(count, ~uint32_t{0})));
    return;
  }
  // Grows by one with probability 2^-count at each use.
  for (; count > 0 && use.count < kLargestLogarithm; --count) {
    const uint64_t low_bits = (uint64_t{1} << use.count) - 1;
    use.count += (hash_id(++draws_) & low_bits) == 0;
  }
}

void SlotMap::place(uint64_t id, uint32_t slot) {
  const uint64_t hash = hash_id(id);
  for (;; grow_index()) {
    const auto base = static_cast<uint32_t>(bucket_of(hash, index_.buckets_) * kWidth);
    const uint32_t position = kernels().free_position(index_.digests_.data() + base, kWidth);
    if (position == kWidth) continue;
    index_.digests_[base + position] = digest_of(hash);
    index_.keys_[base + position] = id;
    ++index_.size_;
    slot_of_[base + position] = slot;
    owner_[slot] = base + position;
    return;
  }
}

void SlotMap::remove(uint32_t slot) {
  index_.digests_[owner_[slot]] = 0;
  --index_.size_;
  uses_[slot] = {};
  free_.release(slot);
}

void SlotMap::grow_index() {
  std::vector<uint64_t> ids;
  std::vector<uint32_t> slots;
  for (uint32_t slot = 0; slot < owner_.size(); ++slot)
    if (!is_free(slot)) {
      ids.push_back(id_of(slot));
      slots.push_back(slot);
    }
  std::vector<uint32_t> found(ids.size());
  Array<uint32_t> slot_of(2 * index_.capacity());
  if (!index_.grow_to(2 * index_.buckets_)) throw std::logic_error("the index did not grow");
  index_.find(ids.data(), ids.size(), 1, found.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    slot_of[found[i]] = slots[i];
    owner_[slots[i]] = found[i];
  }
  slot_of_ = std::move(slot_of);
}

void SlotMap::find(const uint64_t* ids, size_t n, int threads, int64_t* slots, int64_t missing,
                   int64_t offset) const {
  const uint32_t* slot_of = slot_of_.data();
  parallel_for(threads, (n + kChunk - 1) / kChunk, [&](size_t task) {
    const size_t begin = task * kChunk, count = std::min(kChunk, n - begin);
    uint32_t found[kChunk];
    index_.find(ids + begin, count, 1, found);
    for (size_t i = 0; i < count; ++i) {
      if (i + kFarAhead < count && found[i + kFarAhead] != kNoSlot)
        prefetch_near(slot_of + found[i + kFarAhead]);
      slots[begin + i] = found[i] == kNoSlot ? missing : offset + slot_of[found[i]];
    }
  });
}

Mapped SlotMap::map(const uint64_t* ids, size_t n, const int64_t* counts, const MapOptions& options,
                    int64_t* slots) {
  begin_batch(options.time);
  Mapped mapped;
  find(ids, n, options.threads, slots);
  std::vector<uint32_t> missing;
  for (size_t i = 0; i < n; ++i) {
    if (i + kFarAhead < n && slots[i + kFarAhead] >= 0) prefetch_near(&uses_[slots[i + kFarAhead]]);
    if (slots[i] >= 0) {
      touch(uses_[slots[i]], counts == nullptr ? 1 : static_cast<uint64_t>(counts[i]));
    } else {
      missing.push_back(static_cast<uint32_t>(i));
    }
  }
  if (config_.policy == SlotPolicy::kTtl && time_ > config_.ttl) {
    // A little more than what comes in, so that a backlog goes down.
    const size_t most = 2 * missing.size() + 1024;
    release(most, time_ - config_.ttl, stamp_, options.threads, mapped.evicted);
  }
  if (!missing.empty()) insert_missing(ids, counts, missing, options, slots, mapped);
  if (options.pin) pin(slots, n);
  return mapped;
}

void SlotMap::insert_missing(const uint64_t* ids, const int64_t* counts,
                             const std::vector<uint32_t>& missing, const MapOptions& options,
                             int64_t* slots, Mapped& mapped) {
  const size_t n = missing.size();
  Scratch memory(2 * Scratch::bytes_for<uint64_t>(n) + 2 * Scratch::bytes_for<int64_t>(n));
  auto* missing_ids = memory.take<uint64_t>(n);
  auto* distinct = memory.take<uint64_t>(n);
  auto* places = memory.take<int64_t>(n);
  auto* times = memory.take<int64_t>(n);
  for (size_t i = 0; i < n; ++i) missing_ids[i] = ids[missing[i]];
  const size_t total = distinct_ids(missing_ids, n, distinct, places, times);
  if (counts != nullptr) {
    std::fill_n(times, total, 0);
    for (size_t i = 0; i < n; ++i)
      times[places[i]] = add_saturated(times[places[i]], counts[missing[i]]);
  }
  if (options.evict && config_.policy != SlotPolicy::kTtl && free_.size() < total)
    release(total - free_.size(), kNoLimit, stamp_, options.threads, mapped.evicted);
  const size_t accepted = std::min<size_t>(total, free_.size());
  mapped.refused = total - accepted;
  mapped.inserted.ids.reserve(accepted);
  mapped.inserted.slots.reserve(accepted);
  const auto base_of = [&](size_t i) {
    return bucket_of(hash_id(distinct[i]), index_.buckets_) * kWidth;
  };
  for (size_t i = 0; i < accepted; ++i) {
    if (i + 2 * kAhead < accepted)
      prefetch_bytes(index_.digests_.data() + base_of(i + 2 * kAhead), kWidth);
    if (i + kAhead < accepted) {  // the place, unless an id before it takes it
      const uint64_t base = base_of(i + kAhead);
      const uint64_t at =
          base + kernels().free_position(index_.digests_.data() + base, kWidth) % kWidth;
      prefetch_near(&index_.keys_[at]);
      prefetch_near(&slot_of_[at]);
    }
    const uint32_t slot = free_.take_lowest();
    place(distinct[i], slot);
    SlotUse& use = uses_[slot];
    if (config_.policy == SlotPolicy::kLfuLru) use.count = config_.first_logarithm;
    // The first use of an id does not draw.
    touch(use, static_cast<uint64_t>(times[i]) - (config_.policy == SlotPolicy::kLfuLru));
    order_.note(slot, use);
    mapped.inserted.add(distinct[i], slot);
  }
  for (size_t i = 0; i < n; ++i)
    if (static_cast<size_t>(places[i]) < accepted)
      slots[missing[i]] = mapped.inserted.slots[static_cast<size_t>(places[i])];
}

void SlotMap::release(size_t count, uint64_t below, uint32_t spared, int threads,
                      IdSlots& released) {
  std::vector<uint32_t> taken;
  order_.take({uses_.data(), uses_.size()}, pins_.empty() ? nullptr : pins_.data(), size(),
              {count, below, spared, time_, threads}, taken);
  released.ids.reserve(released.ids.size() + taken.size());
  released.slots.reserve(released.slots.size() + taken.size());
  for (size_t i = 0; i < taken.size(); ++i) {
    if (i + 2 * kAhead < taken.size()) prefetch(&owner_[taken[i + 2 * kAhead]]);
    if (i + kAhead < taken.size()) {
      const uint32_t owner = owner_[taken[i + kAhead]];
      prefetch(&index_.keys_[owner]);
      prefetch(&index_.digests_[owner]);
    }
    released.add(id_of(taken[i]), taken[i]);
    remove(taken[i]);
  }
}

IdSlots SlotMap::evict(uint64_t count, bool expired, uint64_t time, int threads) {
  time_ = time;
  IdSlots released;
  uint64_t below = kNoLimit;
  if (expired)
    below = config_.policy == SlotPolicy::kTtl && time > config_.ttl ? time - config_.ttl : 0;
  if (below != 0) release(count, below, 0, threads, released);
  return released;
}

IdSlots SlotMap::erase(const uint64_t* ids, size_t n, int threads) {
  IdSlots erased;
  std::vector<int64_t> slots(n);
  find(ids, n, threads, slots.data());
  for (size_t i = 0; i < n; ++i) {
    if (slots[i] < 0 || is_free(static_cast<uint32_t>(slots[i]))) continue;  // given twice
    const auto slot = static_cast<uint32_t>(slots[i]);
    if (!pins_.empty() && pins_[slot] != 0) continue;
    erased.add(ids[i], slot);
    remove(slot);
  }
  return erased;
}

void SlotMap::pin(const int64_t* slots, size_t n) {
  if (pins_.empty()) pins_.resize(config_.capacity);
  for (size_t i = 0; i < n; ++i)
    if (slots[i] >= 0) ++pins_[slots[i]];
}

void SlotMap::unpin(const int64_t* slots, size_t n) {
  for (size_t i = 0; i < n; ++i)
    if (slots[i] >= 0 && !pins_.empty() && pins_[slots[i]] != 0) --pins_[slots[i]];
}

// ---- state ----

IdSlots SlotMap::used_since(uint64_t time, bool all) const {
  IdSlots used;
  for (uint32_t slot = 0; slot < owner_.size(); ++slot)
    if (!is_free(slot) && (all || uses_[slot].last > time)) used.add(id_of(slot), slot);
  return used;
}

void SlotMap::uses(const uint32_t* slots, size_t n, uint64_t* last, uint32_t* counts) const {
  for (size_t i = 0; i < n; ++i) {
    last[i] = uses_[slots[i]].last;
    counts[i] = uses_[slots[i]].count;
  }
}

void SlotMap::restore(const uint64_t* ids, const uint32_t* slots, const uint64_t* last,
                      const uint32_t* counts, size_t n, uint64_t time, uint64_t draws) {
  index_.clear();
  std::fill_n(uses_.data(), uses_.size(), SlotUse{});
  pins_.clear();
  free_ = FreeSlots(config_.capacity);
  order_.reset();
  stamp_ = 1;
  time_ = time;
  draws_ = draws;
  for (size_t i = 0; i < n; ++i) {
    free_.take(slots[i]);
    place(ids[i], slots[i]);
    uses_[slots[i]] = {last[i], counts[i], stamp_};
  }
}

}  // namespace dynamicemb
