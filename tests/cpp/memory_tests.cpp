// Batches whose N-th request for memory fails, for every N.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <thread>

#include "check.h"
#include "model.h"

namespace {

thread_local long allocations_left = -1;  // -1: as many as wanted

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  const std::size_t size =
      (std::max<std::size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, 16); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

using namespace dynamicemb;
using namespace dynamicemb::testing;

// The allocations of `work` in a new thread, whose buffers are still small; `allowed` of them
// succeed. False: it ran out of memory.
template <class F>
bool runs_with(long allowed, const F& work) {
  bool done = false;
  std::thread([&] {
    allocations_left = allowed;
    try {
      work();
      done = true;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
  }).join();
  return done;
}

// A table of 2,048 slots, three quarters of them taken, and a batch whose last partition is the
// largest by far: it takes memory when the others are done.
struct Trial {
  Trial(uint32_t width, ScoreStrategy strategy)
      : table(std::make_shared<Table>(config_of(3, 2048 / width, 2048 / width, width, strategy),
                                      layout_of(2, true))) {
    Random random(3);
    train(table, range(0, 1500), 1);
    batch = random_ids(random, 9000, 12000);
    const uint64_t buckets = 2048 / width;
    uint64_t hot = 0;
    while (bucket_of(hash_id(hot), buckets) + 1 < buckets) ++hot;
    batch.insert(batch.end(), 9000, hot);
  }

  SharedTable table;
  Ids batch;
};

void check_consistent(const Table& table) {
  const Rows rows = dump(table);
  CHECK(rows.ids.size() == table.size());
  const std::vector<uint32_t> slots = find(table, rows.ids);
  CHECK(std::equal(slots.begin(), slots.end(), rows.slots.begin(), rows.slots.end()));
  const Counters counters = table.counters();
  CHECK(counters.inserts - counters.evictions == table.size());
}

// Fails every allocation once; `after(trial, before, done)` looks at what is left.
template <class Work, class After>
void fail_each_allocation(uint32_t width, ScoreStrategy strategy, const Work& work,
                          const After& after) {
  for (long allowed = 0;; ++allowed) {
    Trial trial(width, strategy);
    const Rows before = dump(*trial.table);
    const bool done = runs_with(allowed, [&] { work(trial); });
    check_consistent(*trial.table);
    after(trial, before, done);
    if (done) return;
  }
}

void a_batch_without_memory_leaves_a_consistent_table() {
  for (const ScoreStrategy strategy : kStrategies)
    for (const uint32_t width : {16u, 2048u}) {
      if (strategy == ScoreStrategy::kNoEviction && width == 16) continue;  // below
      fail_each_allocation(
          width, strategy, [](Trial& trial) { train(trial.table, trial.batch, 2, 1); },
          [](Trial& trial, const Rows&, bool) {
            train(trial.table, trial.batch, 3);  // goes on
            check_consistent(*trial.table);
          });
    }
}

void evicted_rows_are_not_lost() {
  Trial whole(16, ScoreStrategy::kStep);
  const With with{.score = {2, 2}, .keep_evicted = true, .threads = 1};
  const SharedBatch expected = run(whole.table, BatchMode::kTrain, whole.batch, with);
  CHECK(expected->evicted().ids.size() > 500);
  fail_each_allocation(
      16, ScoreStrategy::kStep,
      [&](Trial& trial) { run(trial.table, BatchMode::kTrain, trial.batch, with); },
      [&](Trial& trial, const Rows& before, bool done) {
        CHECK(dump(*trial.table) == (done ? dump(*whole.table) : before));
      });
}

void numbers_of_rows_stay_different() {
  const auto empty = [] {
    return std::make_shared<Table>(config_of(1, 64, 64, 16, ScoreStrategy::kNoEviction),
                                   layout_of(0, false));
  };
  const Ids ids = range(0, 3000);
  for (long allowed = 0;; ++allowed) {
    const SharedTable table = empty();
    const bool done = runs_with(allowed, [&] { train(table, ids, 0, 1); });
    CHECK(done || table->size() == 0);
    if (done) break;
  }
}

void removals_without_memory_are_unknown_not_missing() {
  for (long allowed = 0;; ++allowed) {
    Trial trial(16, ScoreStrategy::kStep);
    const Ids stored = dump(*trial.table).ids;
    const uint64_t mark = trial.table->mark_changes();
    trial.table->removals().start(mark, 100000);
    const std::unique_ptr<bool[]> removed(new bool[stored.size()]);
    const bool done = runs_with(
        allowed, [&] { trial.table->erase(stored.data(), stored.size(), 1, removed.get()); });
    const RemovalLog& log = trial.table->removals();
    const bool complete = log.since(mark).size() == stored.size() - trial.table->size();
    CHECK(complete || log.known_since() > mark);
    if (done && complete) return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  constexpr Test tests[] = {
      TEST(a_batch_without_memory_leaves_a_consistent_table),
      TEST(evicted_rows_are_not_lost),
      TEST(numbers_of_rows_stay_different),
      TEST(removals_without_memory_are_unknown_not_missing),
  };
  return run_tests(argc, argv, tests);
}
