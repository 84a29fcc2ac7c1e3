// The list of segments that are a store's content, now or at a snapshot, as a small text file:
//
//   dynamicemb-ssd 1
//   rows <payload bytes> <block size> <records per segment>
//   next <number>
//   segment <number> <records, or "all">
//   note <hexadecimal bytes of the caller>
//   xxh64 <of everything above>
//
// Segments are in ascending order of their numbers, which is the order in which they were written.
// Of the present content, segments with a number of at least `next` are part as well.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "store_segment.h"

namespace dynamicemb {

struct Manifest {
  static constexpr uint64_t kAll = UINT64_MAX;
  struct Entry {
    uint64_t number;
    uint64_t records;  // that count; kAll: every one
  };

  SegmentShape shape;
  uint64_t next = 0;
  std::vector<Entry> segments;
  std::string note;

  std::string text() const;
  // CorruptStore if it is not such a text, or damaged.
  static Manifest parse(const std::string& text, const std::string& path);
};

}  // namespace dynamicemb
