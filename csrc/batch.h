// One batch of ids against one table: dedup, find, admit, insert or evict.
//
// The batch is split into partitions by bucket range. A partition owns its buckets, so partitions
// run on any threads in any order without locks and give the serial result; inside one, ids keep
// the order of their first occurrence.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "table.h"

namespace dynamicemb {

enum class BatchMode : uint8_t {
  kTrain,   // find or insert, new rows initialised
  kInsert,  // insert or overwrite with given rows
  kAssign,  // overwrite the rows that exist
  kLocate,  // find only: for gradients that were summed elsewhere
};

// The score this batch writes. `value` is the strategy's word, `timestamp` the other word of
// kTimestampLfu; counts are added by the strategies that count.
struct BatchScore {
  uint64_t value = 0;
  uint64_t timestamp = 0;
};

// Given rows, one per occurrence (the last occurrence of an id counts). Null: keep what is there,
// or the initial value of a new row.
struct RowSourceGiven {
  const std::byte* embeddings = nullptr;
  const float* state = nullptr;
  const uint64_t* scores = nullptr;
};

struct Evicted {
  std::vector<uint64_t> ids;
  std::vector<std::byte> embeddings;
  std::vector<float> state;
  std::vector<uint64_t> scores;

  void reserve(size_t rows, size_t row_bytes, size_t state_columns, size_t score_words);
};

// Counts stop at their largest value: a row that is used for ever must not become the coldest.
template <class T>
T add_saturated(T a, T b) {
  T sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<T>::max() : sum;
}

class Batch {
 public:
  Batch(std::shared_ptr<Table> table, BatchMode mode, const uint64_t* ids, size_t n,
        const int64_t* counts);

  Table& table() const { return *table_; }
  size_t size() const { return n_; }
  void give(const RowSourceGiven& given) { given_ = given; }
  void keep_evicted() { keep_evicted_ = true; }

  // Steps in order. Those with an index may run in parallel over it; the others are serial.
  void plan_split();
  size_t chunks() const;
  void split_chunk(size_t chunk);
  void finish_split();
  size_t partitions() const { return partitions_; }
  void find(size_t partition);    // dedup, then find
  bool needs_decision() const;    // growth, or taking memory, comes between find and commit
  bool prepare_commit();          // grows; true: split and find must run again
  void resplit();                 // after that: carries the admission over
  void locate(size_t partition);  // find again after the table changed
  void reserve();                 // the memory that commit and finish fill, where rows leave
  void commit(size_t partition, const BatchScore& score);
  void settle() noexcept;  // counts what was committed, also where a partition ran out of memory
  void finish();

  // Between find and commit: the distinct missing ids in order of first occurrence.
  size_t collect_missing();
  void missing(uint64_t* ids, int64_t* counts) const;
  // One flag per missing id. Rejected rows read as `rows` (fp32, one per rejected id) if given,
  // else as `initializer` makes them.
  void admit(const bool* mask, const Initializer& initializer, const float* rows);
  // The rows of another batch are not evicted by this one.
  void protect(Batch& other);

  // After finish.
  uint64_t failures() const { return counters_.failures; }
  uint64_t rejections() const { return counters_.rejections; }
  const Evicted& evicted() const { return evicted_; }
  // The rows change now: makes them count as changed after the table's last mark.
  void touch_if_marked();
  void slots(int64_t* out) const;  // per occurrence; -1 failed, -2 rejected
  void written(bool* out) const;   // per occurrence
  bool stale() const { return version_ != table_->version_; }

 private:
  friend class Group;
  friend class RowUpdates;

  // The id at a position of the batch. Written together: positions of a partition are anywhere, and
  // two threads may write to one line.
  struct Place {
    uint32_t slot;   // or kSideRow + the side row
    uint32_t entry;  // that occurs first here; kAlone: and nowhere else; kNoSlot: not first
  };
  static constexpr uint32_t kAlone = kNoSlot - 1;

  enum Fate : uint8_t { kThere, kFailed, kRejected };
  struct Span {
    uint32_t begin, end;
  };
  // What threads write at the same time lies in different pairs of lines: processors fetch two.
  static constexpr size_t kLines = 128;
  struct alignas(kLines) Pieces {
    uint32_t of_partition[kLines / sizeof(uint32_t)] = {};
  };
  struct alignas(kLines) Partition {
    uint32_t begin = 0, end = 0;  // occurrences
    uint32_t unique = 0;          // entries used from `begin` on
    uint32_t missing = 0;
    uint32_t highest_position = 0;
    Counters counters;
    std::vector<uint32_t> evicted_by;  // unique entries, in order
    Evicted evicted;
    std::vector<uint64_t> removed;   // ids, where removals are logged
    std::vector<uint32_t> inserted;  // unique entries, for numbered rows
  };

  // Where the part of a chunk that belongs to each partition begins; the next one is its end.
  uint32_t* pieces_of(size_t chunk) { return pieces_[chunk * chunk_lines_].of_partition; }
  uint32_t first_of(uint32_t entry) const { return occurrences_[spans_[entry].begin]; }
  uint64_t count_of(uint32_t entry) const {
    return counts_ != nullptr ? entry_counts_[entry] : spans_[entry].end - spans_[entry].begin;
  }
  void update_hit(uint32_t entry, uint32_t slot, const BatchScore& score);
  void write_given(uint32_t entry, uint32_t slot, bool fresh);
  // The given rows to their slots; missed[i]: the i-th entry of the partition is new.
  void write_rows(const Partition& p, const std::vector<bool>& missed);
  void insert(Partition& p, uint32_t entry, const BatchScore& score, struct VictimQueue* queue);
  void hand_back(Partition& p, uint32_t entry, uint32_t slot);
  void initialize_row(const Initializer& initializer, uint64_t id, std::byte* to) const;
  // Row numbers, for Table::source, of `count` positions from `first` on.
  void rows_at(size_t first, size_t count, uint32_t* rows) const;
  void publish(const Partition& p);
  void number_rows();
  bool hands_over() const;     // evicted rows, removed ids or new entries
  uint64_t rows_gone() const;  // ids whose row was removed after they were found
  void fit_side();             // after the table's rows changed their stride

  std::shared_ptr<Table> table_;
  BatchMode mode_;
  const uint64_t* ids_;
  const int64_t* counts_;
  size_t n_;
  RowSourceGiven given_;
  bool keep_evicted_ = false;
  uint32_t stamp_ = 0;
  uint64_t version_ = 0;
  uint64_t found_at_ = 0;  // the table's change count when the ids were looked up

  size_t partitions_ = 1;
  int partition_shift_ = 0;     // log2 of the buckets per partition
  size_t chunk_ = 1;            // ids of a chunk
  size_t chunk_lines_ = 1;      // elements of pieces_ per chunk
  std::vector<Pieces> pieces_;  // of a chunk, then of the next
  Scratch memory_;              // of the arrays below
  std::vector<Partition> parts_;
  // The ids of each chunk and their positions, by partition.
  uint64_t* split_ids_ = nullptr;
  uint32_t* split_positions_ = nullptr;
  // Distinct ids, at [begin, begin + unique) of their partition.
  uint64_t* entry_ids_ = nullptr;
  uint32_t* entry_slots_ = nullptr;
  uint64_t* entry_counts_ = nullptr;  // the sums of given counts
  Span* spans_ = nullptr;             // an entry's part of occurrences_
  uint32_t* occurrences_ = nullptr;   // positions, grouped by entry, each group in order
  uint8_t* entry_fate_ = nullptr;
  Place* places_ = nullptr;        // by position; only where rows are read or updated
  std::vector<uint32_t> missing_;  // entries, in order of first occurrence
  std::vector<uint8_t> admitted_;  // flags of the missing entries
  std::vector<std::byte> side_;    // row 0: zeros; then rejected rows
  size_t side_stride_ = 0;
  std::vector<uint32_t> entry_side_;                     // side row of a rejected entry
  std::vector<std::pair<uint64_t, uint32_t>> rejected_;  // (id, side row), while splitting again
  Counters counters_;
  struct Eviction {
    uint32_t first;  // position that the new id first occurs at
    uint32_t partition, index;
    auto operator<=>(const Eviction&) const = default;
  };
  std::vector<Eviction> evictions_;
  std::vector<uint32_t> inserted_;  // of all partitions, for numbered rows
  Evicted evicted_;
};

// Runs the steps over several batches at once, each step in one parallel section.
void find_all(std::span<Batch* const> batches, int threads);
void commit_all(std::span<Batch* const> batches, std::span<const BatchScore> scores, int threads);
// find_all and commit_all; without a barrier between them for batches that need no decision.
void run_all(std::span<Batch* const> batches, std::span<const BatchScore> scores, int threads);

}  // namespace dynamicemb
