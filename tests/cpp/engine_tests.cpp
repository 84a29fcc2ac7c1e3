// The engine without Python: made to run under the address, undefined and thread sanitizers.
//
// Most tests compare the engine with a plain serial model of the batch semantics, or the results
// of 1, 2 and 4 threads with each other, bit for bit.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "dedup.h"
#include "group.h"
#include "hash.h"
#include "memory.h"
#include "parallel.h"
#include "serving.h"
#define DYNAMICEMB_VARIANT test_variant
#include "kernels_variant.h"

namespace dynamicemb::baseline {
Kernels table();
}
#if defined(__x86_64__)
namespace dynamicemb::avx2 {
Kernels table();
}
namespace dynamicemb::avx512 {
Kernels table();
}
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // their operator new aborts where it should throw
#else
constexpr bool kSanitized = false;
#endif

namespace {

using namespace dynamicemb;

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

Ids range(uint64_t first, size_t n) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

Ids random_ids(Random& random, size_t n, uint64_t universe) {
  Ids ids(n);
  for (uint64_t& id : ids) id = random.below(universe);
  return ids;
}

Floats random_floats(Random& random, size_t n) {
  Floats values(n);
  for (float& value : values) value = random.real();
  return values;
}

Floats exact_floats(Random& random, size_t n) {
  Floats values(n);
  for (float& value : values) value = random.exact();
  return values;
}

Bytes narrow(DataType type, const Floats& values) {
  Bytes bytes(values.size() * bytes_of(type));
  kernels().narrow(type, values.data(), bytes.data(), static_cast<uint32_t>(values.size()));
  return bytes;
}

Floats widen(DataType type, const Bytes& bytes) {
  Floats values(bytes.size() / bytes_of(type));
  kernels().widen(type, bytes.data(), values.data(), static_cast<uint32_t>(values.size()));
  return values;
}

template <class T>
void append(Bytes& log, const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  log.insert(log.end(), data, data + values.size() * sizeof(T));
}

// ---- a table and what it holds ----

TableConfig config_of(uint32_t dim, uint64_t init_buckets, uint64_t max_buckets, uint32_t width,
                      ScoreStrategy strategy = ScoreStrategy::kStep,
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

StateLayout layout_of(uint32_t columns, bool scalar) {
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

Rows read_slots(const Table& table, const std::vector<uint32_t>& slots, int threads = 1) {
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

std::vector<uint32_t> find(const Table& table, const Ids& ids, int threads = 1) {
  std::vector<uint32_t> slots(ids.size());
  table.find(ids.data(), ids.size(), threads, slots.data());
  return slots;
}

Rows lookup(const Table& table, const Ids& ids, int threads = 1) {
  return read_slots(table, find(table, ids, threads), threads);
}

// All rows in slot order, fetched `limit` at a time.
Rows dump(const Table& table, uint64_t threshold = 0, size_t limit = 1000) {
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

SharedBatch run(const SharedTable& table, BatchMode mode, const Ids& ids, const With& with = {}) {
  auto batch = std::make_shared<Batch>(table, mode, ids.data(), ids.size(),
                                       with.counts == nullptr ? nullptr : with.counts->data());
  batch->give(with.given);
  if (with.keep_evicted) batch->keep_evicted();
  Batch* const one[] = {batch.get()};
  const BatchScore scores[] = {with.score};
  run_all(one, scores, with.threads);
  return batch;
}

SharedBatch train(const SharedTable& table, const Ids& ids, uint64_t score = 1, int threads = 2) {
  return run(table, BatchMode::kTrain, ids, {.score = {score, score}, .threads = threads});
}

std::vector<bool> erase(Table& table, const Ids& ids, int threads = 2) {
  const std::unique_ptr<bool[]> removed(new bool[ids.size()]);
  table.erase(ids.data(), ids.size(), threads, removed.get());
  return std::vector<bool>(removed.get(), removed.get() + ids.size());
}

std::vector<bool> written(const Batch& batch) {
  const std::unique_ptr<bool[]> out(new bool[batch.size()]);
  batch.written(out.get());
  return std::vector<bool>(out.get(), out.get() + batch.size());
}

std::vector<int64_t> slots_of(const Batch& batch) {
  std::vector<int64_t> slots(batch.size());
  batch.slots(slots.data());
  return slots;
}

Segment segment_of(const SharedTable& table, const SharedBatch& batch) {
  return {.table = table, .batch = batch, .id_count = batch->size()};
}

Pooling unpooled(const Table& table) { return {.stride = table.config().dim}; }

Floats read(const SharedTable& table, const SharedBatch& batch, int threads = 2) {
  Floats out(batch->size() * table->config().dim, -99.0f);
  const Segment segment = segment_of(table, batch);
  Group::read({&segment, 1}, unpooled(*table), out.data(), threads);
  return out;
}

void update(const SharedTable& table, const SharedBatch& batch, const Floats& gradient,
            const OptimizerStep& step, int threads = 2) {
  const Segment segment = segment_of(table, batch);
  Group::update({&segment, 1}, unpooled(*table), gradient.data(), {&step, 1}, threads);
}

// ---- the model ----

class Model {
 public:
  struct Outcome {
    std::vector<int64_t> slots;
    Rows evicted;
  };

  Model(const TableConfig& config, const StateLayout& layout)
      : config_(config), layout_(layout), buckets_(config.init_buckets) {
    slots_.resize(buckets_ * config.width);
  }

  Counters counters;
  uint64_t size() const {
    return static_cast<uint64_t>(
        std::count_if(slots_.begin(), slots_.end(), [](const Slot& s) { return s.used; }));
  }
  uint64_t capacity() const { return slots_.size(); }

  Rows dump() const {
    Rows rows;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (!slots_[slot].used) continue;
      rows.slots.push_back(static_cast<int64_t>(slot));
      copy(slots_[slot], rows);
    }
    return rows;
  }

  std::vector<bool> erase(const Ids& ids) {
    std::vector<bool> removed;
    for (uint64_t id : ids) {
      const size_t slot = find(id);
      removed.push_back(slot != kNone);
      if (slot != kNone) slots_[slot] = {};
    }
    return removed;
  }

  Outcome apply(BatchMode mode, const Ids& ids, const With& with) {
    struct Entry {
      uint64_t id, count;
      size_t last;
      int64_t slot;
    };
    std::vector<Entry> entries;
    std::unordered_map<uint64_t, size_t> entry_of;
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto [it, fresh] = entry_of.try_emplace(ids[i], entries.size());
      if (fresh) entries.push_back({ids[i], 0, i, -1});
      Entry& entry = entries[it->second];
      entry.count += with.counts == nullptr ? 1 : static_cast<uint64_t>((*with.counts)[i]);
      entry.last = i;
    }
    const bool inserts = mode == BatchMode::kTrain || mode == BatchMode::kInsert;
    const auto incoming = static_cast<uint64_t>(std::count_if(
        entries.begin(), entries.end(), [&](const Entry& e) { return find(e.id) == kNone; }));
    if (inserts && incoming != 0) grow_for(incoming);
    for (Slot& slot : slots_) slot.touched = false;
    for (Entry& entry : entries) {
      const size_t at = find(entry.id);
      if (mode == BatchMode::kTrain) ++(at == kNone ? counters.misses : counters.hits);
      if (at == kNone) continue;
      entry.slot = static_cast<int64_t>(at);
      if (mode == BatchMode::kLocate) continue;
      Slot& slot = slots_[at];
      slot.touched = true;
      if (mode != BatchMode::kAssign) set_score(slot, with.score, entry.count, false);
      if (mode != BatchMode::kTrain) write(slot, with.given, entry.last);
    }
    Outcome outcome;
    for (Entry& entry : entries) {
      if (entry.slot >= 0 || !inserts) continue;
      const size_t at = place(entry.id, outcome);
      if (at == kNone) {
        ++counters.failures;
        continue;
      }
      ++counters.inserts;
      entry.slot = static_cast<int64_t>(at);
      Slot& slot = slots_[at];
      slot = {.used = true, .touched = true, .id = entry.id, .row = {}, .state = layout_.initial};
      slot.row.resize(config_.dim);
      kernels().initialize(config_.initializer, entry.id, slot.row.data(), config_.dim);
      set_score(slot, with.score, entry.count, true);
      if (mode == BatchMode::kInsert) write(slot, with.given, entry.last);
      if (config_.strategy == ScoreStrategy::kNoEviction && with.given.scores == nullptr)
        slot.score = next_number_++;
    }
    for (uint64_t id : ids) outcome.slots.push_back(entries[entry_of[id]].slot);
    return outcome;
  }

 private:
  struct Slot {
    bool used = false, touched = false;
    uint64_t id = 0, score = 0, timestamp = 0;
    Floats row, state;
  };
  static constexpr size_t kNone = ~size_t{0};

  size_t base(uint64_t id) const { return bucket_of(hash_id(id), buckets_) * config_.width; }
  size_t find(uint64_t id) const {
    for (size_t slot = base(id); slot < base(id) + config_.width; ++slot)
      if (slots_[slot].used && slots_[slot].id == id) return slot;
    return kNone;
  }
  size_t place(uint64_t id, Outcome& outcome) {
    size_t best = kNone;
    for (size_t slot = base(id); slot < base(id) + config_.width; ++slot) {
      if (!slots_[slot].used) return slot;
      if (!slots_[slot].touched && (best == kNone || slots_[slot].score < slots_[best].score))
        best = slot;
    }
    if (best == kNone || config_.strategy == ScoreStrategy::kNoEviction) return kNone;
    ++counters.evictions;
    copy(slots_[best], outcome.evicted);
    return best;
  }
  void set_score(Slot& slot, const BatchScore& score, uint64_t count, bool fresh) const {
    switch (config_.strategy) {
      case ScoreStrategy::kNoEviction:
        break;
      case ScoreStrategy::kTimestampLfu:
        slot.timestamp = score.timestamp;
        [[fallthrough]];
      case ScoreStrategy::kLfu:
        slot.score = fresh ? count : slot.score + count;
        break;
      default:
        slot.score = score.value;
    }
  }
  void write(Slot& slot, const RowSourceGiven& given, size_t at) {
    const size_t dim = config_.dim, state = layout_.dim();
    if (given.embeddings != nullptr)
      std::memcpy(slot.row.data(), given.embeddings + at * dim * 4, dim * 4);
    if (given.state != nullptr)
      slot.state.assign(given.state + at * state, given.state + (at + 1) * state);
    if (given.scores == nullptr) return;
    if (config_.strategy == ScoreStrategy::kTimestampLfu) {
      slot.timestamp = given.scores[2 * at];
      slot.score = given.scores[2 * at + 1];
    } else {
      slot.score = given.scores[at];
    }
    next_number_ = std::max(next_number_, slot.score + 1);  // rows are numbered after given ones
  }
  void copy(const Slot& slot, Rows& rows) const {
    rows.ids.push_back(slot.id);
    append(rows.embeddings, slot.row);
    rows.state.insert(rows.state.end(), slot.state.begin(), slot.state.end());
    if (config_.strategy == ScoreStrategy::kTimestampLfu) rows.scores.push_back(slot.timestamp);
    rows.scores.push_back(slot.score);
  }
  void grow_for(uint64_t incoming) {
    const auto fits = [&](uint64_t buckets) {
      return static_cast<double>(size() + incoming) <=
             config_.max_load_factor * static_cast<double>(buckets * config_.width);
    };
    if (config_.max_load_factor <= 0) return;
    uint64_t buckets = buckets_;
    while (buckets < config_.max_buckets && !fits(buckets))
      buckets = std::min(2 * buckets, config_.max_buckets);
    std::vector<Slot> grown(buckets * config_.width);
    std::vector<size_t> next(buckets, 0);
    for (const Slot& slot : slots_) {
      if (!slot.used || buckets == buckets_) continue;
      const uint64_t bucket = bucket_of(hash_id(slot.id), buckets);
      if (next[bucket] == config_.width) return;
      grown[bucket * config_.width + next[bucket]++] = slot;
    }
    if (buckets == buckets_) return;
    slots_ = std::move(grown);
    buckets_ = buckets;
  }

  TableConfig config_;
  StateLayout layout_;
  uint64_t buckets_;
  uint64_t next_number_ = 0;
  std::vector<Slot> slots_;
};

bool same(const Counters& a, const Counters& b) {
  return a.hits == b.hits && a.misses == b.misses && a.inserts == b.inserts &&
         a.evictions == b.evictions && a.failures == b.failures && a.rejections == b.rejections &&
         a.dropped_gradients == b.dropped_gradients;
}

// Random batches of every mode on a table and its model.
void compare_with_model(const TableConfig& config, const StateLayout& layout, size_t batch,
                        uint64_t universe, int rounds) {
  Random random(config.width + 1000 * static_cast<uint64_t>(config.strategy));
  const auto table = std::make_shared<Table>(config, layout);
  Model model(config, layout);
  for (int round = 0; round < rounds; ++round) {
    const auto mode = round % 3 != 2 ? BatchMode::kTrain
                                     : static_cast<BatchMode>(static_cast<uint8_t>(round / 3 % 4));
    const size_t n = batch / 2 + random.below(batch);
    const Ids ids = random_ids(random, n, universe);
    Counts counts(n);
    for (int64_t& count : counts) count = static_cast<int64_t>(random.below(4));
    const Floats rows = random_floats(random, n * config.dim);
    const Floats state = random_floats(random, n * layout.dim());
    const Ids scores = random_ids(random, 2 * n, 50);
    With with{.score = {static_cast<uint64_t>(round / 2), static_cast<uint64_t>(round)},
              .keep_evicted = true,
              .threads = kThreads[round % 3]};
    if (random.below(2)) with.counts = &counts;
    if (mode == BatchMode::kInsert || mode == BatchMode::kAssign) {
      if (random.below(4)) with.given.embeddings = reinterpret_cast<const std::byte*>(rows.data());
      if (random.below(2)) with.given.state = state.data();
      if (random.below(2)) with.given.scores = scores.data();
    }
    const SharedBatch done = run(table, mode, ids, with);
    const Model::Outcome expected = model.apply(mode, ids, with);
    CHECK(slots_of(*done) == expected.slots);
    const Evicted& evicted = done->evicted();
    CHECK((Rows{{}, evicted.ids, evicted.embeddings, evicted.state, evicted.scores}) ==
          expected.evicted);
    std::vector<bool> there;
    for (int64_t slot : expected.slots) there.push_back(slot >= 0);
    CHECK(written(*done) == there);
    if (mode == BatchMode::kTrain) {
      Floats read_back = read(table, done, with.threads), wanted;
      for (size_t i = 0; i < n; ++i) {
        const Rows row = there[i] ? lookup(*table, {ids[i]}) : Rows{};
        Floats values = there[i] ? widen(config.type, row.embeddings) : Floats(config.dim, 0.0f);
        wanted.insert(wanted.end(), values.begin(), values.end());
      }
      CHECK(read_back == wanted);
    }
    if (round % 4 == 3) {
      const Ids some = random_ids(random, n / 4, universe);
      CHECK(erase(*table, some, with.threads) == model.erase(some));
    }
    CHECK(table->size() == model.size());
    CHECK(table->capacity() == model.capacity());
    CHECK(same(table->counters(), model.counters));
    CHECK(dump(*table, 0, 1 + random.below(500)) == model.dump());
  }
}

// ---- tests: the parts ----

void parallel_for_runs_every_task_once() {
  for (int threads : {0, 1, 2, 4, 3, 64}) {
    for (size_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(tasks);
      parallel_for(threads, tasks, [&](size_t task) { ++runs[task]; });
      CHECK(std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; }));
    }
  }
}

void parallel_for_passes_exceptions_on() {
  for (int threads : kThreads) {
    for (size_t bad : {0, 5, 99}) {
      std::atomic<int> runs{0};
      CHECK(throws<std::runtime_error>([&] {
        parallel_for(threads, 100, [&](size_t task) {
          ++runs;
          if (task >= bad) throw std::runtime_error("task");
        });
      }));
      CHECK(runs > 0);
      parallel_for(threads, 10, [&](size_t) { ++runs; });  // the pool still works
    }
  }
}

void parallel_for_may_be_called_from_several_threads() {
  std::vector<std::thread> callers;
  std::atomic<size_t> total{0};
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 50; ++round)
        parallel_for(1 + caller, 20, [&](size_t task) { total += task; });
    });
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 4 * 50 * 190);
}

void mappings_are_zero_and_can_be_discarded() {
  for (size_t bytes : {size_t{1}, size_t{10000}, size_t{5} << 20}) {
    Mapping mapping(bytes);
    CHECK(mapping.size() == bytes);
    CHECK(std::all_of(mapping.data(), mapping.data() + bytes,
                      [](std::byte b) { return b == std::byte{0}; }));
    std::memset(mapping.data(), 1, bytes);
    mapping.discard(bytes / 4, bytes / 2);
    CHECK(mapping.data()[0] == std::byte{1} && mapping.data()[bytes - 1] == std::byte{1});
    if (bytes >= 10000) CHECK(mapping.data()[bytes / 2] == std::byte{0} || bytes < 16384);
    Mapping moved(std::move(mapping));
    Mapping assigned;
    assigned = std::move(moved);
    CHECK(assigned.size() == bytes && assigned.data()[0] == std::byte{1});
  }
  CHECK(Mapping(0).data() == nullptr);
  for (size_t bytes : {size_t{1000}, size_t{65} << 20, size_t{1000}}) {
    Scratch scratch(bytes);  // too large a block is not kept for the next one
    auto* numbers = scratch.take<uint32_t>(17);
    auto* next = scratch.take<uint64_t>(8);
    std::fill_n(numbers, 17, 1u);
    std::fill_n(next, 8, uint64_t{2});
    CHECK(numbers[16] == 1 && reinterpret_cast<uintptr_t>(next) % 64 == 0);
  }
  const Array<uint64_t> array(100);
  CHECK(array.bytes() == 800 && array[99] == 0);
}

void distinct_ids_come_in_order_of_first_occurrence() {
  for (const size_t count : {0, 1, 2, 15, 16, 17, 5000}) {
    std::vector<uint64_t> ids(count);
    for (size_t i = 0; i < count; ++i) ids[i] = hash_id(i * i % 701) | (i % 3 == 0 ? ~0ULL : 0);
    std::vector<uint64_t> distinct(count);
    std::vector<int64_t> places(count), counts(count);
    const size_t found =
        distinct_ids(ids.data(), count, distinct.data(), places.data(), counts.data());
    std::map<uint64_t, int64_t> expected;
    size_t first = 0;
    for (size_t i = 0; i < count; ++i) {
      if (expected[ids[i]]++ == 0) CHECK(distinct[first++] == ids[i]);
      CHECK(distinct[static_cast<size_t>(places[i])] == ids[i]);
    }
    CHECK(found == first && found == expected.size());
    for (size_t i = 0; i < found; ++i) CHECK(counts[i] == expected[distinct[i]]);
  }
}

void hash_places_ids() {
  Random random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t hash = hash_id(random.next()), buckets = 1 + random.below(1 << 20);
    CHECK(bucket_of(hash, buckets) < buckets);
    CHECK(bucket_of(hash, 2 * buckets) / 2 == bucket_of(hash, buckets));
    CHECK(digest_of(hash) != 0);
  }
  CHECK(digest_of(0x100) == 1 && digest_of(0xff) == 0xff);
}

struct Block {
  uint32_t words[4];
  bool operator==(const Block&) const = default;
};

Block philox(Block counter, uint32_t k0, uint32_t k1) {
  auto& c = counter.words;
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)}};
  }
  return counter;
}

void philox_gives_the_known_answers() {
  // The vectors of Random123; our function cannot reach the counters of the last two, so the
  // plain one is checked with them and ours against the plain one.
  CHECK(philox({{0, 0, 0, 0}}, 0, 0) == (Block{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
  CHECK(philox({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u) ==
        (Block{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
  CHECK(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0) ==
        (Block{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
  uint32_t out[32];
  test_variant::philox_columns(0, 0, 0, 0, out);
  CHECK(out[0] == 0x6627e8d5 && out[1] == 0xe169c58d && out[2] == 0xbc57ac4c &&
        out[3] == 0x9b00dbd8);
  Random random(2);
  for (int i = 0; i < 200; ++i) {
    const uint64_t seed = random.next(), id = i == 0 ? ~uint64_t{0} : random.next();
    const auto stream = static_cast<uint32_t>(random.next());
    const auto first = static_cast<uint32_t>(random.below(1 << 20)) * 32;
    test_variant::philox_columns(seed, id, stream, first, out);
    for (uint32_t b = 0; b < 8; ++b) {
      const Block counter{
          {first / 4 + b, stream, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)}};
      const Block want =
          philox(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
      CHECK(std::memcmp(want.words, out + 4 * b, sizeof want.words) == 0);
    }
  }
}

// ---- tests: the kernels ----

std::vector<Kernels> variants() {
  std::vector<Kernels> all{baseline::table()};
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (has_avx2) all.push_back(avx2::table());
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    all.push_back(avx512::table());
#endif
  return all;
}

constexpr uint32_t kDims[] = {1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 127, 130};

// An index in exactly sized heap memory, where the address sanitizer sees reads past the end.
struct PlainIndex {
  std::vector<uint8_t> digests;
  Ids keys, ids;
  IndexView view;

  PlainIndex(uint32_t width, uint64_t buckets, Random& random)
      : digests(width * buckets), keys(width * buckets) {
    std::vector<uint32_t> filled(buckets);
    for (uint64_t i = 0; i < buckets * width; ++i) {
      const uint64_t id = random.next(), hash = hash_id(id), b = bucket_of(hash, buckets);
      ids.push_back(id);
      if (filled[b] == width) continue;
      digests[b * width + filled[b]] = digest_of(hash);
      keys[b * width + filled[b]++] = id;
    }
    view = {digests.data(), keys.data(), buckets, width, false};
  }
};

using Recording = std::map<std::string, Bytes>;

Recording record_index(const Kernels& k) {
  Recording log;
  Random random(3);
  for (uint32_t width = 16; width <= 272; width += 16) {
    PlainIndex index(width, 7, random);
    for (size_t n : {0, 1, 15, 16, 17, 31, 32, 33, 64, 65, 300}) {
      Ids ids;  // some that are there, some whose bucket was full, some unknown
      for (size_t i = 0; i < n; ++i)
        ids.push_back(i % 7 == 6 ? i : index.ids[i * 37 % index.ids.size()]);
      std::vector<uint32_t> slots(n), sparse(n);
      k.find(index.view, ids.data(), n, slots.data());
      IndexView hinted = index.view;
      hinted.sparse = true;
      k.find(hinted, ids.data(), n, sparse.data());
      CHECK(sparse == slots);
      append(log["find"], slots);
      for (size_t i = 0; i < n; ++i) {  // what brute force finds
        const auto it = std::find(index.keys.begin(), index.keys.end(), ids[i]);
        const auto slot = static_cast<uint32_t>(it - index.keys.begin());
        CHECK(slots[i] == (it == index.keys.end() ? kNoSlot : slot));
      }
    }
    std::vector<uint32_t> positions;
    std::vector<uint8_t> digests(width, 9);
    positions.push_back(k.free_position(digests.data(), width));
    CHECK(positions.back() == width);
    for (uint32_t hole = width; hole-- > 0;) {
      digests[hole] = 0;
      positions.push_back(k.free_position(digests.data(), width));
      CHECK(positions.back() == hole);
    }
    std::vector<Record> records(width);
    for (int round = 0; round < 40; ++round) {
      uint32_t best = kNoSlot;
      for (uint32_t i = 0; i < width; ++i) {
        records[i].score = round % 4 == 0 ? ~uint64_t{0} : random.below(round % 4 == 1 ? 2 : 1000);
        if (round % 4 == 3) records[i].score <<= 54;
        records[i].stamp = round < 2 ? 5 : static_cast<uint32_t>(4 + random.below(2));
        if (records[i].stamp != 5 && (best == kNoSlot || records[i].score < records[best].score))
          best = i;
      }
      positions.push_back(k.victim(records.data(), width, 5));
      CHECK(positions.back() == best);
    }
    append(log["positions"], positions);
  }
  return log;
}

Recording record_initialize(const Kernels& k) {
  Recording log;
  Random random(4);
  for (uint8_t mode = 0; mode < 5; ++mode) {
    Initializer with{.mode = static_cast<InitializerMode>(mode),
                     .value = 0.75f,
                     .lower = -0.5f,
                     .upper = 0.25f,
                     .mean = 0.1f,
                     .std_dev = 0.3f,
                     .cdf_lower = 0.0228f,
                     .cdf_upper = 0.69f,
                     .seed = 99};
    for (int wide = 0; wide < 2; ++wide) {
      if (wide) with.cdf_lower = 0, with.cdf_upper = 1, with.lower = -9, with.upper = 9;
      for (uint32_t dim : kDims)
        for (uint64_t id : {uint64_t{0}, ~uint64_t{0}, random.next()}) {
          Floats row(dim);
          k.initialize(with, id, row.data(), dim);
          for (float value : row) CHECK(std::isfinite(value));
          if (mode == 1 || mode == 3)
            for (float value : row) CHECK(value >= with.lower && value <= with.upper);
          append(log["initialize " + std::to_string(mode)], row);
          Floats longer(dim + 7);  // a value depends on its column, not on the number of columns
          k.initialize(with, id, longer.data(), dim + 7);
          CHECK(std::equal(row.begin(), row.end(), longer.begin()));
        }
    }
  }
  // Far tails: the rarest of the drawn probabilities.
  Floats tail(4096);
  k.initialize({.mode = InitializerMode::kNormal, .seed = 1}, 5, tail.data(), 4096);
  append(log["tail"], tail);
  k.initialize({.mode = InitializerMode::kTruncatedNormal,
                .lower = -9,
                .upper = 9,
                .cdf_lower = 0,
                .cdf_upper = 0x1p-24f},
               5, tail.data(), 4096);
  for (float value : tail) CHECK(std::isfinite(value));
  append(log["tail"], tail);
  return log;
}

Recording record_formats(const Kernels& k) {
  Recording log;
  Random random(5);
  // Every 16-bit pattern, and back.
  std::vector<uint16_t> patterns(65536), back(65536);
  std::iota(patterns.begin(), patterns.end(), uint16_t{0});
  Floats values(65536);
  for (DataType type : {DataType::kFloat16, DataType::kBFloat16}) {
    k.widen(type, patterns.data(), values.data(), 65536);
    append(log["widen"], values);
    k.narrow(type, values.data(), back.data(), 65536);
    for (size_t i = 0; i < 65536; ++i) CHECK(back[i] == patterns[i] || std::isnan(values[i]));
    append(log["narrow back"], back);
  }
  // Floats of every exponent, and those around the borders of the half formats.
  std::vector<uint32_t> bits;
  for (uint32_t exponent = 0; exponent < 512; ++exponent)
    for (uint32_t i = 0; i < 64; ++i)
      bits.push_back(exponent << 23 | static_cast<uint32_t>(random.below(1 << 23)));
  for (uint32_t border : {0x00000000u, 0x33000000u, 0x33800000u, 0x38800000u, 0x477fe000u,
                          0x477ff000u, 0x47800000u, 0x7f7f8000u, 0x7f800000u, 0x7fc00000u})
    for (uint32_t i = 0; i < 9; ++i) bits.push_back(border + i - 4);
  Floats floats(bits.size());
  std::memcpy(floats.data(), bits.data(), bits.size() * 4);
  for (DataType type : kTypes)
    for (uint32_t offset : {0u, 1u}) {
      const auto n = static_cast<uint32_t>(bits.size()) - offset;
      Bytes out(n * bytes_of(type));
      k.narrow(type, floats.data() + offset, out.data(), n);
      append(log["narrow"], out);
      for (uint32_t step : {0u, 1u, 77u}) {
        k.narrow_stochastic(type, floats.data() + offset, out.data(), n, 11, step * 3, step);
        append(log["narrow_stochastic"], out);
        Floats rounded(n);
        k.widen(type, out.data(), rounded.data(), n);
        for (size_t i = 0; i < n; ++i) {
          const float value = floats[i + offset];
          CHECK(std::isnan(value) == std::isnan(rounded[i]));
          if (std::isfinite(value) && std::fabs(value) < 60000 && std::fabs(value) > 1e-4)
            CHECK(std::fabs(rounded[i] - value) <=
                  std::fabs(value) * (type == DataType::kFloat16 ? 0x1p-10f : 0x1p-7f));
        }
      }
    }
  return log;
}

Recording record_rows(const Kernels& k) {
  Recording log;
  Random random(6);
  constexpr size_t kRows = 40, kSide = 3;
  for (uint32_t dim : kDims) {
    std::vector<uint32_t> rows(kRows);
    for (uint32_t& row : rows)
      row = static_cast<uint32_t>(random.below(4) ? random.below(kRows)
                                                  : kSideRow | random.below(kSide));
    const Floats weights = random_floats(random, kRows);
    const Floats content = random_floats(random, (kRows + kSide) * dim);
    const Floats gradient = random_floats(random, dim), other = random_floats(random, dim);
    for (DataType in : kTypes) {
      const Bytes from = narrow(in, content);
      const size_t stride = dim * bytes_of(in);
      const RowSource source{from.data(), from.data() + kRows * stride, stride, dim, in};
      for (DataType out_type : kTypes) {
        for (const size_t out_stride : {size_t{dim}, size_t{dim} + 1}) {
          const size_t bytes = ((kRows - 1) * out_stride + dim) * bytes_of(out_type);
          Bytes room(bytes + 64), plain;
          std::byte* out = room.data();
          while (reinterpret_cast<uintptr_t>(out) % 64 != 0) ++out;  // where whole lines can stream
          for (const bool stream : {false, true}) {
            std::fill_n(out, bytes, std::byte{0});
            for (size_t n : {size_t{0}, size_t{1}, kRows})
              k.gather(source, rows.data(), n, stream, out_type, out, out_stride);
            Bytes gathered(out, out + bytes);
            if (stream) CHECK(gathered == plain);
            plain = std::move(gathered);
          }
          append(log["gather"], plain);
        }
        Bytes pooled(dim * bytes_of(out_type));
        for (size_t length : {size_t{0}, size_t{1}, size_t{2}, size_t{19}, kRows})
          for (const float* weight : {static_cast<const float*>(nullptr), weights.data()})
            for (float divisor : {1.0f, 3.0f}) {
              k.pool(source, {rows.data(), weight, length, divisor}, out_type, pooled.data());
              append(log["pool"], pooled);
            }
      }
      const Bytes narrowed = narrow(in, gradient);
      Floats sum = other;
      for (float clamp : {0.0f, 0.4f}) {
        for (float scale : {1.0f, -0.3f})
          k.accumulate(in, narrowed.data(), clamp, scale, sum.data(), dim);
        append(log["accumulate"], sum);
      }
    }
    append(log["dot"], Floats{k.dot(gradient.data(), other.data(), dim)});
  }
  return log;
}

OptimizerStep step_of(OptimizerKind kind, int option) {
  OptimizerStep step;
  step.kind = kind;
  step.learning_rate = 0.125f;
  step.epsilon = 1e-3f;
  step.beta2 = 0.9f;
  step.one_minus_beta1 = 0.2f;
  step.one_minus_beta2 = 0.1f;
  step.adam_rate = 0.15f;
  step.bias_correction2_sqrt = 0.6f;
  step.momentum = 0.8f;
  step.dampening = 0.1f;
  step.lambda1 = 0.05f;
  step.lambda2 = 0.01f;
  step.ftrl_beta = 1.0f;
  step.step = static_cast<uint32_t>(option);
  step.iteration = 5 + option;
  step.decay1 = 0.8;
  step.decay2 = 0.9;
  if (option == 1) step.weight_decay = 0.1f, step.nesterov = true;
  if (option == 2) step.weight_decay = 0.1f, step.decoupled_decay = true, step.decay_factor = 0.99f;
  if (option == 3) step.maximize = true, step.max_gradient = 0.5f, step.stochastic_rounding = true;
  return step;
}

StateLayout state_for(OptimizerKind kind, uint32_t dim) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return layout_of(0, false);
    case OptimizerKind::kMomentum:
    case OptimizerKind::kAdagrad:
      return layout_of(dim, false);
    case OptimizerKind::kRowwiseAdagrad:
      return layout_of(0, true);
    case OptimizerKind::kPartialRowwiseAdam:
      return layout_of(dim, true);
    case OptimizerKind::kSmartDecayAdam: {
      StateLayout layout = layout_of(2 * dim + dim % 2 + 2, false);
      const int64_t last = 2;
      std::memcpy(&layout.initial[layout.columns - 2], &last, sizeof last);
      return layout;
    }
    default:
      return layout_of(2 * dim, false);
  }
}

Recording record_optimize(const Kernels& k) {
  Recording log;
  Random random(7);
  for (size_t kind = 0; kind < kOptimizerKinds; ++kind)
    for (int option = 0; option < 4; ++option)
      for (uint32_t dim : kDims) {
        Floats weights = random_floats(random, dim), state = random_floats(random, 2 * dim + 3);
        for (float& value : state) value = std::fabs(value);
        const int64_t last = 2;  // where one optimizer keeps its last step
        std::memcpy(&state[2 * dim + dim % 2], &last, sizeof last);
        float scalar = 0.3f;
        for (int round = 0; round < 2; ++round) {
          Floats gradient = random_floats(random, dim), scratch(dim);
          k.optimize[kind](weights.data(), state.data(), &scalar, gradient.data(),
                           round == 0 ? scratch.data() : gradient.data(), dim,
                           step_of(static_cast<OptimizerKind>(kind), option));
        }
        Bytes& bytes = log["optimize " + std::to_string(kind)];
        append(bytes, weights);
        append(bytes, state);
        append(bytes, Floats{scalar});
      }
  return log;
}

template <Recording (*kRecord)(const Kernels&)>
void variants_agree() {
  const std::vector<Kernels> all = variants();
  const Recording wanted = kRecord(all[0]);
  for (size_t v = 1; v < all.size(); ++v)
    for (const auto& [kernel, bytes] : kRecord(all[v]))
      if (bytes != wanted.at(kernel)) {
        ++failed_checks;
        std::printf("  %s of %s differs from baseline\n", kernel.c_str(), all[v].name);
      }
}

// ---- tests: batches against the model ----

void every_strategy_matches_the_model() {
  for (ScoreStrategy strategy : kStrategies) {
    // Two partitions or more, full buckets, failures.
    compare_with_model(config_of(3, 32, 32, 16, strategy), layout_of(2, true), 3000, 2000, 12);
    compare_with_model(config_of(2, 4, 4, 32, strategy), layout_of(0, false), 60, 400, 24);
  }
}

void every_width_matches_the_model() {
  for (uint32_t width = 16; width <= 256; width += 16)
    compare_with_model(config_of(2, 5, 5, width, ScoreStrategy::kLfu), layout_of(1, false),
                       3 * width, 12 * width, 8);
}

void growth_matches_the_model() {
  for (ScoreStrategy strategy : {ScoreStrategy::kStep, ScoreStrategy::kTimestampLfu})
    for (const auto& [init, most, width] :
         {std::array{1u, 64u, 16u}, {3u, 50u, 32u}, {3u, 7u, 128u}, {2u, 37u, 48u}}) {
      TableConfig config = config_of(3, init, most, width, strategy);
      for (double factor : {0.5, 0.9, 0.0}) {
        config.max_load_factor = factor;
        compare_with_model(config, layout_of(1, true), most * width / 4, most * width, 9);
      }
    }
  // Several doublings at once, many partitions before and after.
  compare_with_model(config_of(2, 8, 300, 16), layout_of(0, true), 5000, 4000, 6);
}

void wide_buckets_match_the_model() {
  for (ScoreStrategy strategy :
       {ScoreStrategy::kStep, ScoreStrategy::kNoEviction, ScoreStrategy::kTimestampLfu}) {
    compare_with_model(config_of(2, 1, 1, 1040, strategy), layout_of(1, true), 700, 2500, 9);
    compare_with_model(config_of(1, 1, 3, 1056, strategy), layout_of(0, false), 900, 4500, 9);
  }
  compare_with_model(config_of(1, 2, 2, 2048, ScoreStrategy::kLfu), layout_of(0, false), 5000, 6000,
                     6);
}

void every_id_is_legal() {
  Ids ids{0, 1, ~uint64_t{0}, ~uint64_t{0} - 3, uint64_t{1} << 63, ~(uint64_t{1} << 63)};
  for (int bit = 0; bit < 63; ++bit) ids.push_back(uint64_t{2} << bit | 1);
  for (uint32_t width : {16u, 128u, 1040u}) {
    TableConfig config = config_of(4, 16, 16, width);
    config.initializer = {.mode = InitializerMode::kDebug};
    const auto table = std::make_shared<Table>(config, layout_of(0, false));
    CHECK(find(*table, ids) == std::vector<uint32_t>(ids.size(), kNoSlot));
    const SharedBatch batch = train(table, ids);
    std::vector<bool> first_gone(ids.size(), true);
    CHECK(written(*batch) == first_gone && batch->failures() == 0);
    const Floats rows = read(table, batch);
    for (size_t i = 0; i < ids.size(); ++i)
      CHECK(rows[4 * i] == static_cast<float>(ids[i] % 100000));
    CHECK(lookup(*table, ids).ids == ids);
    Ids twice = ids;
    twice.insert(twice.end(), ids.begin(), ids.end());
    std::vector<bool> removed = erase(*table, twice);
    first_gone.resize(twice.size(), false);
    CHECK(removed == first_gone && table->size() == 0);
    train(table, ids);
    CHECK(table->size() == ids.size());
  }
}

void empty_batches_change_nothing() {
  const auto table = std::make_shared<Table>(config_of(3, 2, 4, 16), layout_of(1, false));
  train(table, range(0, 20));
  const Rows before = dump(*table);
  for (BatchMode mode :
       {BatchMode::kTrain, BatchMode::kInsert, BatchMode::kAssign, BatchMode::kLocate})
    for (int threads : kThreads) {
      const SharedBatch batch = run(table, mode, {}, {.score = {9, 9}, .threads = threads});
      CHECK(batch->size() == 0);
      if (mode == BatchMode::kTrain) {
        CHECK(read(table, batch).empty());
        update(table, batch, {}, {});
      }
    }
  CHECK(erase(*table, {}).empty());
  CHECK(dump(*table) == before);
  find_all({}, 2);
  commit_all({}, {}, 2);
  run_all({}, {}, 2);
}

// A pointer to a private member, by explicit instantiation: 2^32 batches would take a day.
template <uint32_t Table::* kMember>
struct Access {
  friend uint32_t& stamp_of(Table& table) { return table.*kMember; }
};
uint32_t& stamp_of(Table& table);
template struct Access<&Table::stamp_>;

void stamps_wrap_around() {
  const auto table = std::make_shared<Table>(config_of(1, 1, 1, 16), layout_of(0, false));
  train(table, range(0, 16));  // stamp 1
  stamp_of(*table) = ~0u - 1;
  for (uint64_t step = 2; step < 6; ++step) {  // 2^32 - 1, then 1 again
    const SharedBatch batch = train(table, range(100 * step, 16), step);
    CHECK(batch->failures() == 0 && table->counters().evictions == 16 * (step - 1));
  }
}

Ids changed_since(const Table& table, uint64_t mark) {
  std::vector<uint32_t> slots(table.capacity());
  uint64_t cursor = 0;
  const Wanted wanted{.by_score = false, .by_change = true, .changed_since = mark};
  slots.resize(table.export_rows(cursor, slots.size(), wanted, slots.data()));
  Ids ids = read_slots(table, slots).ids;
  std::sort(ids.begin(), ids.end());
  return ids;
}

void changes_since_a_mark() {
  const auto table = std::make_shared<Table>(config_of(1, 1, 1, 16), layout_of(0, false));
  train(table, range(0, 16), 1);
  const uint64_t mark = table->mark_changes();
  CHECK(changed_since(*table, mark).empty() && !table->removals().on());
  table->removals().start(mark, 100);
  train(table, {3, 100}, 2);  // evicts 0
  CHECK((changed_since(*table, mark) == Ids{3, 100}));
  CHECK((table->removals().since(mark) == Ids{0}));
  // A lookup before a mark and its update after it.
  const SharedBatch before = train(table, {5}, 3);
  const uint64_t later = table->mark_changes();
  CHECK(changed_since(*table, later).empty());
  before->touch_if_marked();
  CHECK((changed_since(*table, later) == Ids{5}));
  // After 2^32 batches a mark from before cannot be compared: every row counts as changed.
  stamp_of(*table) = ~0u;
  train(table, {7}, 4);
  CHECK(changed_since(*table, later).size() == 16);
  const uint64_t fresh = table->mark_changes();
  CHECK(fresh > later && changed_since(*table, fresh).empty());
}

void removals_beyond_the_limit_are_forgotten() {
  RemovalLog log;
  log.start(5, 8);
  for (uint64_t mark = 6; mark < 26; ++mark) log.add(mark, {mark % 2});  // two ids, again and again
  CHECK(log.known_since() == 5);
  for (uint64_t mark = 30; mark < 50; ++mark) log.add(mark, {1000 + mark});
  CHECK(log.known_since() > 30 && log.known_since() < 49);
  const Ids last = log.since(log.known_since());
  CHECK(last.size() == 49 - log.known_since() && last.back() == 1049);
  CHECK(log.since(49).empty());
}

void mapped_tables_find_their_rows() {
  for (const Distribution distribution :
       {Distribution::kRoundRobin, Distribution::kHashRoundRobin, Distribution::kContinuous})
    for (const size_t world : {size_t{1}, size_t{3}}) {
      constexpr uint64_t kRows = 500;
      MappedLayer base{distribution, 100, std::vector<MappedShard>(world)};
      MappedLayer delta{Distribution::kRoundRobin, 0, std::vector<MappedShard>(1)};
      std::vector<Ids> ids(world), words(world);
      std::vector<std::vector<uint64_t>> values(world);
      for (uint64_t id = 0; id < kRows; ++id) {
        const uint64_t spread = id % 2 == 0 ? id : ~id;  // also the largest ids
        const auto owner = static_cast<size_t>(&base.owner(spread) - base.shards.data());
        ids[owner].push_back(spread);
        values[owner].push_back(id);
      }
      const auto fill = [](MappedShard& shard, Ids& index) {
        index.assign(index_slots(shard.rows + shard.removed), 0);
        shard.slots = index.size();
        shard.index = index.data();
        return build_index(shard, index.data());
      };
      for (size_t rank = 0; rank < world; ++rank) {
        base.shards[rank].ids = ids[rank].data();
        base.shards[rank].rows = ids[rank].size();
        base.shards[rank].values = reinterpret_cast<const std::byte*>(values[rank].data());
        CHECK(fill(base.shards[rank], words[rank]));
      }
      const Ids changed{4, 6, 1 << 20}, gone{8, 10};
      const std::vector<uint64_t> fresh{1004, 1006, 7};
      Ids delta_words;
      delta.shards[0] = {nullptr,
                         0,
                         changed.data(),
                         3,
                         gone.data(),
                         2,
                         reinterpret_cast<const std::byte*>(fresh.data())};
      CHECK(fill(delta.shards[0], delta_words));
      const MappedTable table(8, {delta, base});
      const Ids asked{0, ~uint64_t{1}, 4, 6, 8, 10, 1 << 20, 12345};
      const uint64_t missing = 99;
      for (const int threads : {1, 2}) {
        std::vector<uint64_t> out(asked.size());
        std::array<bool, 8> found{};
        table.find(asked.data(), asked.size(), threads,
                   reinterpret_cast<const std::byte*>(&missing), found.data(),
                   reinterpret_cast<std::byte*>(out.data()));
        CHECK((out == std::vector<uint64_t>{0, 1, 1004, 1006, 99, 99, 7, 99}));
        CHECK((found == std::array<bool, 8>{true, true, true, true, false, false, true, false}));
      }
      // Whatever the words say, nothing outside of the files is read.
      for (Ids& index : words)
        for (size_t i = 0; i < index.size(); ++i) index[i] = hash_id(i) | 1;
      std::vector<uint64_t> out(kRows);
      std::vector<uint8_t> found(kRows);
      table.find(range(0, kRows).data(), kRows, 1, reinterpret_cast<const std::byte*>(&missing),
                 reinterpret_cast<bool*>(found.data()), reinterpret_cast<std::byte*>(out.data()));
      Ids twice{1, 2, 1};
      MappedShard doubled;
      doubled.ids = twice.data();
      doubled.rows = 3;
      CHECK(!fill(doubled, delta_words));
    }
}

void clearing_and_exporting() {
  for (ScoreStrategy strategy : {ScoreStrategy::kCustomized, ScoreStrategy::kTimestampLfu}) {
    const auto table =
        std::make_shared<Table>(config_of(3, 4, 4, 32, strategy), layout_of(2, true));
    for (uint64_t round = 1; round <= 4; ++round) train(table, range(20 * round, 20), 1000 * round);
    const Rows all = dump(*table);
    CHECK(all.ids.size() == 80);
    const size_t words = table->score_words();
    for (uint64_t threshold : {uint64_t{0}, uint64_t{1000}, uint64_t{2001}, uint64_t{4000},
                               uint64_t{4001}, ~uint64_t{0}})
      for (size_t limit : {size_t{1}, size_t{7}, size_t{80}, size_t{500}}) {
        Ids wanted;
        for (size_t i = 0; i < 80; ++i)
          if (all.scores[words * i] >= threshold) wanted.push_back(all.ids[i]);
        CHECK(dump(*table, threshold, limit).ids == wanted);
      }
    const uint64_t bytes = table->bytes();
    table->clear();
    CHECK(table->size() == 0 && dump(*table).ids.empty() && table->bytes() < bytes);
    CHECK(find(*table, {20, 99}) == std::vector<uint32_t>(2, kNoSlot));
    train(table, range(20, 20), 1000);
    CHECK(table->size() == 20);
    table->reset_counters();
    CHECK(same(table->counters(), {}));
  }
  const auto wide = std::make_shared<Table>(config_of(1, 1, 1, 2048), layout_of(0, false));
  train(wide, range(0, 2000));
  wide->clear();
  train(wide, range(1000, 2000));
  CHECK(wide->size() == 2000 && find(*wide, {500})[0] == kNoSlot);
  wide->set_next_row_number(5);
  CHECK(wide->next_row_number() == 5);
}

void an_empty_table_is_made_so_again() {
  for (ScoreStrategy strategy : kStrategies)
    for (uint32_t width : {16u, 1056u}) {
      const auto make = [&] {
        const auto table =
            std::make_shared<Table>(config_of(3, 1, 64, width, strategy), layout_of(2, true));
        const Ids ids = range(0, 10);
        bool removed[10];
        train(table, ids, 5);
        table->erase(ids.data(), ids.size(), 1, removed);
        return table;
      };
      const auto table = make(), twin = make();
      const EmptyTable before = table->when_empty();
      const uint64_t capacity = table->capacity();
      train(table, range(0, 5 * width), 6);
      CHECK(table->capacity() > capacity && table->size() > width);
      table->make_empty(before);
      CHECK(table->size() == 0 && table->capacity() == capacity);
      CHECK(same(table->counters(), before.counters));
      CHECK(table->next_row_number() == before.next_row_number);
      CHECK(find(*table, {0, 99}) == std::vector<uint32_t>(2, kNoSlot));
      for (uint64_t round = 1; round <= 4; ++round)
        for (const auto& one : {table, twin}) train(one, range(20 * round, width), 1000 * round);
      const Rows here = dump(*table), there = dump(*twin);
      CHECK(here.ids == there.ids && here.scores == there.scores && here.state == there.state);
      CHECK(here.embeddings == there.embeddings);
    }
}

void missing_rows_read_as_the_missing_value() {
  for (DataType type : kTypes) {
    const auto table = std::make_shared<Table>(
        config_of(5, 2, 2, 16, ScoreStrategy::kTimestampLfu, type), layout_of(2, true));
    train(table, {1, 2});
    const Rows rows = lookup(*table, {3, 1}, 2);
    const Floats values = widen(type, rows.embeddings);
    CHECK(std::count(values.begin(), values.begin() + 5, 0.5f) == 5);
    CHECK((rows.state == Floats{0, 0, 0, 0.25f, 0.5f, 0.75f}));
    CHECK((rows.scores == Ids{0, 0, 1, 1}) && rows.ids[0] == 0 && rows.ids[1] == 1);
    const std::vector<uint32_t> slots = find(*table, {3, 1});
    table->read(slots.data(), 2, 1, {});  // nothing asked for
  }
}

void another_state_layout_keeps_the_rows() {
  for (DataType type : kTypes) {
    const auto table = std::make_shared<Table>(config_of(5, 1, 8, 16, ScoreStrategy::kLfu, type),
                                               layout_of(0, false));
    const SharedBatch batch = train(table, range(0, 60));
    const Rows before = dump(*table);
    const Floats read_before = read(table, batch);
    for (const StateLayout& layout : {layout_of(1, false), layout_of(10, true), layout_of(0, true),
                                      layout_of(0, false), layout_of(40, false)}) {
      table->set_state_layout(layout);
      Rows after = dump(*table);
      for (size_t i = 0; i < 60; ++i)
        CHECK(std::equal(layout.initial.begin(), layout.initial.end(),
                         after.state.begin() + static_cast<std::ptrdiff_t>(i * layout.dim())));
      after.state.clear();
      CHECK(after == before);
      CHECK(read(table, batch) == read_before);
    }
  }
}

// ---- tests: admission, protection, stale batches ----

struct Admission {
  SharedBatch batch;
  Ids missing;
  Counts counts;

  Admission(const SharedTable& table, const Ids& ids, int threads)
      : batch(std::make_shared<Batch>(table, BatchMode::kTrain, ids.data(), ids.size(), nullptr)) {
    Batch* const one[] = {batch.get()};
    find_all(one, threads);
    missing.resize(batch->collect_missing());
    counts.resize(missing.size());
    batch->missing(missing.data(), counts.data());
  }
  // Admits the ids for which `wanted` is true.
  void admit(const std::function<bool(uint64_t)>& wanted, const float* rows = nullptr) {
    const std::unique_ptr<bool[]> mask(new bool[missing.size()]);
    for (size_t i = 0; i < missing.size(); ++i) mask[i] = wanted(missing[i]);
    batch->admit(mask.get(), {.mode = InitializerMode::kConstant, .value = -3}, rows);
  }
  void commit(uint64_t score, int threads) {
    Batch* const one[] = {batch.get()};
    const BatchScore scores[] = {{score, score}};
    commit_all(one, scores, threads);
  }
};

void admission_with_growth_in_between() {
  Rows first_dump;
  for (int threads : kThreads) {
    for (DataType type : kTypes) {
      const auto table = std::make_shared<Table>(
          config_of(3, 4, 200, 16, ScoreStrategy::kStep, type), layout_of(3, true));
      Random random(8);
      train(table, range(0, 50));
      Ids ids = random_ids(random, 4000, 1500);
      Admission admission(table, ids, threads);
      Ids expected;
      std::map<uint64_t, int64_t> count;
      for (uint64_t id : ids)
        if (id >= 50 && count[id]++ == 0) expected.push_back(id);
      CHECK(admission.missing == expected);
      for (size_t i = 0; i < expected.size(); ++i) CHECK(admission.counts[i] == count[expected[i]]);
      const auto wanted = [&](uint64_t id) { return count[id] > 2; };
      const auto rejected = static_cast<size_t>(std::count_if(
          expected.begin(), expected.end(), [&](uint64_t id) { return !wanted(id); }));
      Floats given(rejected * 3);
      for (size_t i = 0; i < given.size(); ++i) given[i] = static_cast<float>(i % 200);
      const bool rows = type == DataType::kFloat16;
      admission.admit(wanted, rows ? given.data() : nullptr);
      admission.commit(2, threads);
      CHECK(table->capacity() > 64 && admission.batch->rejections() == rejected);
      CHECK(table->counters().rejections == rejected);
      CHECK(table->size() == 50 + expected.size() - rejected && admission.batch->failures() == 0);
      const std::vector<int64_t> slots = slots_of(*admission.batch);
      const Floats out = read(table, admission.batch, threads);
      std::map<uint64_t, size_t> side;
      for (uint64_t id : expected)
        if (!wanted(id)) side.emplace(id, side.size());
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool refused = ids[i] >= 50 && !wanted(ids[i]);
        CHECK((slots[i] == -2) == refused && (slots[i] >= 0) == !refused);
        const auto values = refused ? (rows ? Floats(given.begin() + 3 * side[ids[i]],
                                                     given.begin() + 3 * side[ids[i]] + 3)
                                            : Floats(3, -3.0f))
                                    : widen(type, lookup(*table, {ids[i]}).embeddings);
        CHECK(std::equal(values.begin(), values.end(), out.begin() + 3 * i));
      }
      // Rejected rows take no gradient and are not dropped ones; another layout moves no row.
      update(table, admission.batch, Floats(out.size(), 1.0f), {});
      CHECK(table->counters().dropped_gradients == 0);
      table->set_state_layout(layout_of(30, false));
      const Floats again = read(table, admission.batch, threads);
      for (size_t i = 0; i < ids.size(); ++i)
        if (slots[i] == -2) CHECK(std::equal(&out[3 * i], &out[3 * i] + 3, &again[3 * i]));
      if (type != DataType::kFloat32) continue;
      if (threads == 1) first_dump = dump(*table);
      CHECK(dump(*table) == first_dump);
    }
  }
}

void admission_of_all_or_none() {
  const auto table = std::make_shared<Table>(config_of(2, 2, 8, 16), layout_of(0, false));
  const Ids ids = range(0, 40);
  Admission none(table, ids, 2);
  none.admit([](uint64_t) { return false; });
  none.commit(1, 2);
  CHECK(table->size() == 0 && table->capacity() == 32 && none.batch->rejections() == 40);
  CHECK(read(table, none.batch) == Floats(80, -3.0f));
  Admission all(table, ids, 2);
  all.admit([](uint64_t) { return true; });
  all.commit(2, 2);
  CHECK(table->size() == 40 && table->capacity() == 128 && all.batch->rejections() == 0);
  Admission known(table, ids, 2);
  CHECK(known.missing.empty());
  known.admit([](uint64_t) { return false; });
  known.commit(3, 2);
  CHECK(known.batch->rejections() == 0 && table->counters().hits == 40);
}

// Other calls on the table between a batch's find and its commit.
void the_table_changes_between_find_and_commit() {
  for (int threads : kThreads) {
    const auto table = std::make_shared<Table>(config_of(2, 4, 64, 16), layout_of(0, false));
    train(table, range(0, 20));
    const Ids ids = range(10, 40);  // 10..19 known, 20..49 missing
    Admission admission(table, ids, threads);
    CHECK(admission.missing == range(20, 30));
    admission.admit([](uint64_t id) { return id % 2 == 0; });
    erase(*table, range(10, 5));      // five more are missing now
    train(table, range(21, 10), 2);   // and ten of the missing are there, 21, 23... rejected before
    train(table, range(500, 90), 2);  // growth
    admission.commit(3, threads);
    const std::vector<int64_t> slots = slots_of(*admission.batch);
    const Floats out = read(table, admission.batch, threads);
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool refused = ids[i] >= 31 && ids[i] % 2 == 1;
      CHECK((slots[i] == -2) == refused);
      CHECK((out[2 * i] == -3.0f) == refused);
      CHECK((find(*table, {ids[i]})[0] == kNoSlot) == refused);
    }
    CHECK(admission.batch->rejections() == 10);
  }
}

void protected_rows_are_not_evicted() {
  for (uint32_t width : {16u, 1040u}) {
    const auto table = std::make_shared<Table>(config_of(1, 1, 1, width), layout_of(0, false));
    const Ids full = range(0, width), waiting = range(0, width - 6), fresh = range(5000, 10);
    train(table, full, 1);
    const SharedBatch held = train(table, waiting, 1);
    train(table, range(width - 6, 1), 5);
    for (int stale = 0; stale < 2; ++stale) {
      if (stale) {
        erase(*table, {0});
        train(table, {0}, 1);
      }
      CHECK(held->stale() == (stale == 1));
      const Ids incoming = range(5000 + 100 * static_cast<uint64_t>(stale), 10);
      const auto batch = std::make_shared<Batch>(table, BatchMode::kTrain, incoming.data(),
                                                 incoming.size(), nullptr);
      Batch* const one[] = {batch.get()};
      const BatchScore scores[] = {{9, 9}};
      find_all(one, 2);
      batch->protect(*held);
      commit_all(one, scores, 2);
      CHECK(batch->failures() == 4);
      const std::vector<uint32_t> slots = find(*table, waiting);
      CHECK(std::count(slots.begin(), slots.end(), kNoSlot) == 0);
    }
  }
}

void stale_batches_find_their_rows_again() {
  OptimizerStep sgd;
  sgd.learning_rate = 1;
  for (int threads : kThreads) {
    // Erased.
    auto table = std::make_shared<Table>(config_of(2, 2, 64, 16), layout_of(0, false));
    SharedBatch batch = train(table, range(0, 10));
    const Floats before = read(table, batch, threads);
    erase(*table, {3, 4});
    CHECK(batch->stale());
    Floats after = read(table, batch, threads);
    for (size_t i = 0; i < 20; ++i) CHECK(after[i] == (i / 2 == 3 || i / 2 == 4 ? 0 : before[i]));
    CHECK(!batch->stale());
    // Grown.
    train(table, range(100, 200), 2);
    CHECK(table->capacity() > 32 && batch->stale());
    CHECK(read(table, batch, threads) == after);
    train(table, range(1000, 400), 3);
    update(table, batch, Floats(20, 0.5f), sgd, threads);
    CHECK(table->counters().dropped_gradients == 2);
    for (size_t i = 0; i < 10; ++i)
      if (i != 3 && i != 4)
        CHECK(widen(DataType::kFloat32, lookup(*table, {i}).embeddings)[0] == before[2 * i] - 0.5f);
    // Cleared, and some rows come back as new ones.
    table->clear();
    train(table, {7}, 4);
    update(table, batch, Floats(20, 0.5f), sgd, threads);
    CHECK(table->counters().dropped_gradients == 11);
    CHECK(widen(DataType::kFloat32, lookup(*table, {7}).embeddings)[1] == before[15] - 0.5f);
    // Evicted; one id of the batch had failed and is there now, which changes nothing for it.
    table = std::make_shared<Table>(config_of(2, 1, 1, 16), layout_of(0, false));
    batch = train(table, range(0, 17));
    CHECK(batch->failures() == 1);
    train(table, range(1, 16), 2);
    update(table, batch, Floats(34, 0.5f), sgd, threads);
    CHECK(table->counters().dropped_gradients == 1);
    after = read(table, batch, threads);
    CHECK(after[0] == 0 && after[32] == 0 && after[2] == before[2] - 0.5f);
    // A batch that only locates.
    const SharedBatch located = run(table, BatchMode::kLocate, {1, 0, 2, 1}, {.threads = threads});
    erase(*table, {2});
    update(table, located, Floats(8, 0.25f), sgd, threads);
    CHECK(table->counters().dropped_gradients == 3);
    CHECK(widen(DataType::kFloat32, lookup(*table, {1}).embeddings)[0] == before[2] - 1.0f);
  }
}

// ---- tests: optimizers and pooling ----

// One step in double, from the definition of each optimizer.
void optimize_plainly(const OptimizerStep& s, std::vector<double>& w, std::vector<double>& state,
                      std::vector<double> g) {
  const size_t dim = w.size();
  double square = 0;
  for (size_t i = 0; i < dim; ++i) {
    if (s.maximize) g[i] = -g[i];
    if (s.weight_decay != 0 && s.decoupled_decay) w[i] *= s.decay_factor;
    if (s.weight_decay != 0 && !s.decoupled_decay) g[i] += s.weight_decay * w[i];
    square += g[i] * g[i] / static_cast<double>(dim);
  }
  double* scalar = state.empty() ? nullptr : &state.back();
  if (s.kind == OptimizerKind::kRowwiseAdagrad) *scalar += square;
  if (s.kind == OptimizerKind::kPartialRowwiseAdam)
    *scalar = s.beta2 * *scalar + s.one_minus_beta2 * square;
  int64_t last = 0;  // its bits are the last two columns
  if (s.kind == OptimizerKind::kSmartDecayAdam) {
    Floats words(state.end() - 2, state.end());
    std::memcpy(&last, words.data(), sizeof last);
    std::memcpy(words.data(), &s.iteration, sizeof last);
    std::copy(words.begin(), words.end(), state.end() - 2);
  }
  for (size_t i = 0; i < dim; ++i) {
    switch (s.kind) {
      case OptimizerKind::kSgd:
        w[i] -= s.learning_rate * g[i];
        break;
      case OptimizerKind::kMomentum:
        state[i] = s.momentum * state[i] + (1.0 - s.dampening) * g[i];
        w[i] -= s.learning_rate * (s.nesterov ? g[i] + s.momentum * state[i] : state[i]);
        break;
      case OptimizerKind::kAdam:
        state[i] += s.one_minus_beta1 * (g[i] - state[i]);
        state[dim + i] = s.beta2 * state[dim + i] + s.one_minus_beta2 * g[i] * g[i];
        w[i] -= s.adam_rate * state[i] /
                (std::sqrt(state[dim + i]) / s.bias_correction2_sqrt + s.epsilon);
        break;
      case OptimizerKind::kAdagrad:
        state[i] += g[i] * g[i];
        w[i] -= s.learning_rate * g[i] / (std::sqrt(state[i]) + s.epsilon);
        break;
      case OptimizerKind::kRowwiseAdagrad:
        w[i] -= s.learning_rate * g[i] / (std::sqrt(*scalar) + s.epsilon);
        break;
      case OptimizerKind::kPartialRowwiseAdam:
        state[i] += s.one_minus_beta1 * (g[i] - state[i]);
        w[i] -= s.adam_rate * state[i] / (std::sqrt(*scalar) / s.bias_correction2_sqrt + s.epsilon);
        break;
      case OptimizerKind::kFtrl: {
        const double before = std::sqrt(state[dim + i]);
        state[dim + i] += g[i] * g[i];
        const double now = std::sqrt(state[dim + i]);
        state[i] += g[i] - (now - before) / s.learning_rate * w[i];
        const double rate = (s.ftrl_beta + now) / s.learning_rate + s.lambda2;
        const double size = std::fabs(state[i]);
        w[i] = size <= s.lambda1 ? 0 : -std::copysign(size - s.lambda1, state[i]) / rate;
        break;
      }
      case OptimizerKind::kSmartDecayAdam: {
        const auto passed = static_cast<double>(std::max<int64_t>(s.iteration - last, 1));
        const double missed =
            s.decay1 * (1 - std::pow(s.decay1, passed - 1)) / (1 - s.decay1) * state[i];
        state[i] = std::pow(s.decay1, passed) * state[i] + s.one_minus_beta1 * g[i];
        state[dim + i] =
            std::pow(s.decay2, passed) * state[dim + i] + s.one_minus_beta2 * g[i] * g[i];
        w[i] -= s.learning_rate * (state[i] + missed) / (std::sqrt(state[dim + i]) + s.epsilon);
        break;
      }
    }
  }
}

void optimizers_follow_their_definitions() {
  Random random(9);
  // Ids 0..5 with repetitions, in the order of a batch.
  const Ids ids{4, 0, 1, 0, 2, 2, 2, 5, 3, 0};
  for (size_t kind = 0; kind < kOptimizerKinds; ++kind)
    for (uint32_t dim : {1u, 7u, 16u, 37u})
      for (DataType type : kTypes)
        for (DataType gradient_type : kTypes)
          for (int option = 0; option < 4; ++option) {
            const OptimizerStep step = step_of(static_cast<OptimizerKind>(kind), option);
            const auto table = std::make_shared<Table>(
                config_of(dim, 2, 2, 16, ScoreStrategy::kStep, type), state_for(step.kind, dim));
            for (int round = 0; round < 2; ++round) {
              const SharedBatch batch = train(table, ids);
              const Rows before = lookup(*table, range(0, 6));
              const Floats gradient = exact_floats(random, ids.size() * dim);
              const Bytes narrowed = narrow(gradient_type, gradient);
              Pooling pooling = unpooled(*table);
              pooling.type = gradient_type;
              const Segment segment = segment_of(table, batch);
              Group::update({&segment, 1}, pooling, narrowed.data(), {&step, 1},
                            kThreads[option % 3]);
              const Rows after = lookup(*table, range(0, 6));
              const Floats from = widen(type, before.embeddings),
                           to = widen(type, after.embeddings);
              const size_t columns = table->state().dim();
              for (size_t id = 0; id < 6; ++id) {
                std::vector<double> w(from.begin() + id * dim, from.begin() + (id + 1) * dim);
                std::vector<double> state(before.state.begin() + id * columns,
                                          before.state.begin() + (id + 1) * columns);
                std::vector<double> g(dim, 0.0);
                for (size_t i = 0; i < ids.size(); ++i)
                  for (size_t c = 0; c < dim && ids[i] == id; ++c) {
                    const double value = gradient[i * dim + c];
                    const double most = step.max_gradient;
                    g[c] += most > 0 ? std::clamp(value, -most, most) : value;
                  }
                optimize_plainly(step, w, state, g);
                const double close = type == DataType::kFloat32   ? 1e-5
                                     : type == DataType::kFloat16 ? 0x1p-10
                                                                  : 0x1p-7;
                for (size_t c = 0; c < dim; ++c)
                  CHECK(std::fabs(to[id * dim + c] - w[c]) <= close * (std::fabs(w[c]) + 0.01));
                for (size_t c = 0; c < columns; ++c)
                  CHECK(std::fabs(after.state[id * columns + c] - state[c]) <=
                        1e-5 * (std::fabs(state[c]) + 1));
              }
            }
          }
}

// Several tables in one call: ids feature-major, `features[t]` features for table t.
struct Call {
  Ids ids;
  std::vector<int64_t> offsets{0};
  Floats weights;
  std::vector<Segment> segments;
  size_t batch_size, stride = 0, features = 0;

  Call(const std::vector<SharedTable>& tables, const std::vector<size_t>& features_of, size_t batch,
       size_t longest, uint64_t universe, Random& random)
      : batch_size(batch) {
    for (size_t t = 0; t < tables.size(); ++t) {
      Segment segment{.table = tables[t],
                      .batch = nullptr,
                      .id_begin = ids.size(),
                      .first_feature = features,
                      .features = features_of[t],
                      .column = stride};
      for (size_t bag = 0; bag < features_of[t] * batch; ++bag) {
        const size_t length = random.below(longest + 1);
        for (size_t i = 0; i < length; ++i) {
          const uint64_t id = random.below(universe);
          ids.push_back(random.below(3) ? id : id % 17);  // some ids are frequent
        }
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      segment.id_count = ids.size() - segment.id_begin;
      stride += features_of[t] * tables[t]->config().dim;
      features += features_of[t];
      segments.push_back(segment);
    }
    weights = random_floats(random, ids.size());
  }

  void train(uint64_t score, int threads) {
    std::vector<Batch*> batches;
    for (Segment& segment : segments) {
      segment.batch =
          std::make_shared<Batch>(segment.table, BatchMode::kTrain, ids.data() + segment.id_begin,
                                  segment.id_count, nullptr);
      batches.push_back(segment.batch.get());
    }
    run_all(batches, std::vector<BatchScore>(batches.size(), {score, score}), threads);
  }
  Pooling pooling(bool mean, bool weighted, DataType type) const {
    return {true, mean,  batch_size, offsets.data(), weighted ? weights.data() : nullptr,
            type, stride};
  }
};

// Where occurrence `i` of a call ends up: its output row and columns, and its factor.
struct Place {
  size_t output, bag, length;
  const Segment* segment;
};

std::vector<Place> places(const Call& call) {
  std::vector<Place> all;
  for (const Segment& segment : call.segments)
    for (size_t f = 0; f < segment.features; ++f)
      for (size_t b = 0; b < call.batch_size; ++b) {
        const size_t bag = (segment.first_feature + f) * call.batch_size + b;
        const auto length = static_cast<size_t>(call.offsets[bag + 1] - call.offsets[bag]);
        for (size_t i = 0; i < length; ++i)
          all.push_back({b * call.stride + segment.column + f * segment.table->config().dim, bag,
                         length, &segment});
      }
  return all;
}

bool holds_all(const Call& call) {
  for (const Segment& segment : call.segments) {
    const auto begin = call.ids.begin() + static_cast<std::ptrdiff_t>(segment.id_begin);
    const Ids ids(begin, begin + static_cast<std::ptrdiff_t>(segment.id_count));
    const std::vector<uint32_t> slots = find(*segment.table, ids);
    if (std::count(slots.begin(), slots.end(), kNoSlot) != 0) return false;
  }
  return true;
}

void pooling_and_its_gradients() {
  Random random(10);
  for (DataType type : kTypes) {
    std::vector<SharedTable> tables;
    for (uint32_t dim : {3u, 16u, 70u})
      tables.push_back(std::make_shared<Table>(
          config_of(dim, 64, 64, 16, ScoreStrategy::kStep, type), layout_of(0, false)));
    for (size_t longest : {size_t{1}, size_t{5}, size_t{40}}) {
      Call call(tables, {2, 1, 1}, 12, longest, 300, random);
      call.train(1, 2);
      const std::vector<Place> where = places(call);
      // The rows as they were read, occurrence by occurrence.
      std::vector<Floats> rows;
      for (size_t i = 0; i < call.ids.size(); ++i) {
        const Table& table = *where[i].segment->table;
        rows.push_back(find(table, {call.ids[i]})[0] == kNoSlot
                           ? Floats(table.config().dim, 0.0f)
                           : widen(type, lookup(table, {call.ids[i]}).embeddings));
      }
      for (DataType out_type : kTypes)
        for (int mean = 0; mean < 2; ++mean)
          for (int weighted = 0; weighted < 2; ++weighted) {
            const Pooling pooling = call.pooling(mean, weighted, out_type);
            Floats wanted(call.batch_size * call.stride, 0.0f);
            for (size_t i = 0; i < rows.size(); ++i)
              for (size_t c = 0; c < rows[i].size(); ++c)
                wanted[where[i].output + c] += weighted ? rows[i][c] * call.weights[i] : rows[i][c];
            std::vector<bool> divided(wanted.size());
            for (size_t i = 0; i < rows.size(); ++i)
              for (size_t c = where[i].output; c < where[i].output + rows[i].size(); ++c)
                if (mean && !divided[c]) {
                  wanted[c] /= static_cast<float>(where[i].length);
                  divided[c] = true;
                }
            Bytes out(wanted.size() * bytes_of(out_type));
            Group::read(call.segments, pooling, out.data(), 2);
            CHECK(out == narrow(out_type, wanted));
            if (holds_all(call)) {
              std::fill(out.begin(), out.end(), std::byte{1});
              Group::evaluate(call.segments, call.ids.data(), pooling, out.data(), 2);
              CHECK(out == narrow(out_type, wanted));
            }
            const Floats gradient = exact_floats(random, wanted.size());
            const Bytes narrowed = narrow(out_type, gradient);
            Floats weight_gradient(call.ids.size(), -99.0f);
            Group::weight_gradient(call.segments, pooling, narrowed.data(), weight_gradient.data(),
                                   2);
            for (size_t i = 0; i < rows.size(); ++i) {
              double dot = 0;
              for (size_t c = 0; c < rows[i].size(); ++c)
                dot += double{rows[i][c]} * gradient[where[i].output + c];
              if (mean) dot /= static_cast<double>(where[i].length);
              CHECK(std::fabs(weight_gradient[i] - dot) < 1e-4);
            }
            // The reduced gradient of every table, against a sum in double.
            for (const Segment& segment : call.segments) {
              const size_t dim = segment.table->config().dim;
              Ids ids(segment.id_count);
              Floats sums(segment.id_count * dim);
              for (float most : {0.0f, 0.25f}) {
                const size_t n = Group::reduce(segment, pooling, narrowed.data(), most, 2,
                                               ids.data(), sums.data());
                std::map<uint64_t, std::vector<double>> expected;
                for (size_t i = segment.id_begin; i < segment.id_begin + segment.id_count; ++i) {
                  if (find(*segment.table, {call.ids[i]})[0] == kNoSlot) continue;
                  auto& sum = expected[call.ids[i]];
                  sum.resize(dim);
                  for (size_t c = 0; c < dim; ++c) {
                    double g = gradient[where[i].output + c];
                    if (most > 0) g = std::clamp<double>(g, -most, most);
                    sum[c] += g * (weighted ? call.weights[i] : 1) /
                              (mean ? static_cast<double>(where[i].length) : 1);
                  }
                }
                CHECK(n == expected.size());
                for (size_t r = 0; r < n; ++r) {
                  const auto& sum = expected[ids[r]];
                  CHECK(sum.size() == dim);
                  for (size_t c = 0; c < sum.size(); ++c)
                    CHECK(std::fabs(sums[r * dim + c] - sum[c]) < 1e-3);
                }
              }
            }
          }
    }
  }
}

void gradients_of_frequent_ids_are_summed_in_blocks() {
  Random random(11);
  for (size_t n : {255, 256, 257, 1000}) {
    const auto table = std::make_shared<Table>(config_of(5, 1, 1, 16), layout_of(0, false));
    const SharedBatch batch = train(table, Ids(n, 42));
    const Floats gradient = random_floats(random, 5 * n);
    Floats wanted(5, 0.0f);
    for (size_t block = 0; block < n; block += 256) {
      Floats sum(5, 0.0f);
      for (size_t i = block; i < std::min(n, block + 256); ++i)
        for (size_t c = 0; c < 5; ++c) sum[c] += gradient[5 * i + c];
      for (size_t c = 0; c < 5; ++c) wanted[c] += sum[c];
    }
    Ids ids(n);
    Floats sums(5 * n);
    const Segment segment = segment_of(table, batch);
    CHECK(Group::reduce(segment, unpooled(*table), gradient.data(), 0, 2, ids.data(),
                        sums.data()) == 1);
    sums.resize(5);
    CHECK(ids[0] == 42 && sums == wanted);
  }
}

// ---- tests: threads ----

// Everything a training job does, over three tables; returns all that came out.
Bytes job(int threads, ScoreStrategy strategy, bool pooled) {
  Bytes log;
  Random random(12);
  constexpr OptimizerKind kinds[] = {OptimizerKind::kAdam, OptimizerKind::kRowwiseAdagrad,
                                     OptimizerKind::kFtrl};
  constexpr uint32_t widths[] = {128, 32, 1040}, dims[] = {8, 5, 8};
  std::vector<SharedTable> tables;
  std::vector<OptimizerStep> steps;
  for (size_t t = 0; t < 3; ++t) {
    const uint32_t dim = pooled ? dims[t] : 8;
    TableConfig config = config_of(dim, 1, 6000 / widths[t], widths[t], strategy, kTypes[t]);
    config.max_load_factor = 0.8;
    tables.push_back(std::make_shared<Table>(config, state_for(kinds[t], dim)));
    steps.push_back(step_of(kinds[t], static_cast<int>(1 + t)));
  }
  for (uint64_t round = 1; round <= 4; ++round) {
    Call call(tables, {2, 1, 1}, 700, round == 2 ? 12 : 20, 9000, random);
    call.train(round, threads);
    Pooling pooling = call.pooling(round % 2, true, kTypes[round % 3]);
    if (!pooled) {
      pooling = {.type = kTypes[round % 3], .stride = 8};
    }
    const size_t outputs = pooled ? call.batch_size * call.stride : call.ids.size() * 8;
    Bytes out(outputs * bytes_of(pooling.type));
    Group::read(call.segments, pooling, out.data(), threads);
    append(log, out);
    const Bytes gradient = narrow(pooling.type, random_floats(random, outputs));
    if (pooled) {
      Floats weight_gradient(call.ids.size());
      Group::weight_gradient(call.segments, pooling, gradient.data(), weight_gradient.data(),
                             threads);
      append(log, weight_gradient);
    }
    if (round == 3)  // between forward and backward
      for (const SharedTable& table : tables) {
        const std::vector<bool> removed = erase(*table, range(0, 3000), threads);
        append(log, std::vector<char>(removed.begin(), removed.end()));
      }
    Group::update(call.segments, pooling, gradient.data(), steps, threads);
    for (size_t t = 0; t < 3; ++t) {
      const Segment& segment = call.segments[t];
      Ids ids(segment.id_count);
      Floats sums(segment.id_count * segment.table->config().dim);
      ids.resize(
          Group::reduce(segment, pooling, gradient.data(), 0.5f, threads, ids.data(), sums.data()));
      sums.resize(ids.size() * segment.table->config().dim);
      append(log, ids);
      append(log, sums);
      // The same gradient again, from outside; then rows from outside.
      const SharedBatch located = run(tables[t], BatchMode::kLocate, ids, {.threads = threads});
      update(tables[t], located, sums, steps[t], threads);
      const Ids given = random_ids(random, 5000, 9000);
      const Floats rows = random_floats(random, given.size() * 8);
      for (BatchMode mode : {BatchMode::kInsert, BatchMode::kAssign}) {
        const SharedBatch batch =
            run(tables[t], mode, given,
                {.score = {round, round},
                 .given = {.embeddings = reinterpret_cast<const std::byte*>(rows.data())},
                 .keep_evicted = true,
                 .threads = threads});
        append(log, slots_of(*batch));
        append(log, batch->evicted().ids);
        append(log, batch->evicted().embeddings);
        append(log, batch->evicted().state);
        append(log, batch->evicted().scores);
      }
    }
    std::fill(out.begin(), out.end(), std::byte{0});
    Group::evaluate(call.segments, call.ids.data(), pooling, out.data(), threads);
    append(log, out);
    for (const SharedTable& table : tables) {
      dump(*table).log_to(log);
      const Counters& c = table->counters();
      append(log, Ids{c.hits, c.misses, c.inserts, c.evictions, c.failures, c.dropped_gradients,
                      table->size(), table->bytes()});
    }
  }
  return log;
}

void threads_do_not_change_a_bit() {
  for (const auto& [strategy, pooled] : {std::pair{ScoreStrategy::kLfu, true},
                                         {ScoreStrategy::kTimestampLfu, false},
                                         {ScoreStrategy::kNoEviction, true}}) {
    const Bytes serial = job(1, strategy, pooled);
    CHECK(job(2, strategy, pooled) == serial);
    CHECK(job(4, strategy, pooled) == serial);
  }
}

void many_threads_may_read() {
  for (uint32_t width : {32u, 128u, 2048u}) {
    const auto table =
        std::make_shared<Table>(config_of(6, 4, 4, width, ScoreStrategy::kLfu), layout_of(2, true));
    Random random(13);
    train(table, random_ids(random, width, 3 * width));
    const Ids ids = random_ids(random, 5000, 4 * width);
    const Rows rows = lookup(*table, ids), all = dump(*table);
    const Segment segment{.table = table, .batch = nullptr, .id_count = ids.size()};
    Floats wanted(ids.size() * 6);
    Group::evaluate({&segment, 1}, ids.data(), unpooled(*table), wanted.data(), 1);
    std::vector<std::thread> readers;
    for (int reader = 0; reader < 4; ++reader)
      readers.emplace_back([&, reader] {
        for (int round = 0; round < 4; ++round) {
          CHECK(lookup(*table, ids, 1 + reader % 2) == rows);
          CHECK(dump(*table) == all);
          Floats out(wanted.size());
          Group::evaluate({&segment, 1}, ids.data(), unpooled(*table), out.data(), 1 + reader % 2);
          CHECK(out == wanted);
        }
      });
    for (std::thread& reader : readers) reader.join();
  }
}

// The locks as the Python layer takes them.
void readers_and_a_writer_take_turns() {
  const auto table = std::make_shared<Table>(config_of(4, 1, 64, 16), layout_of(0, true));
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader)
    readers.emplace_back([&] {
      while (!done) {
        {
          std::shared_lock lock(table->mutex());
          CHECK(dump(*table).ids.size() == table->size());
        }
        std::this_thread::yield();
      }
    });
  OptimizerStep step = step_of(OptimizerKind::kRowwiseAdagrad, 0);
  for (uint64_t round = 1; round <= 20; ++round) {
    std::unique_lock lock(table->mutex());
    const SharedBatch batch = train(table, range(20 * round, 60), round);
    update(table, batch, Floats(240, 0.5f), step);
    erase(*table, range(20 * round, 5));
    if (round == 15) table->clear();
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(table->size() > 0);
}

// ---- tests: running out of memory ----

void a_refused_allocation_changes_nothing() {
  constexpr uint64_t kHuge = uint64_t{1} << 46;
  CHECK(throws<AllocationError>([] { Mapping mapping(kHuge * 16); }));
  CHECK(throws<AllocationError>([] { Mapping mapping(~size_t{0}); }));
  CHECK(throws<AllocationError>([] { Table table(config_of(4, kHuge, kHuge, 16), {}); }));
  CHECK(throws<AllocationError>([] { Table table(config_of(~0u, 1 << 20, 1 << 20, 128), {}); }));
  // More bytes than 64 bits count.
  CHECK(throws<AllocationError>(
      [] { Table table(config_of(~0u, 1 << 23, 1 << 23, 256), {~0u, false, {}}); }));

  // Growth: the index fits, the rows do not.
  TableConfig config = config_of(1 << 16, 1, 1 << 22, 128);
  config.max_load_factor = 1e-9;
  const auto table = std::make_shared<Table>(config, layout_of(0, false));
  const Rows empty = dump(*table);
  const Ids ids{1, 2};
  const uint64_t bytes = table->bytes();
  CHECK(throws<std::bad_alloc>([&] { train(table, ids); }));
  CHECK(table->size() == 0 && table->capacity() == 128 && table->bytes() == bytes);
  CHECK(dump(*table) == empty && find(*table, ids)[0] == kNoSlot);

  const auto small = std::make_shared<Table>(config_of(4, 1024, 1024, 128), layout_of(1, true));
  const SharedBatch batch = train(small, range(0, 300));
  const Rows before = dump(*small);
  const Floats rows = read(small, batch);
  CHECK(throws<AllocationError>([&] { small->set_state_layout({~0u, false, {}}); }));
  CHECK(dump(*small) == before && read(small, batch) == rows && small->state().dim() == 2);
  train(small, range(1000, 300), 2);
  CHECK(small->size() == 600);

  if (kSanitized) return;
  config = config_of(1, 1, kHuge, 16);
  config.max_load_factor = 1e-18;
  const auto endless = std::make_shared<Table>(config, layout_of(0, false));
  CHECK(throws<std::bad_alloc>([&] { train(endless, ids); }));
  CHECK(endless->size() == 0 && endless->capacity() == 16);
}

const Test kTests[] = {
    TEST(parallel_for_runs_every_task_once),
    TEST(parallel_for_passes_exceptions_on),
    TEST(parallel_for_may_be_called_from_several_threads),
    TEST(mappings_are_zero_and_can_be_discarded),
    TEST(hash_places_ids),
    TEST(distinct_ids_come_in_order_of_first_occurrence),
    TEST(philox_gives_the_known_answers),
    {"variants_agree: index", variants_agree<record_index>},
    {"variants_agree: initialize", variants_agree<record_initialize>},
    {"variants_agree: formats", variants_agree<record_formats>},
    {"variants_agree: rows", variants_agree<record_rows>},
    {"variants_agree: optimize", variants_agree<record_optimize>},
    TEST(every_strategy_matches_the_model),
    TEST(every_width_matches_the_model),
    TEST(growth_matches_the_model),
    TEST(wide_buckets_match_the_model),
    TEST(every_id_is_legal),
    TEST(empty_batches_change_nothing),
    TEST(stamps_wrap_around),
    TEST(changes_since_a_mark),
    TEST(removals_beyond_the_limit_are_forgotten),
    TEST(mapped_tables_find_their_rows),
    TEST(clearing_and_exporting),
    TEST(an_empty_table_is_made_so_again),
    TEST(missing_rows_read_as_the_missing_value),
    TEST(another_state_layout_keeps_the_rows),
    TEST(admission_with_growth_in_between),
    TEST(admission_of_all_or_none),
    TEST(the_table_changes_between_find_and_commit),
    TEST(protected_rows_are_not_evicted),
    TEST(stale_batches_find_their_rows_again),
    TEST(optimizers_follow_their_definitions),
    TEST(pooling_and_its_gradients),
    TEST(gradients_of_frequent_ids_are_summed_in_blocks),
    TEST(threads_do_not_change_a_bit),
    TEST(many_threads_may_read),
    TEST(readers_and_a_writer_take_turns),
    TEST(a_refused_allocation_changes_nothing),
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
