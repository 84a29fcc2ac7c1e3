#include "free_slots.h"

#include <bit>
#include <utility>

namespace dynamicemb {

using std::size_t;
using std::uint32_t;
using std::uint64_t;

FreeSlots::FreeSlots(uint64_t capacity) : size_(capacity) {
  uint64_t bits = capacity;
  do {
    std::vector<uint64_t> words((bits + 63) / 64, ~uint64_t{0});
    if (bits % 64 != 0) words.back() = (uint64_t{1} << bits % 64) - 1;
    bits = words.size();
    levels_.push_back(std::move(words));
  } while (bits > 1);
}

void FreeSlots::take_lowest(size_t count, uint32_t* slots) {
  size_ -= count;
  while (count > 0) {
    uint64_t at = 0;
    for (size_t level = levels_.size(); level-- > 1;)
      at = at * 64 + static_cast<uint64_t>(std::countr_zero(levels_[level][at]));
    uint64_t word = levels_[0][at];
    for (; word != 0 && count > 0; word &= word - 1, --count)
      *slots++ = static_cast<uint32_t>(at * 64 + static_cast<uint64_t>(std::countr_zero(word)));
    levels_[0][at] = word;
    if (word == 0) empty(0, at);
  }
}

void FreeSlots::empty(size_t level, uint64_t word) {
  while (++level < levels_.size()) {
    uint64_t& above = levels_[level][word / 64];
    above &= ~(uint64_t{1} << word % 64);
    if (above != 0) return;
    word /= 64;
  }
}

void FreeSlots::take(uint32_t slot) {
  --size_;
  uint64_t& word = levels_[0][slot / 64];
  word &= ~(uint64_t{1} << slot % 64);
  if (word == 0) empty(0, slot / 64);
}

void FreeSlots::release(uint32_t slot) {
  ++size_;
  uint64_t at = slot;
  for (auto& words : levels_) {
    const bool was_empty = words[at / 64] == 0;
    words[at / 64] |= uint64_t{1} << at % 64;
    if (!was_empty) return;
    at /= 64;
  }
}

}  // namespace dynamicemb
