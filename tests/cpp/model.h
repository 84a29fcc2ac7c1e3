// A plain serial model of the batch semantics, and random batches on a table and its model.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "hash.h"
#include "tables.h"

namespace dynamicemb::testing {

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

inline bool same(const Counters& a, const Counters& b) {
  return a.hits == b.hits && a.misses == b.misses && a.inserts == b.inserts &&
         a.evictions == b.evictions && a.failures == b.failures && a.rejections == b.rejections &&
         a.dropped_gradients == b.dropped_gradients;
}

// Random batches of every mode on a table and its model.
inline void compare_with_model(const TableConfig& config, const StateLayout& layout, size_t batch,
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

}  // namespace dynamicemb::testing
