// Which slots of a slot map go first: the smallest (key, slot), exactly, at a cost that is bounded
// by the number of slots taken.
//
// A round collects every slot whose (key, slot) is below a limit. Until the next round, such slots
// are known: the keys of others only grow, and a slot that gets a new id is noted. What is taken is
// checked against the slot's present key, so a touch costs nothing here.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynamicemb {

enum class SlotPolicy : std::uint8_t {
  kLru = 0,          // the oldest use
  kLfu = 1,          // the fewest uses
  kDistanceLfu = 2,  // the smallest uses / (age + 1)^decay_exponent
  kLfuLru = 3,       // the smallest logarithm of uses (grown at random), then the oldest use
  kTtl = 4,          // the oldest use, and only if it is older than a limit
};

// How a slot was used. `stamp` is the number of the last batch that used it; 0: the slot is free.
struct SlotUse {
  std::uint64_t last = 0;   // time of the last use
  std::uint32_t count = 0;  // uses; kLfuLru: their logarithm
  std::uint32_t stamp = 0;
};

struct SlotKey {
  std::uint64_t key;
  std::uint32_t slot;

  auto operator<=>(const SlotKey&) const = default;
};

inline constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

class SlotOrder {
 public:
  SlotOrder(SlotPolicy policy, double decay_exponent)
      : policy_(policy), decay_exponent_(decay_exponent) {}

  // What decides when the slot goes; smaller is earlier.
  std::uint64_t key(const SlotUse& use, std::uint64_t now) const;

  struct Request {
    std::size_t wanted = 0;
    std::uint64_t below = kNoLimit;  // only keys below it
    std::uint32_t spared = 0;        // not the slots with this stamp
    std::uint64_t now = 0;
    int threads = 1;
  };
  // Frees (stamp = 0) the first slots in order, and appends them to `taken`. Pinned slots (pins
  // other than 0; may be null) stay. `used` of the slots in `uses` are not free.
  void take(std::span<SlotUse> uses, const std::uint32_t* pins, std::size_t used,
            const Request& request, std::vector<std::uint32_t>& taken);
  // A slot has a new id.
  void note(std::uint32_t slot, const SlotUse& use) {
    if (policy_ == SlotPolicy::kDistanceLfu) return;  // every request is a round of its own
    const SlotKey at{key(use, use.last), slot};
    if (at < limit_) added_.push_back(at);
  }
  // Forgets the round, e.g. after keys became smaller.
  void reset();

 private:
  void start_round(std::span<const SlotUse> uses, std::size_t used, std::size_t size,
                   const Request& request);
  SlotKey sampled_limit(std::span<const SlotUse> uses, std::size_t used, std::size_t size,
                        std::uint64_t now) const;
  // The slots of [begin, end) below the limit, in order of the slots.
  void scan(std::span<const SlotUse> uses, std::size_t begin, std::size_t end, SlotKey limit,
            std::uint64_t now, std::vector<SlotKey>& found) const;
  void merge_added();
  bool next(SlotKey& at) const;
  void pop();
  double power_of(std::uint64_t age) const;

  SlotPolicy policy_;
  double decay_exponent_;
  mutable std::vector<double> powers_;  // (age + 1)^decay_exponent by age

  SlotKey limit_{0, 0};         // all slots below it are in the three lists
  std::vector<SlotKey> queue_;  // in order
  std::size_t head_ = 0;
  std::vector<SlotKey> raised_;  // a heap: they had smaller keys in the queue
  std::vector<SlotKey> added_;   // since the last request
};

}  // namespace dynamicemb
