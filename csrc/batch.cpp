#include "batch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "hash.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr size_t kChunks = 16;           // that a large batch is split in
constexpr size_t kLeastChunk = 8192;     // ids: enough for pieces of some length
constexpr size_t kMostChunk = 65536;     // ids: what is written stays in the second-level cache
constexpr size_t kPartitionIds = 1024;   // aimed at per partition: its dedup fits the L1 cache
constexpr size_t kMaxPartitions = 1024;  // write streams while splitting

}  // namespace

Batch::Batch(std::shared_ptr<Table> table, BatchMode mode, const uint64_t* ids, size_t n,
             const int64_t* counts)
    : table_(std::move(table)), mode_(mode), ids_(ids), counts_(counts), n_(n) {
  // Everything that has one element per occurrence, in one block.
  memory_ = Scratch((counts != nullptr ? 3 : 2) * Scratch::bytes_for<uint64_t>(n) +
                    Scratch::bytes_for<Span>(n) + Scratch::bytes_for<Place>(n) +
                    3 * Scratch::bytes_for<uint32_t>(n) + Scratch::bytes_for<uint8_t>(n) + 64);
  split_ids_ = memory_.take<uint64_t>(n);
  entry_ids_ = memory_.take<uint64_t>(n);
  if (counts != nullptr) entry_counts_ = memory_.take<uint64_t>(n);
  spans_ = memory_.take<Span>(n);
  split_positions_ = memory_.take<uint32_t>(n);
  entry_slots_ = memory_.take<uint32_t>(n);
  occurrences_ = memory_.take<uint32_t>(n);
  if (mode == BatchMode::kTrain || mode == BatchMode::kLocate) places_ = memory_.take<Place>(n);
  entry_fate_ = memory_.take<uint8_t>(n);
  side_stride_ = table_->stride_;
  side_.resize(side_stride_);
}

// ---- splitting ----

void Batch::plan_split() {
  found_at_ = table_->changes_;
  const uint64_t buckets = table_->buckets_;
  const uint64_t most = table_->wide() ? 1 : kMaxPartitions;  // their map has one owner
  const uint64_t wanted = std::clamp<uint64_t>(n_ / kPartitionIds, 1, most);
  const uint64_t buckets_each = std::bit_ceil((buckets + wanted - 1) / wanted);
  partition_shift_ = std::countr_zero(buckets_each);
  partitions_ = (buckets + buckets_each - 1) / buckets_each;
  parts_.assign(partitions_, {});
  chunk_ = std::clamp(n_ / kChunks, kLeastChunk, kMostChunk);
  constexpr size_t kPieces = std::size(Pieces{}.of_partition);
  chunk_lines_ = (partitions_ + 2 + kPieces - 1) / kPieces;
  pieces_.assign(chunks() * chunk_lines_, {});
}

size_t Batch::chunks() const { return (n_ + chunk_ - 1) / chunk_; }

// Counts the ids of each partition, then writes them one partition after the other.
void Batch::split_chunk(size_t chunk) {
  const size_t begin = chunk * chunk_, count = std::min(n_ - begin, chunk_);
  const uint64_t* ids = ids_ + begin;
  thread_local std::vector<uint16_t> partition_of;
  partition_of.resize(count);
  uint32_t* pieces = pieces_of(chunk);
  constexpr size_t kBlock = 256;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t some = std::min(kBlock, count - first);
    // Where the ids will go; writing to memory that is not in a cache takes three times as long.
    prefetch_bytes(split_ids_ + begin + first, some * sizeof(uint64_t));
    prefetch_bytes(split_positions_ + begin + first, some * sizeof(uint32_t));
    kernels().partition(table_->buckets_, partition_shift_, ids + first, some,
                        partition_of.data() + first);
    for (size_t i = first; i < first + some; ++i) ++pieces[partition_of[i] + 2];
  }
  pieces[0] = pieces[1] = static_cast<uint32_t>(begin);
  for (size_t p = 0; p < partitions_; ++p) pieces[p + 2] += pieces[p + 1];
  uint32_t* next = pieces + 1;  // in the end where each partition's piece ends
  for (size_t i = 0; i < count; ++i) {
    const uint32_t to = next[partition_of[i]]++;
    split_ids_[to] = ids[i];
    split_positions_[to] = static_cast<uint32_t>(begin + i);
  }
}

void Batch::finish_split() {
  uint32_t offset = 0;
  for (size_t p = 0; p < partitions_; ++p) {
    parts_[p].begin = offset;
    for (size_t chunk = 0; chunk < chunks(); ++chunk)
      offset += pieces_of(chunk)[p + 1] - pieces_of(chunk)[p];
    parts_[p].end = offset;
  }
}

// ---- dedup and find ----

void Batch::find(size_t partition) {
  Partition& p = parts_[partition];
  const uint32_t count = p.end - p.begin;
  // Calls body(i, place) for the i-th id of the partition, which is at `place` among the split.
  const auto for_each_id = [&](const auto& body) {
    uint32_t i = 0;
    for (size_t chunk = 0; chunk < chunks(); ++chunk) {
      const uint32_t *piece = pieces_of(chunk) + partition, end = piece[1];
      for (uint32_t place = piece[0]; place < end; ++place) body(i++, place);
    }
  };

  thread_local std::vector<uint32_t> table, entry_of, next;
  const size_t table_size = std::bit_ceil<size_t>(2 * std::max(count, 8u));
  table.assign(table_size, 0);
  entry_of.resize(count);
  next.resize(count);  // first how often an entry occurs, then where its next occurrence goes
  uint64_t* entry_ids = entry_ids_ + p.begin;
  prefetch_bytes(occurrences_ + p.begin, count * sizeof(uint32_t));
  uint32_t unique = 0;
  for_each_id([&](uint32_t i, uint32_t place) {
    const uint64_t id = split_ids_[place];
    size_t at = hash_id(id) & (table_size - 1);
    uint32_t entry;
    while ((entry = table[at]) != 0 && entry_ids[entry - 1] != id) at = (at + 1) & (table_size - 1);
    if (entry == 0) {
      entry = table[at] = unique + 1;
      entry_ids[unique] = id;
      next[unique++] = 0;
    }
    entry_of[i] = entry - 1;
    ++next[entry - 1];
  });
  p.unique = unique;

  // Occurrences grouped by entry, each group in order.
  Span* spans = spans_ + p.begin;
  uint32_t offset = p.begin;
  for (uint32_t entry = 0; entry < unique; ++entry) {
    const uint32_t length = next[entry];
    spans[entry] = {offset, offset + length};
    next[entry] = offset;
    offset += length;
  }
  for_each_id([&](uint32_t i, uint32_t place) {
    occurrences_[next[entry_of[i]]++] = split_positions_[place];
  });
  if (counts_ != nullptr) {
    for (uint32_t entry = p.begin; entry < p.begin + unique; ++entry) {
      uint64_t total = 0;
      for (uint32_t i = spans_[entry].begin; i < spans_[entry].end; ++i)
        total = add_saturated(total, static_cast<uint64_t>(counts_[occurrences_[i]]));
      entry_counts_[entry] = total;
    }
  }
  std::fill_n(entry_fate_ + p.begin, unique, uint8_t{kThere});
  locate(partition);
}

void Batch::locate(size_t partition) {
  Partition& p = parts_[partition];
  table_->find(entry_ids_ + p.begin, p.unique, 1, entry_slots_ + p.begin);
  p.missing = static_cast<uint32_t>(
      std::count(entry_slots_ + p.begin, entry_slots_ + p.begin + p.unique, kNoSlot));
}

// ---- admission and growth ----

bool Batch::needs_decision() const {
  if (mode_ == BatchMode::kLocate || mode_ == BatchMode::kAssign) return false;
  if (hands_over()) return true;
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
            [&](uint32_t a, uint32_t b) { return first_of(a) < first_of(b); });
  return missing_.size();
}

void Batch::missing(uint64_t* ids, int64_t* counts) const {
  for (size_t i = 0; i < missing_.size(); ++i) {
    ids[i] = entry_ids_[missing_[i]];
    counts[i] = static_cast<int64_t>(
        std::min<uint64_t>(count_of(missing_[i]), std::numeric_limits<int64_t>::max()));
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

uint64_t Batch::rows_gone() const {
  uint64_t gone = 0;
  for (const Partition& p : parts_) {
    if (p.missing == 0) continue;
    for (uint32_t entry = p.begin; entry < p.begin + p.unique; ++entry)
      gone += entry_fate_[entry] == kThere && entry_slots_[entry] == kNoSlot;
  }
  return gone;
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
  for (Batch* batch : batches) batch->plan_split();
  over(
      batches, threads, [](Batch& b) { return b.chunks(); },
      [&](size_t b, size_t chunk) { batches[b]->split_chunk(chunk); });
  for (Batch* batch : batches) batch->finish_split();
}

size_t partition_count(Batch& batch) { return batch.partitions(); }

// body(batch, partition) commits; afterwards the tables count what is in them, whatever happened.
template <class Body>
void commit_partitions(std::span<Batch* const> batches, int threads, const Body& body) {
  try {
    over(batches, threads, partition_count, body);
  } catch (...) {
    for (Batch* batch : batches) batch->settle();
    throw;
  }
  for (Batch* batch : batches) batch->settle();
  for (Batch* batch : batches) batch->finish();
}

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
  for (Batch* batch : batches) batch->reserve();
  commit_partitions(batches, threads,
                    [&](size_t b, size_t p) { batches[b]->commit(p, scores[b]); });
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
  commit_partitions(batches, threads, [&](size_t b, size_t p) {
    batches[b]->find(p);
    batches[b]->commit(p, scores[b]);
  });
}

}  // namespace dynamicemb
