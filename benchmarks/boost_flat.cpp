// id -> slot with boost::unordered_flat_map, behind a C interface for ctypes. One thread.
#include <boost/unordered/unordered_flat_map.hpp>  // since Boost 1.81
#include <cstdint>

using Map = boost::unordered_flat_map<std::int64_t, std::int64_t>;

extern "C" {

// A map from ids[i] to i. The caller owns it and gives it to map_delete.
Map* map_new(const std::int64_t* ids, std::int64_t n) {
  auto* map = new Map;
  map->reserve(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) map->emplace(ids[i], i);
  return map;
}

void map_delete(Map* map) { delete map; }

// slots[i] = slot of ids[i], or -1.
void map_find(const Map* map, const std::int64_t* ids, std::int64_t n, std::int64_t* slots) {
  const auto end = map->end();
  for (std::int64_t i = 0; i < n; ++i) {
    const auto found = map->find(ids[i]);
    slots[i] = found == end ? -1 : found->second;
  }
}
}
