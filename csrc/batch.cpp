#include "batch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "hash.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr size_t kChunk = 8192;          // ids per task while splitting
constexpr size_t kPartitionIds = 1024;   // aimed at per partition: its dedup fits the L1 cache
constexpr size_t kMaxPartitions = 1024;  // write streams while splitting

// Counts stop at their largest value: a row that is used for ever must not become the coldest.
template <class T>
T add_saturated(T a, T b) {
  T sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<T>::max() : sum;
}

}  // namespace

// The slots of one wide bucket that may be evicted, smallest (score, slot) first. Scanning a wide
// bucket once per eviction would be quadratic.
struct VictimQueue {
  std::vector<std::pair<uint64_t, uint32_t>> slots;
  size_t next = 0;
  uint32_t free_from = 0;
  bool built = false;

  void build(const Record* records, uint32_t width, uint32_t stamp, size_t wanted) {
    built = true;
    for (uint32_t slot = 0; slot < width; ++slot)
      if (records[slot].stamp != stamp) slots.emplace_back(records[slot].score, slot);
    const size_t count = std::min(wanted, slots.size());
    std::partial_sort(slots.begin(), slots.begin() + static_cast<std::ptrdiff_t>(count),
                      slots.end());
    slots.resize(count);
  }
};

Batch::Batch(std::shared_ptr<Table> table, BatchMode mode, const uint64_t* ids, size_t n,
             const int64_t* counts)
    : table_(std::move(table)), mode_(mode), ids_(ids), counts_(counts), n_(n) {
  // Everything that has one element per occurrence, in one block.
  memory_ = Scratch(3 * Scratch::bytes_for<uint64_t>(n) + Scratch::bytes_for<Span>(n) +
                    6 * Scratch::bytes_for<uint32_t>(n) + Scratch::bytes_for<uint8_t>(n) + 64);
  part_ids_ = memory_.take<uint64_t>(n);
  entry_ids_ = memory_.take<uint64_t>(n);
  if (mode != BatchMode::kLocate) entry_counts_ = memory_.take<uint64_t>(n);
  spans_ = memory_.take<Span>(n);
  part_positions_ = memory_.take<uint32_t>(n);
  entry_slots_ = memory_.take<uint32_t>(n);
  entry_first_ = memory_.take<uint32_t>(n);
  occurrences_ = memory_.take<uint32_t>(n);
  entry_at_ = memory_.take<uint32_t>(n);
  if (mode == BatchMode::kTrain) rows_ = memory_.take<uint32_t>(n);
  entry_fate_ = memory_.take<uint8_t>(n);
  side_stride_ = table_->stride_;
  side_.resize(side_stride_);
}

// ---- splitting ----

size_t Batch::chunks() const { return (n_ + kChunk - 1) / kChunk; }

uint32_t Batch::partition_of(uint64_t hash) const {
  return static_cast<uint32_t>(bucket_of(hash, table_->buckets_) >> partition_shift_);
}

void Batch::count_chunk(size_t chunk) {
  if (partitions_ == 1) return;
  uint32_t* counts = histogram_.data() + chunk * partitions_;
  const size_t end = std::min(n_, (chunk + 1) * kChunk);
  for (size_t i = chunk * kChunk; i < end; ++i) ++counts[partition_of(hash_id(ids_[i]))];
}

void Batch::plan_partitions() {
  if (histogram_.empty()) {  // called before counting: choose the partitions
    found_at_ = table_->changes_;
    const uint64_t buckets = table_->buckets_;
    const uint64_t most = table_->wide() ? 1 : kMaxPartitions;  // their map has one owner
    const uint64_t wanted = std::clamp<uint64_t>(n_ / kPartitionIds, 1, most);
    const uint64_t buckets_each = std::bit_ceil((buckets + wanted - 1) / wanted);
    partition_shift_ = std::countr_zero(buckets_each);
    partitions_ = (buckets + buckets_each - 1) / buckets_each;
    parts_.assign(partitions_, {});
    histogram_.assign(std::max<size_t>(1, chunks()) * partitions_, 0);
    return;
  }
  // After counting: offsets per (partition, chunk), in that order.
  uint32_t offset = 0;
  for (size_t p = 0; p < partitions_; ++p) {
    parts_[p].begin = offset;
    if (partitions_ == 1) {
      offset = static_cast<uint32_t>(n_);
    } else {
      for (size_t chunk = 0; chunk < chunks(); ++chunk) {
        uint32_t& cell = histogram_[chunk * partitions_ + p];
        const uint32_t count = cell;
        cell = offset;
        offset += count;
      }
    }
    parts_[p].end = offset;
  }
}

void Batch::scatter_chunk(size_t chunk) {
  const size_t end = std::min(n_, (chunk + 1) * kChunk);
  if (partitions_ == 1) {
    for (size_t i = chunk * kChunk; i < end; ++i) {
      part_ids_[i] = ids_[i];
      part_positions_[i] = static_cast<uint32_t>(i);
    }
    return;
  }
  uint32_t* offsets = histogram_.data() + chunk * partitions_;
  for (size_t i = chunk * kChunk; i < end; ++i) {
    const uint32_t to = offsets[partition_of(hash_id(ids_[i]))]++;
    part_ids_[to] = ids_[i];
    part_positions_[to] = static_cast<uint32_t>(i);
  }
}

// ---- dedup and find ----

void Batch::find(size_t partition) {
  Partition& p = parts_[partition];
  const uint32_t count = p.end - p.begin;
  const uint64_t* ids = part_ids_ + p.begin;
  const uint32_t* positions = part_positions_ + p.begin;

  thread_local std::vector<uint32_t> table, entry_of;
  const size_t table_size = std::bit_ceil<size_t>(2 * std::max(count, 8u));
  table.assign(table_size, 0);
  entry_of.resize(count);
  uint32_t unique = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t id = ids[i];
    size_t at = hash_id(id) & (table_size - 1);
    uint32_t entry;
    while ((entry = table[at]) != 0 && entry_ids_[p.begin + entry - 1] != id)
      at = (at + 1) & (table_size - 1);
    if (entry == 0) {
      entry = table[at] = unique + 1;
      entry_ids_[p.begin + unique] = id;
      entry_first_[p.begin + unique] = positions[i];
      ++unique;
    }
    entry_of[i] = entry - 1;
  }
  p.unique = unique;

  // Occurrences grouped by entry, each group in order.
  Span* spans = spans_ + p.begin;
  if (unique == count) {
    for (uint32_t i = 0; i < count; ++i) {
      spans[i] = {p.begin + i, p.begin + i + 1};
      entry_at_[positions[i]] = p.begin + i;
    }
    std::memcpy(occurrences_ + p.begin, positions, count * sizeof(uint32_t));
  } else {
    std::fill_n(spans, unique, Span{0, 0});
    for (uint32_t i = 0; i < count; ++i) ++spans[entry_of[i]].end;
    uint32_t offset = p.begin;
    for (uint32_t entry = 0; entry < unique; ++entry) {
      const uint32_t length = spans[entry].end;
      spans[entry] = {offset, offset};
      offset += length;
    }
    for (uint32_t i = 0; i < count; ++i) {
      Span& span = spans[entry_of[i]];
      entry_at_[positions[i]] = span.end == span.begin ? p.begin + entry_of[i] : kNoSlot;
      occurrences_[span.end++] = positions[i];
    }
  }
  if (entry_counts_ != nullptr) {
    for (uint32_t entry = p.begin; entry < p.begin + unique; ++entry) {
      const auto [begin, end] = spans_[entry];
      uint64_t total = end - begin;
      if (counts_ != nullptr) {
        total = 0;
        for (uint32_t i = begin; i < end; ++i)
          total = add_saturated(total, static_cast<uint64_t>(counts_[occurrences_[i]]));
      }
      entry_counts_[entry] = total;
    }
  }
  std::fill_n(entry_fate_ + p.begin, unique, uint8_t{kThere});
  locate(partition);
}

void Batch::locate(size_t partition) {
  Partition& p = parts_[partition];
  table_->find(entry_ids_ + p.begin, p.unique, 1, entry_slots_ + p.begin);
  p.missing = 0;
  for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
    p.missing += entry_slots_[entry] == kNoSlot;
}

// ---- admission and growth ----

bool Batch::needs_decision() const {
  if (mode_ == BatchMode::kLocate || mode_ == BatchMode::kAssign) return false;
  const Table& t = *table_;
  if (t.buckets_ >= t.config_.max_buckets || t.config_.max_load_factor <= 0) return false;
  return static_cast<double>(t.size_ + n_) >
         t.config_.max_load_factor * static_cast<double>(t.capacity());
}

size_t Batch::collect_missing() {
  missing_.clear();
  for (const Partition& p : parts_)
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
      if (entry_slots_[entry] == kNoSlot) missing_.push_back(entry);
  std::sort(missing_.begin(), missing_.end(),
            [&](uint32_t a, uint32_t b) { return entry_first_[a] < entry_first_[b]; });
  return missing_.size();
}

void Batch::missing(uint64_t* ids, int64_t* counts) const {
  for (size_t i = 0; i < missing_.size(); ++i) {
    ids[i] = entry_ids_[missing_[i]];
    counts[i] = static_cast<int64_t>(
        std::min<uint64_t>(entry_counts_[missing_[i]], std::numeric_limits<int64_t>::max()));
  }
}

void Batch::initialize_row(const Initializer& initializer, uint64_t id, std::byte* to) const {
  const uint32_t dim = table_->config_.dim;
  if (table_->config_.type == DataType::kFloat32) {
    kernels().initialize(initializer, id, reinterpret_cast<float*>(to), dim);
    return;
  }
  thread_local std::vector<float> values;
  values.resize(dim);
  kernels().initialize(initializer, id, values.data(), dim);
  kernels().narrow(table_->config_.type, values.data(), to, dim);
}

void Batch::admit(const bool* mask, const Initializer& initializer, const float* rows) {
  const size_t stride = table_->stride_, dim = table_->config_.dim;
  admitted_.assign(mask, mask + missing_.size());
  const auto rejected =
      static_cast<size_t>(std::count(admitted_.begin(), admitted_.end(), uint8_t{0}));
  if (rejected == 0) return;
  side_stride_ = stride;
  side_.assign((1 + rejected) * stride, std::byte{0});
  std::byte* to = side_.data() + stride;
  for (size_t i = 0; i < missing_.size(); ++i) {
    if (admitted_[i]) continue;
    if (rows != nullptr) {
      kernels().narrow(table_->config_.type, rows, to, static_cast<uint32_t>(dim));
      rows += dim;
    } else {
      initialize_row(initializer, entry_ids_[missing_[i]], to);
    }
    to += stride;
  }
  entry_side_.resize(n_);
  uint32_t side = 1;
  for (size_t i = 0; i < missing_.size(); ++i) {
    if (admitted_[i]) continue;
    entry_fate_[missing_[i]] = kRejected;
    entry_side_[missing_[i]] = side++;
  }
}

void Batch::resplit() {
  if (rejected_.empty()) return;
  // By id: somebody else's batch may have inserted or removed some of them.
  collect_missing();
  for (const uint32_t entry : missing_) {
    const uint64_t id = entry_ids_[entry];
    const auto at = std::lower_bound(rejected_.begin(), rejected_.end(), std::pair{id, 0u});
    if (at == rejected_.end() || at->first != id) continue;
    entry_fate_[entry] = kRejected;
    entry_side_[entry] = at->second;
  }
}

void Batch::fit_side() {
  const size_t stride = table_->stride_, rows = side_.size() / side_stride_;
  if (stride == side_stride_) return;
  std::vector<std::byte> fitted(rows * stride);
  for (size_t i = 0; i < rows; ++i)
    std::memcpy(fitted.data() + i * stride, side_.data() + i * side_stride_,
                table_->embedding_bytes_);
  side_ = std::move(fitted);
  side_stride_ = stride;
}

void Batch::protect(Batch& other) {
  if (other.stale())
    for (size_t p = 0; p < other.partitions_; ++p) other.locate(p);
  if (stamp_ == 0) stamp_ = table_->begin_batch();
  for (const Partition& p : other.parts_)
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
      if (const uint32_t slot = other.entry_slots_[entry]; slot != kNoSlot)
        table_->records_[slot].stamp = stamp_;
}

bool Batch::prepare_commit() {
  uint64_t incoming = 0;
  if (mode_ == BatchMode::kTrain || mode_ == BatchMode::kInsert) {
    for (const Partition& p : parts_) incoming += p.missing;
    incoming -= static_cast<uint64_t>(std::count(admitted_.begin(), admitted_.end(), uint8_t{0}));
  }
  bool again = incoming != 0 && table_->grow_for(incoming);
  again = again || found_at_ != table_->changes_;  // somebody else's batch came between
  if (again) {
    histogram_.clear();
    rejected_.clear();
    if (!entry_side_.empty())
      for (const uint32_t entry : missing_)
        if (entry_fate_[entry] == kRejected)
          rejected_.emplace_back(entry_ids_[entry], entry_side_[entry]);
    std::sort(rejected_.begin(), rejected_.end());
  }
  if (stamp_ == 0) stamp_ = table_->begin_batch();
  return again;
}

// ---- commit ----

void Batch::update_hit(uint32_t entry, uint32_t slot, const BatchScore& score) {
  Record& record = table_->records_[slot];
  record.stamp = stamp_;
  if (mode_ != BatchMode::kAssign) {
    switch (table_->config_.strategy) {
      case ScoreStrategy::kTimestamp:
      case ScoreStrategy::kStep:
      case ScoreStrategy::kCustomized:
        record.score = score.value;
        break;
      case ScoreStrategy::kLfu:
        record.score = add_saturated(record.score, entry_counts_[entry]);
        break;
      case ScoreStrategy::kNoEviction:
        break;
      case ScoreStrategy::kTimestampLfu:
        record.score = add_saturated(record.score, entry_counts_[entry]);
        table_->timestamps_[slot] = score.timestamp;
        break;
    }
  }
  if (mode_ != BatchMode::kTrain) write_given(entry, slot, false);
}

void Batch::write_given(uint32_t entry, uint32_t slot, bool fresh) {
  Table& t = *table_;
  Record& record = t.records_[slot];
  std::byte* row = t.row(slot);
  const size_t last = occurrences_[spans_[entry].end - 1];
  if (given_.embeddings != nullptr)
    std::memcpy(row, given_.embeddings + last * t.embedding_bytes_, t.embedding_bytes_);
  else if (fresh)
    initialize_row(t.config_.initializer, entry_ids_[entry], row);
  if (given_.state != nullptr) {
    const float* state = given_.state + last * t.state_.dim();
    std::memcpy(t.row_state(row), state, t.state_.columns * sizeof(float));
    if (t.state_.scalar) record.scalar = state[t.state_.columns];
  } else if (fresh) {
    t.initialize_state(row, record);
  }
  if (given_.scores != nullptr) {
    const uint32_t words = t.score_words();
    if (words == 2) t.timestamps_[slot] = given_.scores[2 * last];
    record.score = given_.scores[words * last + words - 1];
  }
}

void Batch::hand_back(Partition& p, uint32_t entry, uint32_t slot) {
  const Table& t = *table_;
  const std::byte* row = t.row(slot);
  const float* state = t.row_state(const_cast<std::byte*>(row));
  p.evicted_by.push_back(entry);
  p.evicted.ids.push_back(t.keys_[slot]);
  p.evicted.embeddings.insert(p.evicted.embeddings.end(), row, row + t.embedding_bytes_);
  p.evicted.state.insert(p.evicted.state.end(), state, state + t.state_.columns);
  if (t.state_.scalar) p.evicted.state.push_back(t.records_[slot].scalar);
  if (t.score_words() == 2) p.evicted.scores.push_back(t.timestamps_[slot]);
  p.evicted.scores.push_back(t.records_[slot].score);
}

void Batch::insert(Partition& p, uint32_t entry, const BatchScore& score, VictimQueue* queue) {
  Table& t = *table_;
  const uint32_t width = t.config_.width;
  const uint64_t id = entry_ids_[entry], hash = hash_id(id);
  const auto base = static_cast<uint32_t>(bucket_of(hash, t.buckets_) * width);
  const uint8_t* digests = t.digests_.data() + base;
  uint32_t position;
  if (queue != nullptr) {
    const uint32_t start = queue->free_from / 16 * 16;
    position = start + kernels().free_position(digests + start, width - start);
    queue->free_from = position;
  } else {
    position = kernels().free_position(digests, width);
  }
  if (position == width) {
    if (t.config_.strategy == ScoreStrategy::kNoEviction) {
      position = kNoSlot;
    } else if (queue != nullptr) {
      if (!queue->built) queue->build(t.records_.data() + base, width, stamp_, p.missing);
      position = queue->next < queue->slots.size() ? queue->slots[queue->next++].second : kNoSlot;
    } else {
      position = kernels().victim(t.records_.data() + base, width, stamp_);
    }
    if (position == kNoSlot) {
      entry_fate_[entry] = kFailed;
      ++p.counters.failures;
      return;
    }
    const uint32_t slot = base + position;
    if (keep_evicted_) hand_back(p, entry, slot);
    if (t.wide()) t.unlink_wide(slot);
    ++p.counters.evictions;
  }
  const uint32_t slot = base + position;
  p.highest_position = std::max(p.highest_position, position + 1);
  ++p.counters.inserts;
  t.digests_[slot] = digest_of(hash);
  t.keys_[slot] = id;
  if (t.wide()) t.link_wide(slot);
  entry_slots_[entry] = slot;
  Record& record = t.records_[slot];
  record.stamp = stamp_;
  const uint64_t count = entry_counts_[entry];
  switch (t.config_.strategy) {
    case ScoreStrategy::kLfu:
      record.score = count;
      break;
    case ScoreStrategy::kTimestampLfu:
      record.score = count;
      t.timestamps_[slot] = score.timestamp;
      break;
    case ScoreStrategy::kNoEviction:
      p.inserted.push_back(entry);
      break;
    default:
      record.score = score.value;
  }
  std::byte* row = t.row(slot);
  if (mode_ == BatchMode::kTrain) {
    initialize_row(t.config_.initializer, id, row);
    t.initialize_state(row, record);
  } else {
    write_given(entry, slot, true);
  }
}

void Batch::publish(const Partition& p) {
  const Table& t = *table_;
  for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry) {
    uint32_t row;
    if (entry_fate_[entry] == kThere && entry_slots_[entry] != kNoSlot) {
      row = static_cast<uint32_t>(t.row_of(entry_slots_[entry]));
    } else {
      row = kSideRow | (entry_fate_[entry] == kRejected ? entry_side_[entry] : 0);
    }
    const auto [begin, end] = spans_[entry];
    for (uint32_t i = begin; i < end; ++i) rows_[occurrences_[i]] = row;
  }
}

void Batch::commit(size_t partition, const BatchScore& score) {
  Partition& p = parts_[partition];
  const uint32_t end = p.begin + p.unique;
  constexpr uint32_t kDistance = 16;
  if (mode_ != BatchMode::kLocate) {
    for (uint32_t entry = p.begin; entry < end; ++entry) {
      if (entry + kDistance < end && entry_slots_[entry + kDistance] != kNoSlot)
        prefetch(&table_->records_[entry_slots_[entry + kDistance]]);
      const uint32_t slot = entry_slots_[entry];
      if (slot != kNoSlot && entry_fate_[entry] == kThere) update_hit(entry, slot, score);
    }
    p.counters.hits = p.unique - p.missing;
    p.counters.misses = p.missing;
  }
  if (p.missing != 0 && (mode_ == BatchMode::kTrain || mode_ == BatchMode::kInsert)) {
    std::vector<VictimQueue> queues(table_->wide() ? table_->buckets_ : 0);
    for (uint32_t entry = p.begin; entry < end; ++entry) {
      if (entry_slots_[entry] != kNoSlot) continue;
      if (entry_fate_[entry] == kRejected) {
        ++p.counters.rejections;
      } else {
        VictimQueue* queue = nullptr;
        if (table_->wide())
          queue = &queues[bucket_of(hash_id(entry_ids_[entry]), table_->buckets_)];
        insert(p, entry, score, queue);
      }
    }
  }
  if (mode_ == BatchMode::kTrain) publish(p);
}

void Batch::finish() {
  Table& t = *table_;
  uint32_t highest = 0;
  std::vector<std::pair<uint32_t, size_t>> evicting;  // (first occurrence, partition)
  std::vector<uint32_t> numbered;
  for (size_t i = 0; i < partitions_; ++i) {
    Partition& p = parts_[i];
    highest = std::max(highest, p.highest_position);
    counters_.add(p.counters);
    for (uint32_t entry : p.evicted_by) evicting.emplace_back(entry_first_[entry], i);
    numbered.insert(numbered.end(), p.inserted.begin(), p.inserted.end());
  }
  if (highest != 0) t.touch_position(highest - 1);
  if (mode_ != BatchMode::kTrain) counters_.hits = counters_.misses = 0;
  t.size_ += counters_.inserts - counters_.evictions;
  t.counters_.add(counters_);
  if (counters_.evictions != 0) ++t.version_;
  version_ = t.version_;
  ++t.changes_;

  if (t.config_.strategy == ScoreStrategy::kNoEviction) number_rows(numbered);

  if (evicting.empty()) return;
  // A partition's evictions are in the order of its entries; merge them to the order of the batch.
  std::vector<size_t> next(partitions_, 0);
  std::sort(evicting.begin(), evicting.end());
  const size_t row_bytes = t.embedding_bytes_, state = t.state_.dim(), words = t.score_words();
  for (const auto& [first, part] : evicting) {
    Evicted& from = parts_[part].evicted;
    const size_t i = next[part]++;
    const auto copy = [i](auto& to, const auto& source, size_t width) {
      const auto begin = source.begin() + static_cast<std::ptrdiff_t>(i * width);
      to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
    };
    copy(evicted_.ids, from.ids, 1);
    copy(evicted_.embeddings, from.embeddings, row_bytes);
    copy(evicted_.state, from.state, state);
    copy(evicted_.scores, from.scores, words);
  }
}

void Batch::number_rows(std::vector<uint32_t>& inserted) {
  Table& t = *table_;
  if (given_.scores == nullptr) {
    std::sort(inserted.begin(), inserted.end(),
              [&](uint32_t a, uint32_t b) { return entry_first_[a] < entry_first_[b]; });
    for (uint32_t entry : inserted) t.records_[entry_slots_[entry]].score = t.next_row_number_++;
    return;
  }
  // Given numbers: go on after the largest.
  for (const Partition& p : parts_)
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
      if (entry_slots_[entry] != kNoSlot)
        t.next_row_number_ = std::max(
            t.next_row_number_, add_saturated(t.records_[entry_slots_[entry]].score, uint64_t{1}));
}

void Batch::slots(int64_t* out) const {
  for (const Partition& p : parts_)
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry) {
      const bool there = entry_fate_[entry] == kThere && entry_slots_[entry] != kNoSlot;
      const int64_t slot = there                             ? int64_t{entry_slots_[entry]}
                           : entry_fate_[entry] == kRejected ? -2
                                                             : -1;
      for (uint32_t i = spans_[entry].begin; i < spans_[entry].end; ++i)
        out[occurrences_[i]] = slot;
    }
}

void Batch::written(bool* out) const {
  for (const Partition& p : parts_)
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
      for (uint32_t i = spans_[entry].begin; i < spans_[entry].end; ++i)
        out[occurrences_[i]] = entry_slots_[entry] != kNoSlot;
}

// ---- several batches ----

namespace {

// parallel_for over `count(batch)` tasks of every batch.
template <class Count, class Body>
void over(std::span<Batch* const> batches, int threads, Count&& count, Body&& body) {
  std::vector<size_t> ends(batches.size());
  size_t total = 0;
  for (size_t i = 0; i < batches.size(); ++i) ends[i] = total += count(*batches[i]);
  parallel_for(threads, total, [&](size_t task) {
    const auto batch =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    body(batch, task - (batch == 0 ? 0 : ends[batch - 1]));
  });
}

void split(std::span<Batch* const> batches, int threads) {
  for (Batch* batch : batches) batch->plan_partitions();
  over(
      batches, threads, [](Batch& b) { return b.chunks(); },
      [&](size_t b, size_t chunk) { batches[b]->count_chunk(chunk); });
  for (Batch* batch : batches) batch->plan_partitions();
  over(
      batches, threads, [](Batch& b) { return b.chunks(); },
      [&](size_t b, size_t chunk) { batches[b]->scatter_chunk(chunk); });
}

size_t partition_count(Batch& batch) { return batch.partitions(); }

}  // namespace

void find_all(std::span<Batch* const> batches, int threads) {
  split(batches, threads);
  over(batches, threads, partition_count, [&](size_t b, size_t p) { batches[b]->find(p); });
}

void commit_all(std::span<Batch* const> batches, std::span<const BatchScore> scores, int threads) {
  std::vector<Batch*> again;
  for (Batch* batch : batches)
    if (batch->prepare_commit()) again.push_back(batch);
  if (!again.empty()) {  // buckets changed, and with them the partitions
    find_all(again, threads);
    for (Batch* batch : again) batch->resplit();
  }
  over(batches, threads, partition_count,
       [&](size_t b, size_t p) { batches[b]->commit(p, scores[b]); });
  for (Batch* batch : batches) batch->finish();
}

void run_all(std::span<Batch* const> batches, std::span<const BatchScore> scores, int threads) {
  const bool decide = std::any_of(batches.begin(), batches.end(),
                                  [](Batch* batch) { return batch->needs_decision(); });
  if (decide) {
    find_all(batches, threads);
    commit_all(batches, scores, threads);
    return;
  }
  split(batches, threads);
  for (Batch* batch : batches) batch->prepare_commit();
  over(batches, threads, partition_count, [&](size_t b, size_t p) {
    batches[b]->find(p);
    batches[b]->commit(p, scores[b]);
  });
  for (Batch* batch : batches) batch->finish();
}

}  // namespace dynamicemb
