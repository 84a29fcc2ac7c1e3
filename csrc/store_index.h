// Where the rows of an SSD store are: id -> 32-bit place, in at most 16 bytes per row.
//
// Ordered linear probing: the hash is a bijection and an entry's home is monotone in it, so the
// entries of an array lie in ascending order of their hashes, and a search ends at the first larger
// one, hit or miss. That allows 88 % load. Arrays grow by an eighth, one of 256 at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dynamicemb {

class StoreIndex {
 public:
  static constexpr uint32_t kNone = 0xffffffff;

  uint64_t size() const { return size_; }
  uint64_t bytes() const;
  uint32_t find(uint64_t id) const;
  // Starts to load what find() or set() of this id will look at.
  void prefetch(uint64_t id) const;
  void find(const uint64_t* ids, size_t n, uint32_t* places) const;
  // The place before, or kNone.
  uint32_t set(uint64_t id, uint32_t place);
  uint32_t erase(uint64_t id);

 private:
  struct Part {
    std::vector<uint64_t> hashes;
    std::vector<uint32_t> places;  // kNone: empty
    uint64_t homes = 0;            // the arrays are a little longer, for the last run
    uint64_t count = 0;

    uint64_t home(uint64_t hash) const { return ((hash << 8 >> 32) * homes) >> 32; }
    // The first entry from its home on that is empty or has a hash of at least `hash`.
    uint64_t seek(uint64_t hash) const;
    bool insert(uint64_t at, uint64_t hash, uint32_t place);
    void resize(uint64_t homes);
  };

  std::array<Part, 256> parts_;
  uint64_t size_ = 0;
};

}  // namespace dynamicemb
