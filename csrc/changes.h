// What has changed in a table since a point in time, for incremental dumps.
//
// A row's record holds the stamp of the last batch that touched it. A mark is a stamp: rows with a
// larger one changed after it. Updates that come after the mark of a lookup that came before it
// stamp their rows again. Costs nothing until the first mark.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dynamicemb {

// Stamps have 32 bits in a record; a mark counts how often they started again.
inline std::uint64_t mark_of(std::uint32_t lap, std::uint32_t stamp) {
  return (std::uint64_t{lap} << 32) | stamp;
}

// The ids that left a table, in order. Holds at most `limit`: the oldest are forgotten first.
class RemovalLog {
 public:
  bool on() const { return on_; }
  // Starts, or changes the limit. What was removed up to `mark` is not known.
  void start(std::uint64_t mark, std::size_t limit);
  // Removed at `mark`, which is not before the last one. Without memory for them the log forgets
  // everything up to `mark`: unknown removals can be asked for elsewhere, missing ones cannot.
  void add(std::uint64_t mark, std::span<const std::uint64_t> ids) noexcept;
  // The oldest mark that since() can answer.
  std::uint64_t known_since() const { return known_since_; }
  // The ids removed after `mark`, oldest first; an id may come several times.
  std::vector<std::uint64_t> since(std::uint64_t mark) const;
  std::size_t bytes() const;

 private:
  struct Group {
    std::uint64_t mark;
    std::size_t end;  // in ids_
  };

  void shrink();

  bool on_ = false;
  std::size_t limit_ = 0;
  std::uint64_t known_since_ = 0;
  std::vector<std::uint64_t> ids_;
  std::vector<Group> groups_;
};

}  // namespace dynamicemb
