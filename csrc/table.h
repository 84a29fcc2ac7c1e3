// A scored hash table with trainable rows.
//
// Invariants: an id never leaves its bucket; a slot is occupied if and only if its digest is not
// 0; slot = bucket * width + position; the row of a slot lies at position * buckets + bucket, so
// that positions that no bucket has reached cost no memory; every operation gives the same
// result for any number of threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <span>
#include <vector>

#include "changes.h"
#include "kernels.h"
#include "memory.h"

namespace dynamicemb {

enum class ScoreStrategy : uint8_t {
  kTimestamp = 0,
  kStep = 1,
  kCustomized = 2,
  kLfu = 3,
  kNoEviction = 4,
  kTimestampLfu = 5,  // two words: eviction by the count
};

struct TableConfig {
  uint32_t dim = 0;
  DataType type = DataType::kFloat32;
  uint64_t init_buckets = 1;
  uint64_t max_buckets = 1;
  uint32_t width = 128;
  double max_load_factor = 0.5;
  ScoreStrategy strategy = ScoreStrategy::kTimestamp;
  Initializer initializer;
  float missing_value = 0;
};

// What a new row's optimizer state looks like: `columns` floats in the row, then, if `scalar`,
// one float in the slot's record. `initial` has columns + scalar values.
struct StateLayout {
  uint32_t columns = 0;
  bool scalar = false;
  std::vector<float> initial;

  uint32_t dim() const { return columns + (scalar ? 1 : 0); }
};

struct Counters {
  uint64_t hits = 0, misses = 0, inserts = 0, evictions = 0, failures = 0, rejections = 0,
           dropped_gradients = 0;

  void add(const Counters& other) {
    hits += other.hits;
    misses += other.misses;
    inserts += other.inserts;
    evictions += other.evictions;
    failures += other.failures;
    rejections += other.rejections;
    dropped_gradients += other.dropped_gradients;
  }
};

// Whole rows outside a table: `scores` holds score_words() words per row.
struct RowBuffers {
  uint64_t* ids = nullptr;
  std::byte* embeddings = nullptr;  // table data type, dim columns, packed
  float* state = nullptr;           // state dim columns, packed
  uint64_t* scores = nullptr;
};

// Which rows an export is about: those with score >= threshold (the timestamp word of two), those
// that changed after a mark, or both.
struct Wanted {
  bool by_score = true;
  uint64_t threshold = 0;
  bool by_change = false;
  uint64_t changed_since = 0;
};

// What an empty table was, to make it that again.
struct EmptyTable {
  uint64_t buckets = 0;
  uint64_t next_row_number = 0;
  Counters counters;
};

class Batch;

class Table {
 public:
  Table(const TableConfig& config, const StateLayout& state);

  const TableConfig& config() const { return config_; }
  const StateLayout& state() const { return state_; }
  uint64_t buckets() const { return buckets_; }
  uint64_t capacity() const { return buckets_ * config_.width; }
  uint64_t size() const { return size_; }
  uint32_t score_words() const { return config_.strategy == ScoreStrategy::kTimestampLfu ? 2 : 1; }
  // Memory in use: the index, and the rows up to the highest position reached in any bucket.
  uint64_t bytes() const;
  const Counters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

  // slots[i] = slot of ids[i] or kNoSlot. Changes nothing.
  void find(const uint64_t* ids, size_t n, int threads, uint32_t* slots) const;
  // Copies the rows of `slots` to `out` (pointers that are null are skipped; embeddings of kNoSlot
  // read as the missing value, its state and scores as 0).
  void read(const uint32_t* slots, size_t n, int threads, const RowBuffers& out) const;
  // removed[i] = whether ids[i] was there and went with this occurrence.
  void erase(const uint64_t* ids, size_t n, int threads, bool* removed);
  // Looks at the next `slots` slots, round after round, and evicts the rows with score < before
  // (the timestamp word of two). Returns how many.
  uint64_t expire(uint64_t before, uint64_t slots);
  void clear();
  EmptyTable when_empty() const { return {buckets_, next_row_number_, counters_}; }
  // Forgets all rows, the counts of them and the growth for them.
  void make_empty(const EmptyTable& before);
  // Fills at most `limit` rows in slot order from `cursor` on that `wanted` asks for; returns how
  // many, and moves the cursor to the next slot to look at.
  size_t export_rows(uint64_t& cursor, size_t limit, const Wanted& wanted, uint32_t* slots) const;
  // Grows once for `rows` more ids, instead of step by step as they come.
  void reserve(uint64_t rows);

  // ---- changes ----
  // A point in time for Wanted::changed_since and removals(); what changes after it has a stamp
  // above it.
  uint64_t mark_changes();
  RemovalLog& removals() { return removals_; }
  const RemovalLog& removals() const { return removals_; }

  // Another optimizer: embeddings and scores stay, state starts from its initial value.
  void set_state_layout(const StateLayout& state);
  // The state of new rows, of the present layout.
  void set_initial_state(std::vector<float> initial) { state_.initial = std::move(initial); }
  void set_initializer(const Initializer& initializer) { config_.initializer = initializer; }
  void set_next_row_number(uint64_t number) { next_row_number_ = number; }
  uint64_t next_row_number() const { return next_row_number_; }

  // Readers share, writers exclude each other.
  std::shared_mutex& mutex() const { return mutex_; }

 private:
  friend class Batch;
  friend class Group;
  friend class RowUpdates;
  friend class SlotMap;

  IndexView index() const {
    return {digests_.data(), keys_.data(), buckets_, config_.width, size_ < capacity() / 8 * 5};
  }
  size_t row_of(uint32_t slot) const {
    const uint64_t bucket = shift_ >= 0 ? slot >> shift_ : slot / config_.width;
    const uint64_t position = slot - bucket * config_.width;
    return position * buckets_ + bucket;
  }
  // Row numbers for source() of slots, which may be kNoSlot (row 0 of the side rows) or side rows.
  void rows_of(const uint32_t* slots, size_t n, uint32_t* rows) const;
  RowSource source(const std::byte* side) const {
    return {rows_.data(), side, stride_, config_.dim, config_.type};
  }
  std::byte* row(uint32_t slot) const { return rows_.data() + row_of(slot) * stride_; }
  float* row_state(std::byte* row) const { return reinterpret_cast<float*>(row + state_offset_); }
  void initialize_state(std::byte* row, Record& record) const;
  uint64_t* timestamp(uint32_t slot) const {
    return timestamps_.size() == 0 ? nullptr : &timestamps_[slot];
  }
  void touch_position(uint32_t position);
  void free_slot(uint32_t slot);
  void find_wide(const uint64_t* ids, size_t n, uint32_t* slots) const;
  // Grows so that `incoming` more ids stay under the load factor, as far as allowed.
  bool grow_for(uint64_t incoming);
  bool grow_to(uint64_t buckets);
  uint32_t begin_batch();
  bool tracks_changes() const { return marked_ != 0; }
  // Notes ids that leave the table. `mark`: 0 at the first call of an operation, then its mark.
  void log_removals(std::span<const uint64_t> ids, uint64_t& mark) noexcept;
  void layout_rows(const StateLayout& state);
  // Drops every row; the table has so many buckets then.
  void drop_rows(uint64_t buckets);
  void link_wide(uint32_t slot);
  void unlink_wide(uint32_t slot);
  bool wide() const { return wide_map_.size() != 0; }

  TableConfig config_;
  StateLayout state_;
  int shift_ = -1;  // log2 of the width, where it is a power of two
  uint64_t buckets_ = 0;
  uint64_t size_ = 0;
  size_t embedding_bytes_ = 0, state_offset_ = 0, stride_ = 0;

  Array<uint8_t> digests_;
  Array<uint64_t> keys_;
  Array<Record> records_;
  Array<uint64_t> timestamps_;  // only for kTimestampLfu
  Array<uint32_t> wide_map_;    // id -> slot + 1 for buckets too wide to scan
  Mapping rows_;
  std::atomic<uint32_t> positions_used_{0};

  uint64_t expired_up_to_ = 0;  // the slot that expire() looks at next
  uint32_t stamp_ = 0;
  uint32_t lap_ = 0;     // how often stamps started again
  uint64_t marked_ = 0;  // the last mark; 0: none yet
  RemovalLog removals_;
  uint64_t version_ = 0;  // changes whenever a slot loses its id
  uint64_t changes_ = 0;  // changes with every batch, erase, clear and growth
  uint64_t next_row_number_ = 0;
  Counters counters_;
  mutable std::shared_mutex mutex_;
};

}  // namespace dynamicemb
