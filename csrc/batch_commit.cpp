// The second half of a batch: scores, insertions, evictions.
#include <algorithm>
#include <cstring>

#include "batch.h"
#include "hash.h"

namespace dynamicemb {

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
        record.score = add_saturated(record.score, count_of(entry));
        break;
      case ScoreStrategy::kNoEviction:
        break;
      case ScoreStrategy::kTimestampLfu:
        record.score = add_saturated(record.score, count_of(entry));
        table_->timestamps_[slot] = score.timestamp;
        break;
    }
  }
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
    if (t.removals_.on()) p.removed.push_back(t.keys_[slot]);
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
  switch (t.config_.strategy) {
    case ScoreStrategy::kLfu:
      record.score = count_of(entry);
      break;
    case ScoreStrategy::kTimestampLfu:
      record.score = count_of(entry);
      t.timestamps_[slot] = score.timestamp;
      break;
    case ScoreStrategy::kNoEviction:
      p.inserted.push_back(entry);
      break;
    default:
      record.score = score.value;
  }
  if (mode_ != BatchMode::kTrain) return;  // write_rows follows
  std::byte* row = t.row(slot);
  initialize_row(t.config_.initializer, id, row);
  t.initialize_state(row, record);
}

void Batch::write_rows(const Partition& p, const std::vector<bool>& missed) {
  const Table& t = *table_;
  const size_t state_bytes = t.state_.columns * sizeof(float);
  constexpr uint32_t kDistance = 8;
  const uint32_t end = p.begin + p.unique;
  for (uint32_t entry = p.begin; entry < end; ++entry) {
    if (const uint32_t ahead = entry + kDistance; ahead < end && entry_slots_[ahead] != kNoSlot) {
      const size_t last = occurrences_[spans_[ahead].end - 1];
      if (given_.embeddings != nullptr)
        prefetch_bytes(given_.embeddings + last * t.embedding_bytes_, t.embedding_bytes_);
      if (given_.state != nullptr)
        prefetch_bytes(given_.state + last * t.state_.dim(), state_bytes);
      prefetch_bytes(t.row(entry_slots_[ahead]), t.stride_);
    }
    const uint32_t slot = entry_slots_[entry];
    if (slot != kNoSlot) write_given(entry, slot, missed[entry - p.begin]);
  }
}

void Batch::publish(const Partition& p) {
  for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry) {
    uint32_t slot = entry_slots_[entry];
    if (entry_fate_[entry] != kThere || slot == kNoSlot)
      slot = kSideRow | (entry_fate_[entry] == kRejected ? entry_side_[entry] : 0);
    const auto [begin, end] = spans_[entry];
    places_[occurrences_[begin]] = {slot, end - begin == 1 ? kAlone : entry};
    for (uint32_t i = begin + 1; i < end; ++i) places_[occurrences_[i]] = {slot, kNoSlot};
  }
}

void Batch::rows_at(size_t first, size_t count, uint32_t* rows) const {
  for (size_t i = 0; i < count; ++i) rows[i] = places_[first + i].slot;
  table_->rows_of(rows, count, rows);
}

bool Batch::hands_over() const {
  return keep_evicted_ || table_->removals_.on() ||
         table_->config_.strategy == ScoreStrategy::kNoEviction;
}

void Evicted::reserve(size_t rows, size_t row_bytes, size_t state_columns, size_t score_words) {
  ids.reserve(rows);
  embeddings.reserve(rows * row_bytes);
  state.reserve(rows * state_columns);
  scores.reserve(rows * score_words);
}

void Batch::reserve() {
  if (!hands_over() || mode_ == BatchMode::kLocate || mode_ == BatchMode::kAssign) return;
  const Table& t = *table_;
  const bool numbered = t.config_.strategy == ScoreStrategy::kNoEviction;
  const auto take = [&](Evicted& evicted, size_t rows) {
    evicted.reserve(rows, t.embedding_bytes_, t.state_.dim(), t.score_words());
  };
  size_t missing = 0;
  for (Partition& p : parts_) {
    missing += p.missing;
    if (numbered) p.inserted.reserve(p.missing);
    if (t.removals_.on()) p.removed.reserve(p.missing);
    if (!keep_evicted_) continue;
    p.evicted_by.reserve(p.missing);
    take(p.evicted, p.missing);
  }
  if (numbered) inserted_.reserve(missing);
  if (!keep_evicted_) return;
  evictions_.reserve(missing);
  take(evicted_, missing);
}

void Batch::commit(size_t partition, const BatchScore& score) {
  Partition& p = parts_[partition];
  const uint32_t end = p.begin + p.unique;
  constexpr uint32_t kBurst = 256;  // records that are fetched in one go, before their use
  const bool writes = mode_ == BatchMode::kInsert || mode_ == BatchMode::kAssign;
  std::vector<bool> missed;
  if (writes)
    for (uint32_t entry = p.begin; entry < end; ++entry)
      missed.push_back(entry_slots_[entry] == kNoSlot);
  if (mode_ != BatchMode::kLocate) {
    for (uint32_t entry = p.begin; entry < end; ++entry) {
      if ((entry - p.begin) % kBurst == 0)
        for (uint32_t next = entry; next < std::min(end, entry + kBurst); ++next)
          if (entry_slots_[next] != kNoSlot) prefetch(&table_->records_[entry_slots_[next]]);
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
  if (places_ != nullptr) publish(p);
  if (writes) write_rows(p, missed);
}

void Batch::settle() noexcept {
  Table& t = *table_;
  uint32_t highest = 0;
  for (const Partition& p : parts_) {
    highest = std::max(highest, p.highest_position);
    counters_.add(p.counters);
  }
  if (highest != 0) t.touch_position(highest - 1);
  if (mode_ != BatchMode::kTrain) counters_.hits = counters_.misses = 0;
  t.size_ += counters_.inserts - counters_.evictions;
  t.counters_.add(counters_);
  if (counters_.evictions != 0) ++t.version_;
  version_ = t.version_;
  ++t.changes_;
  if (mode_ != BatchMode::kLocate) touch_if_marked();  // a mark may have come between its steps
}

void Batch::finish() {
  Table& t = *table_;
  uint64_t mark = 0;
  for (const Partition& p : parts_) t.log_removals(p.removed, mark);
  if (t.config_.strategy == ScoreStrategy::kNoEviction) number_rows();
  if (!keep_evicted_) return;
  // A partition's evictions are in the order of its entries; merge them to the order of the batch.
  for (uint32_t i = 0; i < partitions_; ++i)
    for (uint32_t k = 0; k < parts_[i].evicted_by.size(); ++k)
      evictions_.push_back({first_of(parts_[i].evicted_by[k]), i, k});
  std::sort(evictions_.begin(), evictions_.end());
  const size_t row_bytes = t.embedding_bytes_, state = t.state_.dim(), words = t.score_words();
  for (const Eviction& one : evictions_) {
    const Evicted& from = parts_[one.partition].evicted;
    const auto copy = [i = one.index](auto& to, const auto& source, size_t width) {
      const auto begin = source.begin() + static_cast<std::ptrdiff_t>(i * width);
      to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(width));
    };
    copy(evicted_.ids, from.ids, 1);
    copy(evicted_.embeddings, from.embeddings, row_bytes);
    copy(evicted_.state, from.state, state);
    copy(evicted_.scores, from.scores, words);
  }
}

void Batch::touch_if_marked() {
  Table& t = *table_;
  if (!t.tracks_changes()) return;
  // Other modes stamped their rows when they ran (stamp_ > t.stamp_: before stamps began again).
  if (mode_ != BatchMode::kLocate && stamp_ <= t.stamp_ && mark_of(t.lap_, stamp_) > t.marked_)
    return;
  const uint32_t stamp = t.begin_batch();
  for (const Partition& p : parts_)
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
      if (entry_slots_[entry] != kNoSlot) t.records_[entry_slots_[entry]].stamp = stamp;
}

void Batch::number_rows() {
  Table& t = *table_;
  if (given_.scores == nullptr) {
    for (const Partition& p : parts_)
      inserted_.insert(inserted_.end(), p.inserted.begin(), p.inserted.end());
    std::sort(inserted_.begin(), inserted_.end(),
              [&](uint32_t a, uint32_t b) { return first_of(a) < first_of(b); });
    for (const uint32_t entry : inserted_) {
      t.records_[entry_slots_[entry]].score = t.next_row_number_;
      t.next_row_number_ = add_saturated(t.next_row_number_, uint64_t{1});
    }
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

}  // namespace dynamicemb
