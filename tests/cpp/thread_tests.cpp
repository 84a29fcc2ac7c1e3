// 1, 2 and 4 threads give the same bits; readers beside a writer; memory that runs out.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "calls.h"
#include "check.h"
#include "group.h"
#include "memory.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // their operator new aborts where it should throw
#else
constexpr bool kSanitized = false;
#endif

namespace {

using namespace dynamicemb;
using namespace dynamicemb::testing;

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
    TEST(threads_do_not_change_a_bit),
    TEST(many_threads_may_read),
    TEST(readers_and_a_writer_take_turns),
    TEST(a_refused_allocation_changes_nothing),
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
