// Random numbers, tables, batches, and what a table holds.
#pragma once

#include <memory>
#include <numeric>
#include <shared_mutex>
#include <vector>

#include "group.h"
#include "hash.h"

namespace dynamicemb::testing {

using Ids = std::vector<uint64_t>;
using Counts = std::vector<int64_t>;
using Floats = std::vector<float>;
using Bytes = std::vector<std::byte>;
using SharedTable = std::shared_ptr<Table>;
using SharedBatch = std::shared_ptr<Batch>;

constexpr int kThreads[] = {1, 2, 4};
constexpr DataType kTypes[] = {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16};
constexpr ScoreStrategy kStrategies[] = {ScoreStrategy::kTimestamp,  ScoreStrategy::kStep,
                                         ScoreStrategy::kCustomized, ScoreStrategy::kLfu,
                                         ScoreStrategy::kNoEviction, ScoreStrategy::kTimestampLfu};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() { return hash_id(state_ += 0x9e3779b97f4a7c15ULL); }
  uint64_t below(uint64_t bound) { return next() % bound; }
  // A multiple of 1/16 in [-1, 1]: exact in every row type.
  float exact() { return (static_cast<float>(below(33)) - 16.0f) / 16.0f; }
  float real() { return static_cast<float>(next() >> 40) * 0x1p-23f - 1.0f; }

 private:
  uint64_t state_;
};

inline Ids range(uint64_t first, size_t n) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

inline Ids random_ids(Random& random, size_t n, uint64_t universe) {
  Ids ids(n);
  for (uint64_t& id : ids) id = random.below(universe);
  return ids;
}

inline Floats random_floats(Random& random, size_t n) {
  Floats values(n);
  for (float& value : values) value = random.real();
  return values;
}

inline Floats exact_floats(Random& random, size_t n) {
  Floats values(n);
  for (float& value : values) value = random.exact();
  return values;
}

inline Bytes narrow(DataType type, const Floats& values) {
  Bytes bytes(values.size() * bytes_of(type));
  kernels().narrow(type, values.data(), bytes.data(), static_cast<uint32_t>(values.size()));
  return bytes;
}

inline Floats widen(DataType type, const Bytes& bytes) {
  Floats values(bytes.size() / bytes_of(type));
  kernels().widen(type, bytes.data(), values.data(), static_cast<uint32_t>(values.size()));
  return values;
}

template <class T>
inline void append(Bytes& log, const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  log.insert(log.end(), data, data + values.size() * sizeof(T));
}

// ---- a table and what it holds ----

inline TableConfig config_of(uint32_t dim, uint64_t init_buckets, uint64_t max_buckets,
                             uint32_t width, ScoreStrategy strategy = ScoreStrategy::kStep,
                             DataType type = DataType::kFloat32) {
  TableConfig config;
  config.dim = dim;
  config.type = type;
  config.init_buckets = init_buckets;
  config.max_buckets = max_buckets;
  config.width = width;
  config.strategy = strategy;
  config.initializer = {.mode = InitializerMode::kUniform, .lower = -1, .upper = 1, .seed = 7};
  config.missing_value = 0.5f;
  return config;
}

inline StateLayout layout_of(uint32_t columns, bool scalar) {
  StateLayout layout{columns, scalar, Floats(columns + scalar)};
  for (size_t i = 0; i < layout.initial.size(); ++i)
    layout.initial[i] = 0.25f * static_cast<float>(i + 1);
  return layout;
}

struct Rows {
  std::vector<int64_t> slots;
  Ids ids;
  Bytes embeddings;
  Floats state;
  Ids scores;
  bool operator==(const Rows&) const = default;

  void log_to(Bytes& log) const {
    append(log, slots);
    append(log, ids);
    append(log, embeddings);
    append(log, state);
    append(log, scores);
  }
};

inline Rows read_slots(const Table& table, const std::vector<uint32_t>& slots, int threads = 1) {
  const size_t n = slots.size();
  Rows rows;
  rows.slots.assign(slots.begin(), slots.end());
  rows.ids.resize(n);
  rows.embeddings.resize(n * table.config().dim * bytes_of(table.config().type));
  rows.state.resize(n * table.state().dim());
  rows.scores.resize(n * table.score_words());
  table.read(slots.data(), n, threads,
             {rows.ids.data(), rows.embeddings.data(), rows.state.data(), rows.scores.data()});
  return rows;
}

inline std::vector<uint32_t> find(const Table& table, const Ids& ids, int threads = 1) {
  std::vector<uint32_t> slots(ids.size());
  table.find(ids.data(), ids.size(), threads, slots.data());
  return slots;
}

inline Rows lookup(const Table& table, const Ids& ids, int threads = 1) {
  return read_slots(table, find(table, ids, threads), threads);
}

// All rows in slot order, fetched `limit` at a time.
inline Rows dump(const Table& table, uint64_t threshold = 0, size_t limit = 1000) {
  std::vector<uint32_t> all, some(limit);
  uint64_t cursor = 0;
  while (const size_t count =
             table.export_rows(cursor, limit, {.threshold = threshold}, some.data()))
    all.insert(all.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
  return read_slots(table, all);
}

struct With {
  BatchScore score = {};
  const Counts* counts = nullptr;
  RowSourceGiven given = {};
  bool keep_evicted = false;
  int threads = 2;
};

inline SharedBatch run(const SharedTable& table, BatchMode mode, const Ids& ids,
                       const With& with = {}) {
  auto batch = std::make_shared<Batch>(table, mode, ids.data(), ids.size(),
                                       with.counts == nullptr ? nullptr : with.counts->data());
  batch->give(with.given);
  if (with.keep_evicted) batch->keep_evicted();
  Batch* const one[] = {batch.get()};
  const BatchScore scores[] = {with.score};
  run_all(one, scores, with.threads);
  return batch;
}

inline SharedBatch train(const SharedTable& table, const Ids& ids, uint64_t score = 1,
                         int threads = 2) {
  return run(table, BatchMode::kTrain, ids, {.score = {score, score}, .threads = threads});
}

inline std::vector<bool> erase(Table& table, const Ids& ids, int threads = 2) {
  const std::unique_ptr<bool[]> removed(new bool[ids.size()]);
  table.erase(ids.data(), ids.size(), threads, removed.get());
  return std::vector<bool>(removed.get(), removed.get() + ids.size());
}

inline std::vector<bool> written(const Batch& batch) {
  const std::unique_ptr<bool[]> out(new bool[batch.size()]);
  batch.written(out.get());
  return std::vector<bool>(out.get(), out.get() + batch.size());
}

inline std::vector<int64_t> slots_of(const Batch& batch) {
  std::vector<int64_t> slots(batch.size());
  batch.slots(slots.data());
  return slots;
}

inline Segment segment_of(const SharedTable& table, const SharedBatch& batch) {
  return {.table = table, .batch = batch, .id_count = batch->size()};
}

inline Pooling unpooled(const Table& table) { return {.stride = table.config().dim}; }

inline Floats read(const SharedTable& table, const SharedBatch& batch, int threads = 2) {
  Floats out(batch->size() * table->config().dim, -99.0f);
  const Segment segment = segment_of(table, batch);
  Group::read({&segment, 1}, unpooled(*table), out.data(), threads);
  return out;
}

inline void update(const SharedTable& table, const SharedBatch& batch, const Floats& gradient,
                   const OptimizerStep& step, int threads = 2) {
  const Segment segment = segment_of(table, batch);
  Group::update({&segment, 1}, unpooled(*table), gradient.data(), {&step, 1}, threads);
}

}  // namespace dynamicemb::testing
