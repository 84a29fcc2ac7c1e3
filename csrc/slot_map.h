// Ids to slots 0 .. capacity - 1: every id its own until all slots are taken, then the ids that the
// policy names make room. The index is a Table of the engine without rows.
//
// Invariants: of the free slots, the lowest is given out first, to ids in the order of the batch;
// an id keeps its slot until it is evicted or erased; the number of threads changes nothing.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <vector>

#include "free_slots.h"
#include "slot_order.h"
#include "table.h"

namespace dynamicemb {

struct SlotMapConfig {
  uint64_t capacity = 0;  // at most 2^31
  SlotPolicy policy = SlotPolicy::kLru;
  double decay_exponent = 1;     // kDistanceLfu
  uint32_t first_logarithm = 5;  // kLfuLru: of a new id
  uint64_t ttl = 0;              // kTtl: an id may go when its last use is more than this ago
};

struct IdSlots {
  std::vector<uint64_t> ids;
  std::vector<uint32_t> slots;

  void add(uint64_t id, uint32_t slot) {
    ids.push_back(id);
    slots.push_back(slot);
  }
};

struct MapOptions {
  uint64_t time = 0;  // not before that of an earlier batch
  bool evict = true;  // else ids that find no free slot are refused
  bool pin = false;   // pins the slot of every occurrence once
  int threads = 1;
  bool keep = false;  // slots[i] of an id that is refused stays as it was, instead of -1
};

struct Mapped {
  IdSlots inserted;      // in the order of the batch
  IdSlots evicted;       // the first to go first
  uint64_t refused = 0;  // distinct ids without a slot
};

class SlotMap {
 public:
  explicit SlotMap(const SlotMapConfig& config);

  const SlotMapConfig& config() const { return config_; }
  uint64_t size() const { return config_.capacity - free_.size(); }
  uint64_t bytes() const;
  uint64_t time() const { return time_; }
  uint64_t draws() const { return draws_; }

  // slots[i] of ids[i] + offset, or `missing`. Changes nothing.
  void find(const uint64_t* ids, size_t n, int threads, int64_t* slots, int64_t missing = -1,
            int64_t offset = 0) const;
  // Finds or inserts; counts (null: 1 each) are added to the uses. An id that is refused has -1.
  // `slots` must not overlap `ids`.
  // Slots of ids of this batch are not evicted by it.
  Mapped map(const uint64_t* ids, size_t n, const int64_t* counts, const MapOptions& options,
             int64_t* slots);
  // Evicts the first `count` ids in the order of the policy, less the pinned ones; `expired`: only
  // those whose time is over (kTtl).
  IdSlots evict(uint64_t count, bool expired, uint64_t time, int threads);
  IdSlots erase(const uint64_t* ids, size_t n, int threads);
  // Each call for a slot counts; slots below 0 are skipped.
  void pin(const int64_t* slots, size_t n);
  void unpin(const int64_t* slots, size_t n);

  // Ids in the order of their slots that were used after `time` (or ever, with `all`).
  IdSlots used_since(uint64_t time, bool all) const;
  // How the slots were used: time of the last use and count.
  void uses(const uint32_t* slots, size_t n, uint64_t* last, uint32_t* counts) const;
  // Starts again with these ids. Slots and ids must be distinct.
  void restore(const uint64_t* ids, const uint32_t* slots, const uint64_t* last,
               const uint32_t* counts, size_t n, uint64_t time, uint64_t draws);

  std::shared_mutex& mutex() const { return mutex_; }

 private:
  // One line of digests. At this load one insertion in 10^9 meets a full bucket.
  static constexpr uint32_t kWidth = 64;
  static constexpr double kLoad = 0.44;
  static TableConfig index_config(uint64_t capacity);

  uint64_t id_of(uint32_t slot) const { return uses_[slot].id; }
  bool is_free(uint32_t slot) const { return uses_[slot].owner == 0; }
  bool counts_uses() const {
    return config_.policy != SlotPolicy::kLru && config_.policy != SlotPolicy::kTtl;
  }
  // Whether uses are counted after the ids were found: threads would have to share them, or there
  // is more than one to count.
  bool counted_later(const int64_t* counts, const MapOptions& options) const {
    return counts_uses() && (options.threads > 1 || counts != nullptr);
  }
  // What slots held at `missing` goes to `before`, if they are to keep it.
  void find_known(const uint64_t* ids, size_t n, const int64_t* counts, const MapOptions& options,
                  int64_t* slots, std::vector<uint32_t>& missing, std::vector<int64_t>& before);
  void count_use(SlotUse& use, uint64_t count);
  void count_uses(const int64_t* slots, size_t n, const int64_t* counts, int threads);
  // Gives the id a position in its bucket; false: the bucket is full.
  bool place(uint64_t id, uint32_t slot);
  void place_or_grow(uint64_t id, uint32_t slot, const SlotUse& use);
  void grow_index();

  class Newcomers;
  void insert_missing(const uint64_t* ids, const int64_t* counts,
                      const std::vector<uint32_t>& missing, bool evict, SlotOrder::Request request,
                      int64_t* slots, Mapped& mapped);
  // Frees the first slots in order.
  void release(const SlotOrder::Request& request, IdSlots& released);
  SlotOrder::Request going(size_t count, int threads) const;

  SlotMapConfig config_;
  Table index_;
  Array<uint32_t> slot_of_;     // by position in the index
  Array<SlotUse> uses_;         // by slot
  std::vector<uint32_t> pins_;  // by slot, once something is pinned
  FreeSlots free_;
  SlotOrder order_;
  uint64_t time_ = 0;
  uint64_t draws_ = 0;         // kLfuLru: random numbers used so far
  bool mostly_known_ = false;  // the ids of the last batch: a hint, for speed only
  mutable std::shared_mutex mutex_;
};

}  // namespace dynamicemb
