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

#include "kernels.h"

namespace dynamicemb {

enum class SlotPolicy : std::uint8_t {
  kLru = 0,          // the oldest use
  kLfu = 1,          // the fewest uses
  kDistanceLfu = 2,  // the smallest uses / (age + 1)^decay_exponent
  kLfuLru = 3,       // the smallest logarithm of uses (grown at random), then the oldest use
  kTtl = 4,          // the oldest use, and only if it is older than a limit
};

// A slot that lost its id.
struct TakenSlot {
  std::uint32_t slot;
  std::uint32_t owner;
};

struct SlotKey {
  std::uint64_t key;
  std::uint32_t slot;

  auto operator<=>(const SlotKey&) const = default;
};

inline constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
inline constexpr SlotKey kEnd{kNoLimit, ~std::uint32_t{0}};  // above every slot

class SlotOrder {
 public:
  SlotOrder(SlotPolicy policy, double decay_exponent)
      // Without decay the age does not matter.
      : policy_(policy == SlotPolicy::kDistanceLfu && decay_exponent == 0 ? SlotPolicy::kLfu
                                                                          : policy),
        decay_exponent_(decay_exponent) {}

  // What decides when the slot goes; smaller is earlier.
  std::uint64_t key(const SlotUse& use, std::uint64_t now) const;

  struct Request {
    std::size_t wanted = 0;
    std::uint64_t below = kNoLimit;  // only keys below it
    std::uint64_t now = 0;
    bool spare_used_now = false;            // not the slots that were last used now
    const std::uint64_t* spared = nullptr;  // a bit per slot; of those, only these are spared
    const std::uint32_t* pins = nullptr;    // slots with a number other than 0 stay
    int threads = 1;
  };
  // Frees (owner = 0) the first slots in order, and appends them to `taken`. `used` of the slots in
  // `uses` are not free.
  void take(std::span<SlotUse> uses, std::size_t used, const Request& request,
            std::vector<TakenSlot>& taken);
  // These slots, ascending, have new ids: used `now`, for the first time, so often.
  void note(std::span<const std::uint32_t> slots, const std::uint32_t* counts, std::uint64_t now);
  // Forgets the round, e.g. after keys became smaller.
  void reset();

 private:
  // The slots of one round, in order of the slots.
  void collect(std::span<const SlotUse> uses, SlotKey limit, const Request& request,
               std::vector<SlotKey>& all);
  SlotKey sampled_limit(std::span<const SlotUse> uses, std::size_t used, std::size_t size,
                        std::uint64_t now) const;
  // The slots of [begin, end) below the limit, in order of the slots.
  void scan(std::span<const SlotUse> uses, std::size_t begin, std::size_t end, SlotKey limit,
            std::uint64_t now, std::vector<SlotKey>& found) const;
  void merge(std::vector<SlotKey>& sorted);
  bool next(SlotKey& at) const;
  void pop();

  // kDistanceLfu: keys of slots that are not used become smaller, see slot_fading.cpp.
  void take_fading(std::span<SlotUse> uses, std::size_t used, const Request& request,
                   std::vector<TakenSlot>& taken);
  void start_fading_round(std::span<const SlotUse> uses, std::size_t used, std::size_t size,
                          const Request& request);
  struct FadedLimit {
    double below;        // smaller scores are below the limit, even as they are rounded
    double above;        // and these are not
    std::uint64_t same;  // the key of ids that are below it by their slots; kNoLimit: none
  };
  FadedLimit faded_limit(std::uint64_t now) const;
  std::size_t filter_fading(std::span<const SlotUse> uses, std::size_t begin, std::size_t end,
                            bool fresh, const FadedLimit& limit, const Request& request,
                            std::vector<SlotKey>& may_go);
  double power_of(std::uint64_t age) const;

  static bool stays(const SlotUse& use, std::uint32_t slot, const Request& request) {
    if (request.pins != nullptr && request.pins[slot] != 0) return true;
    if (!request.spare_used_now || use.last != request.now) return false;
    return request.spared == nullptr || (request.spared[slot / 64] >> slot % 64 & 1) != 0;
  }

  SlotPolicy policy_;
  double decay_exponent_;
  mutable std::vector<double> powers_;  // (age + 1)^decay_exponent by age

  SlotKey limit_{0, 0};         // all slots below it are in these lists
  std::vector<SlotKey> queue_;  // in order
  std::size_t head_ = 0;
  std::vector<SlotKey> raised_;  // a heap: they had smaller keys in the queue
  std::vector<SlotKey> added_;   // since the last request
  // Memory that is kept: fresh pages for every round cost more than the work on them.
  std::vector<SlotKey> merged_;
  std::vector<std::vector<SlotKey>> found_;
  std::vector<std::uint32_t> most_uses_;  // by age: a slot with more is above the limit

  std::vector<std::uint32_t> fading_;  // slots, ascending
  std::uint64_t fading_since_ = 0;     // time of the round
  bool limit_used_once_ = false;       // by the id of the limit's slot, at limit_last_
  std::uint64_t limit_last_ = 0;
};

}  // namespace dynamicemb
