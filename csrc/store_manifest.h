// The list of segments that are a store's content, now or at a snapshot, as a small text file:
//
//   dynamicemb-ssd 2
//   store <id, 32 hexadecimal digits>
//   content                  or: snapshot <name>
//   rows <payload bytes> <block size> <records per segment>
//   next <number>
//   segment <number> <records, or "all"> <records that survive a crash of the machine>
//   holds <name of a snapshot> <its xxh64>
//   closed
//   note <hexadecimal bytes of the caller>
//   xxh64 <of everything above>
//
// Segments are in ascending order of their numbers, which is the order in which they were written.
// Of the present content, segments with a number of at least `next` are part as well, unless the
// store was closed: then there are none, and the snapshots are those that it holds.
//
// Format 1 has neither the lines "store", "content", "snapshot", "holds" and "closed" nor the last
// number of a segment.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "store_segment.h"

namespace dynamicemb {

struct Manifest {
  static constexpr uint64_t kAll = UINT64_MAX;
  struct Entry {
    uint64_t number;
    uint64_t records;      // that count; kAll: every one
    uint64_t durable = 0;  // that must be there
  };

  SegmentShape shape;
  uint64_t next = 0;
  std::vector<Entry> segments;
  std::string note;
  std::string snapshot;                   // its name; empty: the present content
  bool closed = false;                    // nothing was written after it
  std::map<std::string, uint64_t> holds;  // the snapshots of a closed store, with their sums
  bool older = false;                     // it was read from format 1

  std::string text() const;
  uint64_t sum() const;  // the last line of the text
  // CorruptStore if it is not such a text, or damaged.
  static Manifest parse(const std::string& text, const std::string& path);

 private:
  std::string body() const;
};

}  // namespace dynamicemb
