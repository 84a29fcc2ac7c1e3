// Slot maps without Python, for the sanitizers: against a plain model, with several threads, with
// an index that has to grow, and with readers beside a writer.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <thread>
#include <tuple>

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

// What a map must do, as simply as possible.
struct Model {
  struct Use {
    uint64_t last, count, batch;
    uint32_t slot;
  };

  double key(const Use& use) const {
    if (policy == SlotPolicy::kLru) return static_cast<double>(use.last);
    const auto count = static_cast<double>(use.count);
    return count / std::pow(static_cast<double>(time - use.last) + 1, decay_exponent);
  }

  // The ids that go, the first to go first.
  Ids map(const Ids& ids, uint64_t now) {
    time = now;
    ++batch;
    Ids fresh;
    for (const uint64_t id : ids) {
      const auto found = uses.find(id);
      if (found != uses.end()) {
        found->second = {time, found->second.count + 1, batch, found->second.slot};
      } else {
        if (fresh_counts[id]++ == 0) fresh.push_back(id);
      }
    }
    std::vector<std::tuple<double, uint32_t, uint64_t>> order;
    for (const auto& [id, use] : uses)
      if (use.batch != batch) order.emplace_back(key(use), use.slot, id);
    std::sort(order.begin(), order.end());
    const size_t room = capacity - uses.size();
    const size_t needed = fresh.size() > room ? fresh.size() - room : 0;
    Ids gone;
    for (size_t i = 0; i < std::min(needed, order.size()); ++i) {
      gone.push_back(std::get<2>(order[i]));
      free.insert(std::get<1>(order[i]));
      uses.erase(gone.back());
    }
    for (const uint64_t id : fresh) {
      if (free.empty()) break;
      uses[id] = {time, fresh_counts[id], batch, *free.begin()};
      free.erase(free.begin());
    }
    fresh_counts.clear();
    return gone;
  }

  Model(uint64_t slots, SlotPolicy what, double decay)
      : capacity(slots), policy(what), decay_exponent(decay) {
    for (uint32_t slot = 0; slot < slots; ++slot) free.insert(slot);
  }

  uint64_t capacity;
  SlotPolicy policy;
  double decay_exponent;
  uint64_t time = 0, batch = 0;
  std::map<uint64_t, Use> uses;
  std::set<uint32_t> free;
  std::map<uint64_t, uint64_t> fresh_counts;
};

// `draw` gives the ids of a step; every time comes `per_time` times.
template <class Draw>
void compare(SlotPolicy policy, double decay, uint64_t steps, uint64_t per_time, Draw draw) {
  constexpr uint64_t kCapacity = 12'000;
  SlotMap map({kCapacity, policy, decay, 5, 0});
  Model model(kCapacity, policy == SlotPolicy::kLfu ? SlotPolicy::kDistanceLfu : policy, decay);
  for (uint64_t step = 1; step <= steps; ++step) {
    const Ids ids = draw(step);
    std::vector<int64_t> slots(ids.size());
    const uint64_t time = step / per_time;
    const Mapped mapped =
        map.map(ids.data(), ids.size(), nullptr, {time, true, false, 2}, slots.data());
    CHECK(mapped.evicted.ids == model.map(ids, time));
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto found = model.uses.find(ids[i]);
      CHECK(slots[i] == (found == model.uses.end() ? -1 : int64_t{found->second.slot}));
    }
    map.find(ids.data(), ids.size(), 2, slots.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const auto found = model.uses.find(ids[i]);
      CHECK(slots[i] == (found == model.uses.end() ? -1 : int64_t{found->second.slot}));
    }
  }
}

void policies_match_a_plain_model() {
  const auto skewed = [](uint64_t step) { return drawn_ids(step, 2500, 30'000); };
  const auto uniform = [](uint64_t step) {
    Ids ids = drawn_ids(step, step == 1 ? 12'000 : 1200, 1);
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = step == 1 ? i : hash_id(step * 1'000'003 + i) % 18'000;
    return ids;
  };
  for (const uint64_t per_time : {1, 3}) {
    compare(SlotPolicy::kLru, 1, 30, per_time, skewed);
    compare(SlotPolicy::kLfu, 0, 30, per_time, skewed);
    compare(SlotPolicy::kLfu, 0, 30, per_time, uniform);
    for (const double decay : {0.0, 0.5, 1.0, 2.0}) {
      compare(SlotPolicy::kDistanceLfu, decay, 30, per_time, skewed);
      compare(SlotPolicy::kDistanceLfu, decay, 40, per_time, uniform);
    }
  }
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
  const uint64_t buckets = static_cast<uint64_t>(600 / 0.44 / 64) + 1;
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
  std::vector<uint32_t> taken(200'000);
  free.take_lowest(70'000, taken.data());
  free.take_lowest(130'000, taken.data() + 70'000);
  for (uint32_t slot = 0; slot < 200'000; ++slot) CHECK(taken[slot] == slot);
  CHECK(free.size() == 0);
  for (const uint32_t slot : {150'000u, 64u, 63u, 199'999u}) free.release(slot);
  free.take(64);
  free.take_lowest(3, taken.data());
  CHECK(taken[0] == 63 && taken[1] == 150'000 && taken[2] == 199'999 && free.size() == 0);
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
      TEST(policies_match_a_plain_model),     TEST(threads_change_nothing), TEST(the_index_grows),
      TEST(the_lowest_free_slot_comes_first), TEST(readers_and_a_writer),
  };
  return run_tests(argc, argv, tests);
}
