// The order of kDistanceLfu, whose keys count / (age + 1)^d shrink while nothing is used.
//
// A round at time t0 collects every slot with (key, slot) below a limit (L, s). Any other key is at
// least F(t) = (L^(-1/d) + t - t0)^-d at time t: no id fades faster than one that was used once,
// and F is the key of such an id that had L. So while enough of the collected slots are below F, no
// other slot has to be looked at. Slots that get a new id or are used again are above F. Where the
// limit is the key of an id that was used once, those that were used with it have the key F as
// well.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "parallel.h"
#include "slot_order.h"

namespace dynamicemb {
namespace {

constexpr std::size_t kKnownAges = 1u << 16;
constexpr std::size_t kSmallRound = 1024;
constexpr double kRounding = 1e-9;  // more than the errors of a key and a limit together
constexpr double kLongAge = 1e8;    // keys of such ages differ by less than that

double score_of(std::uint64_t key) { return std::bit_cast<double>(key); }

// Drops slots that are not among the `wanted` smallest, as a sample says; the order stays.
void drop_large(std::vector<SlotKey>& slots, std::size_t wanted) {
  constexpr std::size_t kSample = 1024;
  if (slots.size() < 2 * wanted || slots.size() < 4 * kSample) return;
  std::vector<std::uint64_t> sample;
  for (std::size_t i = 0; i < slots.size(); i += slots.size() / kSample)
    sample.push_back(slots[i].key);
  const std::size_t rank = sample.size() * wanted / slots.size() + kSample / 16;
  if (rank >= sample.size()) return;
  const auto at = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), at, sample.end());
  const std::uint64_t most = *at;
  std::size_t small = 0;
  for (const SlotKey& one : slots) small += one.key <= most;
  if (small >= wanted) std::erase_if(slots, [&](const SlotKey& one) { return one.key > most; });
}

// Leaves the `wanted` smallest (key, slot), in order; `first` is memory to do it in. `slots` is in
// slot order. Ids with few uses and ages have few different keys: those are sorted, and the slots
// counted into place.
void sort_first(std::vector<SlotKey>& slots, std::size_t wanted, std::vector<SlotKey>& first) {
  constexpr std::size_t kPlaces = 4096, kMostKeys = 1024;
  struct Group {
    std::uint64_t key;
    std::size_t count;  // then: where its next slot goes
  };
  std::array<std::uint16_t, kPlaces> group_at{};  // open addressing: group + 1
  std::vector<Group> groups;
  std::vector<std::uint16_t> group_of(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t key = slots[i].key;
    std::size_t at = (key * 0x9e3779b97f4a7c15u) >> 52;
    while (group_at[at] != 0 && groups[group_at[at] - 1u].key != key) at = (at + 1) % kPlaces;
    if (group_at[at] == 0) {
      if (groups.size() == kMostKeys) {
        const auto end = slots.begin() + static_cast<std::ptrdiff_t>(wanted);
        std::nth_element(slots.begin(), end, slots.end());
        std::sort(slots.begin(), end);
        slots.resize(wanted);
        return;
      }
      groups.push_back({key, 0});
      group_at[at] = static_cast<std::uint16_t>(groups.size());
    }
    group_of[i] = static_cast<std::uint16_t>(group_at[at] - 1);
    ++groups[group_of[i]].count;
  }
  std::vector<std::uint16_t> order(groups.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::uint16_t>(i);
  std::sort(order.begin(), order.end(),
            [&](std::uint16_t a, std::uint16_t b) { return groups[a].key < groups[b].key; });
  std::size_t place = 0;
  for (const std::uint16_t group : order) place += std::exchange(groups[group].count, place);
  first.resize(wanted);
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (const std::size_t to = groups[group_of[i]].count++; to < wanted) first[to] = slots[i];
  slots.swap(first);
}

}  // namespace

double SlotOrder::power_of(std::uint64_t age) const {
  if (age >= kKnownAges) return std::pow(static_cast<double>(age) + 1, decay_exponent_);
  while (powers_.size() <= age)
    powers_.push_back(std::pow(static_cast<double>(powers_.size()) + 1, decay_exponent_));
  return powers_[age];
}

SlotOrder::FadedLimit SlotOrder::faded_limit(std::uint64_t now) const {
  const auto passed = static_cast<double>(now - fading_since_);
  // At least 1: that is what the ids have that came after the round, in its batch.
  const double age =
      limit_ == kEnd ? 1 : std::max(1.0, std::pow(score_of(limit_.key), -1 / decay_exponent_));
  const double score = std::pow(age + passed, -decay_exponent_);
  FadedLimit limit{score * (1 - kRounding), score * (1 + kRounding), kNoLimit};
  if (limit_used_once_ && age + passed < kLongAge * std::min(1.0, decay_exponent_))
    limit.same = key({limit_last_, 1, 0}, now);
  return limit;
}

void SlotOrder::start_fading_round(std::span<const SlotUse> uses, std::size_t used,
                                   std::size_t size, const Request& request) {
  limit_ = sampled_limit(uses, used, size, request.now);
  limit_used_once_ = limit_ != kEnd && uses[limit_.slot].count == 1 &&
                     uses[limit_.slot].last != request.now;  // new ids would be like it
  if (limit_used_once_) limit_last_ = uses[limit_.slot].last;
  collect(uses, limit_, request, merged_);
  fading_.clear();
  fading_.reserve(merged_.size());
  for (const SlotKey& at : merged_) fading_.push_back(at.slot);
  fading_since_ = request.now;
}

// Of fading_[begin, end): keeps those that are not far above the limit, and finds those below it.
std::size_t SlotOrder::filter_fading(std::span<const SlotUse> uses, std::size_t begin,
                                     std::size_t end, bool fresh, const FadedLimit& limit,
                                     const Request& request, std::vector<SlotKey>& may_go) {
  constexpr std::size_t kAhead = 32;
  const double* powers = powers_.data();
  const std::size_t known = powers_.size();
  std::size_t kept = begin;
  for (std::size_t i = begin; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(&uses[fading_[i + kAhead]]);
    const std::uint32_t slot = fading_[i];
    const SlotUse& use = uses[slot];
    if (use.owner == 0) continue;
    const std::uint64_t age = request.now - use.last;
    const double score = age < known ? static_cast<double>(use.count) / powers[age]
                                     : score_of(key(use, request.now));
    if (!fresh && score >= limit.above) continue;  // used since: like those not collected
    fading_[kept++] = slot;
    const auto present = std::bit_cast<std::uint64_t>(score);
    const bool below =
        fresh || score < limit.below || (present == limit.same && slot < limit_.slot);
    if (below && !stays(use, slot, request)) may_go.push_back({present, slot});
  }
  return kept - begin;
}

void SlotOrder::take_fading(std::span<SlotUse> uses, std::size_t used, const Request& request,
                            std::vector<TakenSlot>& taken) {
  constexpr std::size_t kPart = 1u << 14;
  std::vector<SlotKey>& may_go = queue_;
  bool fresh = false;  // a round of this request: all that was collected may go
  power_of(std::min<std::uint64_t>(request.now, kKnownAges - 1));
  for (std::size_t size = std::max({used / 32, 4 * request.wanted, kSmallRound});; size *= 4) {
    const FadedLimit limit = faded_limit(request.now);
    const std::size_t parts = (fading_.size() + kPart - 1) / kPart;
    std::vector<std::size_t> kept(parts);
    found_.resize(std::max(found_.size(), parts));
    parallel_for(request.threads, parts, [&](std::size_t part) {
      const std::size_t end = std::min(fading_.size(), (part + 1) * kPart);
      found_[part].clear();
      kept[part] = filter_fading(uses, part * kPart, end, fresh, limit, request, found_[part]);
    });
    may_go.clear();
    std::size_t left = 0;
    for (std::size_t part = 0; part < parts; ++part) {
      may_go.insert(may_go.end(), found_[part].begin(), found_[part].end());
      const auto begin = fading_.begin() + static_cast<std::ptrdiff_t>(part * kPart);
      std::copy_n(begin, kept[part], fading_.begin() + static_cast<std::ptrdiff_t>(left));
      left += kept[part];
    }
    fading_.resize(left);
    if (may_go.size() >= request.wanted || (fresh && limit_ == kEnd)) break;
    start_fading_round(uses, used, size, request);
    fresh = true;
  }
  const std::size_t going = std::min(request.wanted, may_go.size());
  drop_large(may_go, going);
  sort_first(may_go, going, merged_);
  for (const SlotKey& at : may_go)
    taken.push_back({at.slot, std::exchange(uses[at.slot].owner, 0u)});
}

}  // namespace dynamicemb
