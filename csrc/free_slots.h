// Free slots, the lowest first: a tree of bit sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynamicemb {

class FreeSlots {
 public:
  explicit FreeSlots(std::uint64_t capacity);
  std::uint64_t size() const { return size_; }
  // The `count` lowest, ascending; there must be as many.
  void take_lowest(std::size_t count, std::uint32_t* slots);
  void take(std::uint32_t slot);  // it must be free
  void release(std::uint32_t slot);

 private:
  // levels_[level][word] has no bit any more: tells the levels above.
  void empty(std::size_t level, std::uint64_t word);

  std::vector<std::vector<std::uint64_t>> levels_;  // the last has one word
  std::uint64_t size_ = 0;
};

}  // namespace dynamicemb
