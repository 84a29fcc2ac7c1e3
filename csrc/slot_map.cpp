#include "slot_map.h"

#include <algorithm>
#include <bitset>
#include <stdexcept>

#include "batch.h"
#include "hash.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr size_t kChunk = 2048;  // ids per task
constexpr size_t kAhead = 16;    // uses fetched in advance

// Whether many of the ids come several times, as those of a batch of clicks do.
bool many_repeated(const uint64_t* ids, size_t n) {
  constexpr size_t kSample = 1024, kBits = size_t{1} << 14;
  if (n < kSample) return false;
  std::bitset<kBits> seen;
  size_t repeated = 0;
  for (size_t i = 0; i < kSample; ++i) {
    const size_t bit = hash_id(ids[i]) % kBits;
    repeated += seen[bit];
    seen[bit] = true;
  }
  return repeated > kSample / 8;
}

}  // namespace

TableConfig SlotMap::index_config(uint64_t capacity) {
  TableConfig config;
  config.width = kWidth;
  config.init_buckets = static_cast<uint64_t>(static_cast<double>(capacity) / kLoad / kWidth) + 1;
  config.max_buckets = config.init_buckets;
  config.strategy = ScoreStrategy::kNoEviction;
  return config;
}

SlotMap::SlotMap(const SlotMapConfig& config)
    : config_(config),
      index_(index_config(config.capacity), {}),
      slot_of_(index_.capacity()),
      uses_(config.capacity),
      free_(config.capacity),
      order_(config.policy, config.decay_exponent) {}

uint64_t SlotMap::bytes() const {
  return index_.digests_.bytes() + index_.keys_.bytes() + slot_of_.bytes() + uses_.bytes() +
         sizeof(uint32_t) * pins_.size();
}

// ---- the index ----

bool SlotMap::place(uint64_t id, uint32_t slot) {
  const uint64_t hash = hash_id(id);
  const auto base = static_cast<uint32_t>(bucket_of(hash, index_.buckets_) * kWidth);
  const uint32_t position = kernels().free_position(index_.digests_.data() + base, kWidth);
  if (position == kWidth) return false;
  index_.digests_[base + position] = digest_of(hash);
  index_.keys_[base + position] = id;
  slot_of_[base + position] = slot;
  uses_[slot].owner = base + position + 1;
  return true;
}

void SlotMap::place_or_grow(uint64_t id, uint32_t slot, const SlotUse& use) {
  while (!place(id, slot)) grow_index();
  uses_[slot] = {use.last, use.count, uses_[slot].owner, id};
  ++index_.size_;
}

void SlotMap::grow_index() {
  IdSlots all = used_since(0, true);
  std::vector<uint32_t> found(all.ids.size());
  Array<uint32_t> slot_of(2 * index_.capacity());
  if (!index_.grow_to(2 * index_.buckets_)) throw std::logic_error("the index did not grow");
  index_.find(all.ids.data(), all.ids.size(), 1, found.data());
  for (size_t i = 0; i < all.ids.size(); ++i) {
    slot_of[found[i]] = all.slots[i];
    uses_[all.slots[i]].owner = found[i] + 1;
  }
  slot_of_ = std::move(slot_of);
}

void SlotMap::find(const uint64_t* ids, size_t n, int threads, int64_t* slots, int64_t missing,
                   int64_t offset) const {
  Uses uses{uses_.data(), time_, UseRule::kNone, 0};
  const bool repeated = mostly_known_ && many_repeated(ids, n);
  parallel_for(threads, (n + kChunk - 1) / kChunk, [&](size_t task) {
    const size_t begin = task * kChunk, count = std::min(kChunk, n - begin);
    uint32_t found[kChunk];
    kernels().find_values(index_.index(), slot_of_.data(), uses, repeated, ids + begin, count,
                          found);
    for (size_t i = 0; i < count; ++i)
      slots[begin + i] = found[i] == kNoSlot ? missing : offset + found[i];
  });
}

// ---- a batch ----

void SlotMap::find_known(const uint64_t* ids, size_t n, const int64_t* counts,
                         const MapOptions& options, int64_t* slots, std::vector<uint32_t>& missing,
                         std::vector<int64_t>& before) {
  const size_t chunks = (n + kChunk - 1) / kChunk;
  std::vector<std::vector<uint32_t>> missing_of(chunks);
  std::vector<std::vector<int64_t>> before_of(options.keep ? chunks : 0);
  Uses uses{uses_.data(), time_, UseRule::kStamp, draws_};
  if (counted_later(counts, options))
    uses.rule = UseRule::kNone;
  else if (counts_uses())
    uses.rule = config_.policy == SlotPolicy::kLfuLru ? UseRule::kDraw : UseRule::kAdd;
  const bool repeated = mostly_known_ && many_repeated(ids, n);
  parallel_for(options.threads, chunks, [&](size_t chunk) {
    const size_t begin = chunk * kChunk, count = std::min(kChunk, n - begin);
    uint32_t found[kChunk];
    const size_t left = kernels().find_values(index_.index(), slot_of_.data(), uses, repeated,
                                              ids + begin, count, found);
    if (left > 0) {
      uint32_t without[kChunk];
      size_t misses = 0;
      for (size_t i = 0; i < count; ++i) {
        without[misses] = static_cast<uint32_t>(begin + i);
        misses += found[i] == kNoSlot;
      }
      missing_of[chunk].assign(without, without + misses);
      if (options.keep)
        for (const uint32_t at : missing_of[chunk]) before_of[chunk].push_back(slots[at]);
    }
    for (size_t i = 0; i < count; ++i)
      slots[begin + i] = found[i] == kNoSlot ? int64_t{-1} : int64_t{found[i]};
  });
  draws_ = uses.draws;
  for (const auto& some : missing_of) missing.insert(missing.end(), some.begin(), some.end());
  for (const auto& some : before_of) before.insert(before.end(), some.begin(), some.end());
  mostly_known_ = missing.size() <= n / 32;
}

void SlotMap::count_use(SlotUse& use, uint64_t count) {
  use.last = time_;
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

void SlotMap::count_uses(const int64_t* slots, size_t n, const int64_t* counts, int threads) {
  // Random numbers are drawn in the order of the batch.
  const size_t owners = config_.policy == SlotPolicy::kLfuLru || n < kChunk ? 1 : threads;
  const auto add = [&](size_t i) {
    count_use(uses_[slots[i]], counts == nullptr ? 1 : static_cast<uint64_t>(counts[i]));
  };
  if (owners <= 1) {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n && slots[i + kAhead] >= 0) prefetch_near(&uses_[slots[i + kAhead]]);
      if (slots[i] >= 0) add(i);
    }
    return;
  }
  // A thread counts the uses of its own lines: every one reads all slots, and keeps those.
  parallel_for(threads, owners, [&](size_t owner) {
    uint32_t mine[kChunk];
    for (size_t begin = 0; begin < n; begin += kChunk) {
      const size_t end = std::min(n, begin + kChunk);
      size_t found = 0;
      for (size_t i = begin; i < end; ++i) {
        const auto line = static_cast<uint32_t>(slots[i] >> 2);
        const uint64_t lot = (uint64_t{line * 0x9e3779b1u} * owners) >> 32;
        mine[found] = static_cast<uint32_t>(i);
        found += lot == owner && slots[i] >= 0;
      }
      for (size_t j = 0; j < found; ++j) {
        if (j + kAhead < found) prefetch_near(&uses_[slots[mine[j + kAhead]]]);
        add(mine[j]);
      }
    }
  });
}

Mapped SlotMap::map(const uint64_t* ids, size_t n, const int64_t* counts, const MapOptions& options,
                    int64_t* slots) {
  const bool time_passed = options.time > time_;
  time_ = options.time;
  Mapped mapped;
  std::vector<uint32_t> missing;
  std::vector<int64_t> before;
  find_known(ids, n, counts, options, slots, missing, before);
  if (counted_later(counts, options)) count_uses(slots, n, counts, options.threads);
  SlotOrder::Request request = going(0, options.threads);
  request.spare_used_now = true;
  std::vector<uint64_t> used_bits;
  const bool may_evict = !missing.empty() && free_.size() < missing.size();
  if (!time_passed && may_evict) {  // slots that were used now may be of an earlier batch
    used_bits.resize((config_.capacity + 63) / 64);
    for (size_t i = 0; i < n; ++i)
      if (slots[i] >= 0) used_bits[slots[i] / 64] |= uint64_t{1} << slots[i] % 64;
    request.spared = used_bits.data();
  }
  if (config_.policy == SlotPolicy::kTtl && time_ > config_.ttl) {
    // A little more than what comes in, so that a backlog goes down.
    request.wanted = 2 * missing.size() + 1024;
    request.below = time_ - config_.ttl;
    release(request, mapped.evicted);
    request.below = kNoLimit;
  }
  if (!missing.empty()) insert_missing(ids, counts, missing, options.evict, request, slots, mapped);
  if (options.pin) pin(slots, n);
  for (size_t i = 0; i < before.size() && mapped.refused != 0; ++i)
    if (slots[missing[i]] < 0) slots[missing[i]] = before[i];
  return mapped;
}

SlotOrder::Request SlotMap::going(size_t count, int threads) const {
  SlotOrder::Request request;
  request.wanted = count;
  request.now = time_;
  request.pins = pins_.empty() ? nullptr : pins_.data();
  request.threads = threads;
  return request;
}

void SlotMap::release(const SlotOrder::Request& request, IdSlots& released) {
  std::vector<TakenSlot> taken;
  order_.take({uses_.data(), uses_.size()}, size(), request, taken);
  const size_t before = released.ids.size();
  released.ids.resize(before + taken.size());
  released.slots.resize(before + taken.size());
  parallel_for(request.threads, (taken.size() + kChunk - 1) / kChunk, [&](size_t task) {
    const size_t end = std::min(taken.size(), (task + 1) * kChunk);
    for (size_t i = task * kChunk; i < end; ++i) {
      if (i + 4 * kAhead < end) {
        prefetch(&uses_[taken[i + 4 * kAhead].slot]);
        prefetch(&index_.digests_[taken[i + 4 * kAhead].owner - 1]);
      }
      released.ids[before + i] = id_of(taken[i].slot);
      released.slots[before + i] = taken[i].slot;
      index_.digests_[taken[i].owner - 1] = 0;
    }
  });
  for (const TakenSlot& one : taken) free_.release(one.slot);
  index_.size_ -= taken.size();
}

IdSlots SlotMap::evict(uint64_t count, bool expired, uint64_t time, int threads) {
  time_ = time;
  IdSlots released;
  SlotOrder::Request request = going(count, threads);
  if (expired)
    request.below =
        config_.policy == SlotPolicy::kTtl && time > config_.ttl ? time - config_.ttl : 0;
  if (request.below != 0) release(request, released);
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
    index_.digests_[uses_[slot].owner - 1] = 0;
    uses_[slot] = {};
    free_.release(slot);
    --index_.size_;
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
  for (uint32_t slot = 0; slot < config_.capacity; ++slot)
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
  time_ = time;
  draws_ = draws;
  for (size_t i = 0; i < n; ++i) {
    free_.take(slots[i]);
    place_or_grow(ids[i], slots[i], {last[i], counts[i], 0, 0});
  }
}

}  // namespace dynamicemb
