#include "changes.h"

#include <algorithm>
#include <new>
#include <unordered_set>

namespace dynamicemb {

void RemovalLog::start(std::uint64_t mark, std::size_t limit) {
  if (!on_) known_since_ = mark;
  on_ = true;
  limit_ = limit;
  if (ids_.size() > limit_) shrink();
}

void RemovalLog::add(std::uint64_t mark, std::span<const std::uint64_t> ids) noexcept {
  if (!on_ || ids.empty()) return;
  try {
    ids_.insert(ids_.end(), ids.begin(), ids.end());
    if (groups_.empty() || groups_.back().mark != mark) groups_.push_back({mark, 0});
    groups_.back().end = ids_.size();
    if (ids_.size() > limit_) shrink();
  } catch (const std::bad_alloc&) {
    ids_.clear();
    groups_.clear();
    known_since_ = mark;
  }
}

void RemovalLog::shrink() {
  // First keep only the last removal of every id; then forget the oldest groups, down to half, so
  // that the next shrink is far away.
  std::vector<bool> last(ids_.size());
  std::unordered_set<std::uint64_t> seen;
  seen.reserve(ids_.size());
  std::size_t kept = 0;
  for (std::size_t i = ids_.size(); i-- > 0;) kept += last[i] = seen.insert(ids_[i]).second;
  std::size_t surplus = kept > limit_ / 2 ? kept - limit_ / 2 : 0;
  if (kept <= limit_ / 4 * 3) surplus = 0;
  std::vector<std::uint64_t> ids;
  std::vector<Group> groups;
  std::size_t begin = 0;
  for (const Group& group : groups_) {
    const std::size_t before = ids.size();
    for (std::size_t i = begin; i < group.end; ++i)
      if (last[i]) ids.push_back(ids_[i]);
    begin = group.end;
    if (surplus > 0) {  // forget this one
      surplus -= std::min(surplus, ids.size() - before);
      ids.resize(before);
      known_since_ = std::max(known_since_, group.mark);
    } else if (ids.size() > before) {
      groups.push_back({group.mark, ids.size()});
    }
  }
  ids_ = std::move(ids);
  groups_ = std::move(groups);
}

std::vector<std::uint64_t> RemovalLog::since(std::uint64_t mark) const {
  const auto first = std::partition_point(
      groups_.begin(), groups_.end(), [mark](const Group& group) { return group.mark <= mark; });
  const std::size_t begin = first == groups_.begin() ? 0 : std::prev(first)->end;
  return {ids_.begin() + static_cast<std::ptrdiff_t>(begin), ids_.end()};
}

std::size_t RemovalLog::bytes() const {
  return ids_.capacity() * sizeof(std::uint64_t) + groups_.capacity() * sizeof(Group);
}

}  // namespace dynamicemb
