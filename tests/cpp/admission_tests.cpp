// Admission, protected rows, and batches that find the table changed.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "check.h"
#include "tables.h"

namespace {

using namespace dynamicemb;
using namespace dynamicemb::testing;

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
    const SharedBatch whole = train(table, range(0, 3));
    const Floats before = read(table, batch, threads);
    erase(*table, {3, 4});
    CHECK(batch->stale() && whole->stale());
    read(table, whole, threads);
    CHECK(!whole->stale());
    Floats after = read(table, batch, threads);
    for (size_t i = 0; i < 20; ++i) CHECK(after[i] == (i / 2 == 3 || i / 2 == 4 ? 0 : before[i]));
    CHECK(batch->stale());  // 3 and 4 may come back
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
    // Cleared, read, and some rows come back as new ones.
    table->clear();
    read(table, batch, threads);
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

const Test kTests[] = {
    TEST(admission_with_growth_in_between),          TEST(admission_of_all_or_none),
    TEST(the_table_changes_between_find_and_commit), TEST(protected_rows_are_not_evicted),
    TEST(stale_batches_find_their_rows_again),
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
