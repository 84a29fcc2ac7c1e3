// Slot maps without Python, for the sanitizers: against a plain model, with several threads, with
// an index that has to grow, and with readers beside a writer.
#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "check.h"
#include "hash.h"
#include "slot_map.h"

namespace {

using namespace dynamicemb;

using Ids = std::vector<uint64_t>;

Ids drawn_ids(uint64_t step, size_t n, uint64_t universe) {
  Ids ids(n);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t draw = hash_id(step * 1'000'003 + i);
    ids[i] = hash_id(draw % (1 + (draw >> 32) % universe));  // small numbers are frequent
  }
  return ids;
}

void lru_matches_a_plain_model() {
  constexpr uint64_t kCapacity = 3000;
  SlotMap map({kCapacity, SlotPolicy::kLru, 1, 5, 0});
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> model;  // id: (time, slot)
  for (uint64_t step = 1; step <= 40; ++step) {
    const Ids ids = drawn_ids(step, 1000, 8000);
    std::vector<int64_t> slots(ids.size());
    const Mapped mapped =
        map.map(ids.data(), ids.size(), nullptr, {step, true, false, 2}, slots.data());
    CHECK(mapped.refused == 0);
    for (size_t i = 0; i < mapped.evicted.ids.size(); ++i) {
      const auto gone = model.find(mapped.evicted.ids[i]);
      CHECK(gone != model.end() && gone->second.second == mapped.evicted.slots[i]);
      if (gone != model.end()) model.erase(gone);
    }
    for (size_t i = 0; i < ids.size(); ++i) model[ids[i]] = {step, static_cast<uint32_t>(slots[i])};
    // What stayed is not older than what went.
    if (!mapped.evicted.ids.empty()) CHECK(model.size() == kCapacity);
    std::vector<bool> taken(kCapacity);
    for (const auto& [id, use] : model) {
      CHECK(!taken[use.second]);
      taken[use.second] = true;
    }
  }
  Ids ids;
  for (const auto& [id, use] : model) ids.push_back(id);
  std::vector<int64_t> slots(ids.size());
  map.find(ids.data(), ids.size(), 2, slots.data());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(slots[i] == int64_t{model[ids[i]].second});
}

void threads_change_nothing() {
  for (int policy = 0; policy < 5; ++policy) {
    SlotMap one({100'000, static_cast<SlotPolicy>(policy), 0.5, 1, 3});
    SlotMap four({100'000, static_cast<SlotPolicy>(policy), 0.5, 1, 3});
    for (uint64_t step = 1; step <= 8; ++step) {
      const Ids ids = drawn_ids(step, 40'000, 400'000);
      std::vector<int64_t> a(ids.size()), b(ids.size());
      const Mapped first =
          one.map(ids.data(), ids.size(), nullptr, {step, true, false, 1}, a.data());
      const Mapped second =
          four.map(ids.data(), ids.size(), nullptr, {step, true, false, 4}, b.data());
      CHECK(a == b);
      CHECK(first.evicted.ids == second.evicted.ids && first.evicted.slots == second.evicted.slots);
      CHECK(first.refused == second.refused);
    }
  }
}

void the_index_grows() {
  SlotMap map({600, SlotPolicy::kLru, 1, 5, 0});
  const uint64_t buckets = 600 * 10 / 6 / 128 + 1;
  Ids ids;
  for (uint64_t id = 0; ids.size() < 500; ++id)
    if (bucket_of(hash_id(id), buckets) == 2) ids.push_back(id);
  std::vector<int64_t> slots(ids.size());
  map.map(ids.data(), ids.size(), nullptr, {1, true, false, 1}, slots.data());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(slots[i] == static_cast<int64_t>(i));
  map.find(ids.data(), ids.size(), 1, slots.data());
  for (size_t i = 0; i < ids.size(); ++i) CHECK(slots[i] == static_cast<int64_t>(i));
}

void the_lowest_free_slot_comes_first() {
  FreeSlots free(200'000);
  for (uint32_t slot = 0; slot < 200'000; ++slot) CHECK(free.take_lowest() == slot);
  CHECK(free.size() == 0);
  for (const uint32_t slot : {150'000u, 64u, 63u, 199'999u}) free.release(slot);
  free.take(64);
  CHECK(free.take_lowest() == 63 && free.take_lowest() == 150'000);
  CHECK(free.take_lowest() == 199'999 && free.size() == 0);
}

void readers_and_a_writer() {
  SlotMap map({5000, SlotPolicy::kLfu, 1, 5, 0});
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader)
    readers.emplace_back([&map, reader] {
      std::vector<int64_t> slots(500);
      for (uint64_t step = 0; step < 50; ++step) {
        const Ids ids = drawn_ids(step + 1000 * static_cast<uint64_t>(reader), 500, 20'000);
        std::shared_lock lock(map.mutex());
        map.find(ids.data(), ids.size(), 1, slots.data());
        for (const int64_t slot : slots) CHECK(slot >= -1 && slot < 5000);
      }
    });
  std::vector<int64_t> slots(2000);
  for (uint64_t step = 1; step <= 50; ++step) {
    const Ids ids = drawn_ids(step, 2000, 20'000);
    std::unique_lock lock(map.mutex());
    map.map(ids.data(), ids.size(), nullptr, {step, true, true, 1}, slots.data());
    map.unpin(slots.data(), slots.size());
  }
  for (std::thread& reader : readers) reader.join();
  CHECK(map.size() == 5000);
}

}  // namespace

int main(int argc, char** argv) {
  const Test tests[] = {
      TEST(lru_matches_a_plain_model),        TEST(threads_change_nothing), TEST(the_index_grows),
      TEST(the_lowest_free_slot_comes_first), TEST(readers_and_a_writer),
  };
  return run_tests(argc, argv, tests);
}
