// Batches against the model, and what tables say of their rows.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "check.h"
#include "hash.h"
#include "model.h"
#include "serving.h"

namespace {

using namespace dynamicemb;
using namespace dynamicemb::testing;

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
  for (uint64_t mark = 6; mark < 26; ++mark)
    log.add(mark, Ids{mark % 2});  // two ids, again and again
  CHECK(log.known_since() == 5);
  for (uint64_t mark = 30; mark < 50; ++mark) log.add(mark, Ids{1000 + mark});
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

const Test kTests[] = {
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
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
