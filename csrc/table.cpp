#include "table.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "hash.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

// Buckets wider than this are found through a map instead of by scanning their digests.
constexpr uint32_t kWidestScan = 1024;
constexpr size_t kChunk = 2048;  // ids per task

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// The largest size where the product has more than 64 bits: no allocation of it succeeds.
size_t bytes_of_rows(size_t rows, size_t stride) {
  size_t bytes;
  return __builtin_mul_overflow(rows, stride, &bytes) ? ~size_t{0} : bytes;
}

}  // namespace

Table::Table(const TableConfig& config, const StateLayout& state) : config_(config) {
  buckets_ = config.init_buckets;
  if (std::has_single_bit(config.width)) shift_ = std::countr_zero(config.width);
  const uint64_t slots = capacity();
  digests_ = Array<uint8_t>(slots);
  keys_ = Array<uint64_t>(slots);
  records_ = Array<Record>(slots);
  if (config.strategy == ScoreStrategy::kTimestampLfu) timestamps_ = Array<uint64_t>(slots);
  if (config.width > kWidestScan) wide_map_ = Array<uint32_t>(std::bit_ceil(2 * slots));
  layout_rows(state);
}

void Table::layout_rows(const StateLayout& state) {
  const size_t embedding_bytes = config_.dim * bytes_of(config_.type);
  const size_t state_offset = round_up(embedding_bytes, sizeof(float));
  const size_t stride = round_up(state_offset + state.columns * sizeof(float), 16);
  Mapping rows(bytes_of_rows(capacity(), stride));
  rows_ = std::move(rows);
  embedding_bytes_ = embedding_bytes;
  state_offset_ = state_offset;
  stride_ = stride;
  state_ = state;
}

uint64_t Table::bytes() const {
  const uint64_t index = digests_.bytes() + keys_.bytes() + records_.bytes() + timestamps_.bytes() +
                         wide_map_.bytes() + removals_.bytes();
  return index + positions_used_.load(std::memory_order_relaxed) * buckets_ * stride_;
}

void Table::touch_position(uint32_t position) {
  uint32_t used = positions_used_.load(std::memory_order_relaxed);
  while (used <= position &&
         !positions_used_.compare_exchange_weak(used, position + 1, std::memory_order_relaxed)) {
  }
}

uint32_t Table::begin_batch() {
  if (++stamp_ == 0) {  // 2^32 batches: forget the old stamps
    for (size_t slot = 0; slot < capacity(); ++slot) records_[slot].stamp = 0;
    stamp_ = 1;
    ++lap_;
  }
  return stamp_;
}

// ---- changes ----

uint64_t Table::mark_changes() {
  if (stamp_ == 0) begin_batch();  // a mark is never 0
  return marked_ = mark_of(lap_, stamp_);
}

void Table::log_removals(std::span<const uint64_t> ids, uint64_t& mark) noexcept {
  if (ids.empty() || !removals_.on()) return;
  if (mark == 0) mark = mark_of(lap_, begin_batch());
  removals_.add(mark, ids);
}

void Table::initialize_state(std::byte* row, Record& record) const {
  if (state_.columns != 0)
    std::memcpy(row_state(row), state_.initial.data(), state_.columns * sizeof(float));
  record.scalar = state_.scalar ? state_.initial[state_.columns] : 0.0f;
}

// ---- wide buckets ----

void Table::find_wide(const uint64_t* ids, size_t n, uint32_t* slots) const {
  const size_t mask = wide_map_.size() - 1;
  for (size_t i = 0; i < n; ++i) {
    slots[i] = kNoSlot;
    for (size_t at = hash_id(ids[i]) & mask; wide_map_[at] != 0; at = (at + 1) & mask) {
      const uint32_t slot = wide_map_[at] - 1;
      if (keys_[slot] == ids[i]) {
        slots[i] = slot;
        break;
      }
    }
  }
}

void Table::link_wide(uint32_t slot) {
  const size_t mask = wide_map_.size() - 1;
  size_t at = hash_id(keys_[slot]) & mask;
  while (wide_map_[at] != 0) at = (at + 1) & mask;
  wide_map_[at] = slot + 1;
}

void Table::unlink_wide(uint32_t slot) {
  const size_t mask = wide_map_.size() - 1;
  size_t hole = hash_id(keys_[slot]) & mask;
  while (wide_map_[hole] != slot + 1) hole = (hole + 1) & mask;
  // Pull later entries of the run back over the hole, so that no run is interrupted.
  for (size_t at = (hole + 1) & mask; wide_map_[at] != 0; at = (at + 1) & mask) {
    const size_t home = hash_id(keys_[wide_map_[at] - 1]) & mask;
    if (((at - home) & mask) >= ((at - hole) & mask)) {
      wide_map_[hole] = wide_map_[at];
      hole = at;
    }
  }
  wide_map_[hole] = 0;
}

// ---- reading ----

void Table::rows_of(const uint32_t* slots, size_t n, uint32_t* rows) const {
  const auto convert = [&](const auto& bucket_of_slot) {
    const auto width = config_.width, buckets = static_cast<uint32_t>(buckets_);
    for (size_t i = 0; i < n; ++i) {
      const uint32_t slot = slots[i], bucket = bucket_of_slot(slot);
      const uint32_t row = (slot - bucket * width) * buckets + bucket;
      rows[i] = slot < kSideRow ? row : slot == kNoSlot ? kSideRow : slot;
    }
  };
  if (shift_ >= 0) {
    convert([shift = shift_](uint32_t slot) { return slot >> shift; });
  } else {
    convert([width = config_.width](uint32_t slot) { return slot / width; });
  }
}

void Table::find(const uint64_t* ids, size_t n, int threads, uint32_t* slots) const {
  const size_t tasks = (n + kChunk - 1) / kChunk;
  const auto find_ids = kernels().find;
  parallel_for(threads, tasks, [&](size_t task) {
    const size_t begin = task * kChunk, count = std::min(kChunk, n - begin);
    if (wide()) {
      find_wide(ids + begin, count, slots + begin);
    } else {
      find_ids(index(), ids + begin, count, slots + begin);
    }
  });
}

void Table::read(const uint32_t* slots, size_t n, int threads, const RowBuffers& out) const {
  const size_t state_dim = state_.dim(), words = score_words();
  std::vector<std::byte> missing(embedding_bytes_);
  std::vector<float> constant(config_.dim, config_.missing_value);
  kernels().narrow(config_.type, constant.data(), missing.data(), config_.dim);
  const size_t tasks = (n + kChunk - 1) / kChunk;
  parallel_for(threads, tasks, [&](size_t task) {
    const size_t end = std::min(n, (task + 1) * kChunk);
    for (size_t i = task * kChunk; i < end; ++i) {
      constexpr size_t kDistance = 8;
      if (i + kDistance < end && slots[i + kDistance] != kNoSlot)
        prefetch_bytes(row(slots[i + kDistance]), stride_);
      const uint32_t slot = slots[i];
      const bool there = slot != kNoSlot;
      std::byte* from = there ? row(slot) : nullptr;
      if (out.ids != nullptr) out.ids[i] = there ? keys_[slot] : 0;
      if (out.embeddings != nullptr)
        std::memcpy(out.embeddings + i * embedding_bytes_, there ? from : missing.data(),
                    embedding_bytes_);
      if (out.state != nullptr) {
        float* state = out.state + i * state_dim;
        if (!there) {
          std::fill_n(state, state_dim, 0.0f);
        } else {
          std::memcpy(state, row_state(from), state_.columns * sizeof(float));
          if (state_.scalar) state[state_.columns] = records_[slot].scalar;
        }
      }
      if (out.scores != nullptr) {
        uint64_t* scores = out.scores + i * words;
        if (words == 2) *scores++ = there ? timestamps_[slot] : 0;
        *scores = there ? records_[slot].score : 0;
      }
    }
  });
}

size_t Table::export_rows(uint64_t& cursor, size_t limit, const Wanted& wanted,
                          uint32_t* slots) const {
  // A mark of an earlier lap: nobody knows which rows changed since, so all did.
  const auto changed = [&](uint32_t stamp) {
    return wanted.by_change &&
           (wanted.changed_since >> 32 != lap_ || mark_of(lap_, stamp) > wanted.changed_since);
  };
  size_t count = 0;
  for (; cursor < capacity() && count < limit; ++cursor) {
    if (digests_[cursor] == 0) continue;
    const uint64_t score = score_words() == 2 ? timestamps_[cursor] : records_[cursor].score;
    if ((wanted.by_score && score >= wanted.threshold) || changed(records_[cursor].stamp))
      slots[count++] = static_cast<uint32_t>(cursor);
  }
  return count;
}

// ---- removing ----

void Table::free_slot(uint32_t slot) {
  if (wide()) unlink_wide(slot);
  digests_[slot] = 0;
  records_[slot] = {};
  --size_;
  ++version_;
  ++changes_;
}

void Table::erase(const uint64_t* ids, size_t n, int threads, bool* removed) {
  std::vector<uint32_t> slots(n);
  uint64_t mark = 0;
  find(ids, n, threads, slots.data());
  for (size_t i = 0; i < n; ++i) {
    const uint32_t slot = slots[i];
    removed[i] = slot != kNoSlot && digests_[slot] != 0;
    if (!removed[i]) continue;
    log_removals({&ids[i], 1}, mark);
    free_slot(slot);
  }
}

uint64_t Table::expire(uint64_t before, uint64_t slots) {
  uint64_t expired = 0, mark = 0;
  for (slots = std::min(slots, capacity()); slots > 0; --slots) {
    if (expired_up_to_ >= capacity()) expired_up_to_ = 0;
    const auto slot = static_cast<uint32_t>(expired_up_to_++);
    if (digests_[slot] == 0) continue;
    const uint64_t score = score_words() == 2 ? timestamps_[slot] : records_[slot].score;
    if (score >= before) continue;
    log_removals({&keys_[slot], 1}, mark);
    free_slot(slot);
    ++expired;
  }
  counters_.evictions += expired;
  return expired;
}

void Table::clear() {
  std::vector<uint64_t> gone;
  if (removals_.on())
    for (uint64_t slot = 0; slot < capacity(); ++slot)
      if (digests_[slot] != 0) gone.push_back(keys_[slot]);
  drop_rows(buckets_);
  next_row_number_ = 0;
  uint64_t mark = 0;
  log_removals(gone, mark);
}

void Table::make_empty(const EmptyTable& before) {
  drop_rows(before.buckets);
  next_row_number_ = before.next_row_number;
  counters_ = before.counters;
}

void Table::drop_rows(uint64_t buckets) {
  // Fresh mappings give the memory back and read as zero.
  const uint64_t slots = buckets * config_.width;
  Array<uint8_t> digests(slots);
  Array<uint64_t> keys(slots);
  Array<Record> records(slots);
  Array<uint64_t> timestamps(timestamps_.size() == 0 ? 0 : slots);
  Array<uint32_t> wide_map(wide_map_.size() == 0 ? 0 : std::bit_ceil(2 * slots));
  Mapping rows(bytes_of_rows(slots, stride_));
  buckets_ = buckets;
  digests_ = std::move(digests);
  keys_ = std::move(keys);
  records_ = std::move(records);
  timestamps_ = std::move(timestamps);
  wide_map_ = std::move(wide_map);
  rows_ = std::move(rows);
  positions_used_ = 0;
  size_ = 0;
  ++version_;
  ++changes_;
}

// ---- changing shape ----

void Table::set_state_layout(const StateLayout& state) {
  const size_t old_stride = stride_, embedding_bytes = embedding_bytes_;
  Mapping new_rows;
  const size_t new_stride =
      round_up(round_up(embedding_bytes, sizeof(float)) + state.columns * sizeof(float), 16);
  if (new_stride != old_stride) new_rows = Mapping(bytes_of_rows(capacity(), new_stride));
  std::byte* from = rows_.data();
  std::byte* to = new_stride != old_stride ? new_rows.data() : from;
  state_ = state;
  stride_ = new_stride;
  const uint32_t stamp = tracks_changes() ? begin_batch() : 0;
  for (uint32_t slot = 0; slot < capacity(); ++slot) {
    if (digests_[slot] == 0) continue;
    const size_t at = row_of(slot);
    if (to != from) std::memcpy(to + at * new_stride, from + at * old_stride, embedding_bytes);
    initialize_state(to + at * new_stride, records_[slot]);
    if (stamp != 0) records_[slot].stamp = stamp;
  }
  if (to != from) rows_ = std::move(new_rows);
}

bool Table::grow_for(uint64_t incoming) {
  const auto fits = [&](uint64_t buckets) {
    return static_cast<double>(size_ + incoming) <=
           config_.max_load_factor * static_cast<double>(buckets * config_.width);
  };
  if (config_.max_load_factor <= 0 || buckets_ >= config_.max_buckets || fits(buckets_))
    return false;
  uint64_t buckets = buckets_;
  while (buckets < config_.max_buckets && !fits(buckets))
    buckets = std::min(2 * buckets, config_.max_buckets);
  return grow_to(buckets);
}

void Table::reserve(uint64_t rows) { grow_for(rows); }

bool Table::grow_to(uint64_t buckets) {
  const uint32_t width = config_.width;
  // Ids are placed in the order of their old slots, each in the lowest free position. Growth must
  // not lose a row, so it does not happen if a bucket would overflow.
  std::vector<uint32_t> filled(buckets, 0);
  for (uint64_t slot = 0; slot < capacity(); ++slot) {
    if (digests_[slot] == 0) continue;
    if (++filled[bucket_of(hash_id(keys_[slot]), buckets)] > width) return false;
  }
  const uint64_t slots = buckets * width;
  Array<uint8_t> digests(slots);
  Array<uint64_t> keys(slots);
  Array<Record> records(slots);
  Array<uint64_t> timestamps(timestamps_.size() == 0 ? 0 : slots);
  Array<uint32_t> wide_map(wide_map_.size() == 0 ? 0 : std::bit_ceil(2 * slots));
  Mapping rows(bytes_of_rows(slots, stride_));
  std::vector<uint32_t> next(buckets, 0);
  std::vector<uint32_t> moved(capacity(), kNoSlot);
  // Nothing can fail from here on.
  for (uint64_t slot = 0; slot < capacity(); ++slot) {
    if (digests_[slot] == 0) continue;
    const uint64_t bucket = bucket_of(hash_id(keys_[slot]), buckets);
    const uint64_t to = bucket * width + next[bucket]++;
    moved[slot] = static_cast<uint32_t>(to);
    digests[to] = digests_[slot];
    keys[to] = keys_[slot];
    records[to] = records_[slot];
    if (timestamps.size() != 0) timestamps[to] = timestamps_[slot];
  }
  // Rows move position by position, and the old memory of a position is given back at once: the
  // table is never in memory twice.
  uint32_t highest = 0;
  const size_t plane = buckets_ * stride_;
  for (uint32_t position = 0; position < width; ++position) {
    for (uint64_t bucket = 0; bucket < buckets_; ++bucket) {
      const uint32_t to = moved[bucket * width + position];
      if (to == kNoSlot) continue;
      const uint32_t new_position = to % width;
      highest = std::max(highest, new_position + 1);
      if (stride_ == 0) continue;  // ids alone: there is no memory of rows
      std::memcpy(rows.data() + (new_position * buckets + to / width) * stride_,
                  rows_.data() + (position * buckets_ + bucket) * stride_, stride_);
    }
    rows_.discard(position * plane, plane);
  }
  buckets_ = buckets;
  digests_ = std::move(digests);
  keys_ = std::move(keys);
  records_ = std::move(records);
  timestamps_ = std::move(timestamps);
  wide_map_ = std::move(wide_map);
  rows_ = std::move(rows);
  positions_used_ = highest;
  if (wide())
    for (uint64_t slot = 0; slot < capacity(); ++slot)
      if (digests_[slot] != 0) link_wide(static_cast<uint32_t>(slot));
  ++version_;
  ++changes_;
  return true;
}

}  // namespace dynamicemb
