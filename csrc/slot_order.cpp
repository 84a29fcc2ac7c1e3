#include "slot_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <utility>

#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr std::size_t kSample = 4096;      // slots that a limit is estimated from
constexpr std::size_t kChunk = 1u << 16;   // slots per task of a scan
constexpr std::size_t kPart = 512;         // slots of a scan that are collected together
constexpr std::size_t kSmallRound = 1024;  // slots of a round, at least
constexpr int kLogShift = 59;              // kLfuLru: five bits of logarithm above the time
constexpr std::uint64_t kLargestScore = 0x7fefffffffffffff;  // the bits of the largest double

std::uint64_t lfu_lru_key(const SlotUse& use) {
  return (std::uint64_t{use.count} << kLogShift) |
         (use.last & ((std::uint64_t{1} << kLogShift) - 1));
}

// Sorts by (key, slot) what is in the order of the slots: least significant digits first, and only
// bits that differ. `other` is memory to do it in.
void sort_by_key(std::vector<SlotKey>& slots, std::vector<SlotKey>& other) {
  if (slots.empty()) return;
  constexpr int kDigit = 11;
  std::uint64_t differ = 0;
  for (const SlotKey& at : slots) differ |= at.key ^ slots[0].key;
  if (differ != 0) other.resize(slots.size());
  std::vector<std::uint32_t> places(std::size_t{1} << kDigit);
  while (differ != 0) {
    const int shift = std::countr_zero(differ);
    const std::uint64_t mask =
        std::min<std::uint64_t>(std::bit_ceil((differ >> shift) + 1), 1u << kDigit) - 1;
    const auto digit = [&](const SlotKey& at) { return (at.key >> shift) & mask; };
    differ &= ~(mask << shift);
    std::fill(places.begin(), places.end(), 0);
    for (const SlotKey& at : slots) ++places[digit(at)];
    std::uint32_t place = 0;
    for (std::uint32_t& count : places) place += std::exchange(count, place);
    for (const SlotKey& at : slots) other[places[digit(at)]++] = at;
    slots.swap(other);
  }
}

// Sorts notes: in the order of the slots if they are of one batch.
void sort_slots(std::vector<SlotKey>& notes, std::vector<SlotKey>& other) {
  const auto by_slot = [](const SlotKey& a, const SlotKey& b) { return a.slot < b.slot; };
  if (std::is_sorted(notes.begin(), notes.end(), by_slot)) return sort_by_key(notes, other);
  std::sort(notes.begin(), notes.end());
}

}  // namespace

std::uint64_t SlotOrder::key(const SlotUse& use, std::uint64_t now) const {
  switch (policy_) {
    case SlotPolicy::kLru:
    case SlotPolicy::kTtl:
      return use.last;
    case SlotPolicy::kLfu:
      return use.count;
    case SlotPolicy::kLfuLru:
      return lfu_lru_key(use);
    case SlotPolicy::kDistanceLfu:
      break;
  }
  // The bits of doubles that are not negative have the order of their values.
  return std::bit_cast<std::uint64_t>(static_cast<double>(use.count) / power_of(now - use.last));
}

void SlotOrder::reset() {
  limit_ = {0, 0};
  queue_.clear();
  head_ = 0;
  raised_.clear();
  added_.clear();
  fading_.clear();
  limit_used_once_ = false;
}

SlotKey SlotOrder::sampled_limit(std::span<const SlotUse> uses, std::size_t used, std::size_t size,
                                 std::uint64_t now) const {
  if (size >= used / 4 * 3) return kEnd;
  std::vector<SlotKey> sample;
  const std::size_t step = std::max<std::size_t>(1, uses.size() / kSample);
  for (std::size_t slot = 0; slot < uses.size(); slot += step)
    if (uses[slot].owner != 0)
      sample.push_back({key(uses[slot], now), static_cast<std::uint32_t>(slot)});
  const std::size_t rank = sample.size() * size / used;
  if (rank >= sample.size()) return kEnd;
  const auto at = sample.begin() + static_cast<std::ptrdiff_t>(rank);
  std::nth_element(sample.begin(), at, sample.end());
  return *at;
}

void SlotOrder::scan(std::span<const SlotUse> uses, std::size_t begin, std::size_t end,
                     SlotKey limit, std::uint64_t now, std::vector<SlotKey>& found) const {
  if (policy_ == SlotPolicy::kDistanceLfu) {
    // A key costs a division, and most slots are far above the limit: a cheap test first.
    const std::uint32_t* most = most_uses_.data();
    const std::size_t known = most_uses_.size();
    for (std::size_t slot = begin; slot < end; ++slot) {
      const std::uint64_t age = now - uses[slot].last;
      if (uses[slot].owner == 0 || (age < known && uses[slot].count > most[age])) continue;
      const SlotKey at{key(uses[slot], now), static_cast<std::uint32_t>(slot)};
      if (at < limit) found.push_back(at);
    }
    return;
  }
  const auto append = [&](auto key_of) {  // without branches: any share of them may be below
    std::array<SlotKey, kPart> part;
    for (std::size_t at = begin; at < end; at += kPart) {
      std::size_t kept = 0;
      for (std::size_t slot = at; slot < std::min(end, at + kPart); ++slot) {
        const std::uint64_t present = key_of(uses[slot]);
        part[kept] = {present, static_cast<std::uint32_t>(slot)};
        const bool below = (present < limit.key) | ((present == limit.key) & (slot < limit.slot));
        kept += below & (uses[slot].owner != 0);
      }
      found.insert(found.end(), part.begin(), part.begin() + static_cast<std::ptrdiff_t>(kept));
    }
  };
  switch (policy_) {
    case SlotPolicy::kLru:
    case SlotPolicy::kTtl:
      return append([](const SlotUse& use) { return use.last; });
    case SlotPolicy::kLfu:
      return append([](const SlotUse& use) { return std::uint64_t{use.count}; });
    default:
      return append(lfu_lru_key);
  }
}

void SlotOrder::collect(std::span<const SlotUse> uses, SlotKey limit, const Request& request,
                        std::vector<SlotKey>& all) {
  const std::size_t chunks = (uses.size() + kChunk - 1) / kChunk;
  found_.resize(chunks);
  most_uses_.clear();
  if (policy_ == SlotPolicy::kDistanceLfu) {
    // A little more than the limit, for the rounding of the product.
    const double score = std::bit_cast<double>(std::min(limit.key, kLargestScore)) * (1 + 1e-9);
    constexpr double kMost = 4294967295.0;
    for (const double power : powers_) {
      const double uses_most = score * power;  // not a number where a power is infinite
      most_uses_.push_back(static_cast<std::uint32_t>(uses_most < kMost ? uses_most : kMost));
    }
  }
  all.clear();
  if (request.threads <= 1) return scan(uses, 0, uses.size(), limit, request.now, all);
  parallel_for(request.threads, chunks, [&](std::size_t chunk) {
    const std::size_t end = std::min(uses.size(), (chunk + 1) * kChunk);
    found_[chunk].clear();
    scan(uses, chunk * kChunk, end, limit, request.now, found_[chunk]);
  });
  for (const auto& part : found_) all.insert(all.end(), part.begin(), part.end());
}

void SlotOrder::note(std::span<const std::uint32_t> slots, const std::uint32_t* counts,
                     std::uint64_t now) {
  if (policy_ == SlotPolicy::kDistanceLfu) return;  // never below a faded limit
  if ((policy_ == SlotPolicy::kLru || policy_ == SlotPolicy::kTtl) && now > limit_.key) return;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const SlotKey at{key({now, counts[i], 0}, now), slots[i]};
    if (at < limit_) added_.push_back(at);
  }
}

void SlotOrder::merge(std::vector<SlotKey>& sorted) {
  if (sorted.empty()) return;
  merged_.clear();
  merged_.reserve(queue_.size() - head_ + sorted.size());
  std::merge(queue_.begin() + static_cast<std::ptrdiff_t>(head_), queue_.end(), sorted.begin(),
             sorted.end(), std::back_inserter(merged_));
  queue_.swap(merged_);
  head_ = 0;
  sorted.clear();
}

bool SlotOrder::next(SlotKey& at) const {
  const bool queued = head_ < queue_.size(), raised = !raised_.empty();
  if (!queued && !raised) return false;
  at = !raised || (queued && queue_[head_] < raised_.front()) ? queue_[head_] : raised_.front();
  return true;
}

void SlotOrder::pop() {
  if (raised_.empty() || (head_ < queue_.size() && queue_[head_] < raised_.front())) {
    ++head_;
    return;
  }
  std::pop_heap(raised_.begin(), raised_.end(), std::greater<>());
  raised_.pop_back();
}

void SlotOrder::take(std::span<SlotUse> uses, std::size_t used, const Request& request,
                     std::vector<TakenSlot>& taken) {
  if (request.wanted == 0 || used == 0) return;
  if (policy_ == SlotPolicy::kDistanceLfu) return take_fading(uses, used, request, taken);
  constexpr std::size_t kAhead = 32;
  // Notes of slots that came and went pile up where nothing is ever taken.
  if (added_.size() > 2 * uses.size()) reset();
  sort_slots(added_, merged_);
  merge(added_);
  // A round serves several requests, but before a large one many slots have been used again.
  const bool large = request.wanted >= used / 8;
  std::size_t size =
      std::max({used / 16, large ? request.wanted + used / 16 : 4 * request.wanted, kSmallRound});
  std::size_t left = request.wanted, stale = 0;
  std::vector<SlotKey> held;
  taken.reserve(taken.size() + std::min(left, used));
  if (large) reset();
  while (left > 0) {
    SlotKey at;
    if (!next(at)) {
      if (limit_ == kEnd || used == 0) break;
      held.clear();  // the round finds them again
      reset();
      const SlotKey limit = sampled_limit(uses, used, size, request.now);
      collect(uses, limit, request, queue_);
      sort_by_key(queue_, merged_);
      limit_ = limit;
      size *= 4;
      continue;
    }
    if (at.key >= request.below) break;
    pop();
    if (head_ + kAhead < queue_.size()) __builtin_prefetch(&uses[queue_[head_ + kAhead].slot], 1);
    SlotUse& use = uses[at.slot];
    if (use.owner == 0) continue;
    const std::uint64_t present = key(use, request.now);
    if (present != at.key) {
      if (++stale > request.wanted + used / 8) {  // a new round is cheaper than sorting them in
        held.clear();
        reset();
        continue;
      }
      // Used since. A smaller key belongs to a new id, which was noted.
      if (const SlotKey now{present, at.slot}; present > at.key && now < limit_) {
        raised_.push_back(now);
        std::push_heap(raised_.begin(), raised_.end(), std::greater<>());
      }
      continue;
    }
    if (stays(use, at.slot, request)) {
      held.push_back(at);
      continue;
    }
    taken.push_back({at.slot, use.owner});
    use.owner = 0;
    --left;
    --used;
  }
  merge(held);
}

}  // namespace dynamicemb
