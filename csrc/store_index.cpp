#include "store_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "hash.h"

namespace dynamicemb {
namespace {

constexpr uint64_t kFirst = 16;

}  // namespace

uint64_t StoreIndex::bytes() const {
  uint64_t bytes = sizeof(*this);
  for (const Part& part : parts_) bytes += part.hashes.capacity() * 8 + part.places.capacity() * 4;
  return bytes;
}

uint64_t StoreIndex::Part::seek(uint64_t hash) const {
  uint64_t at = home(hash);
  while (at < places.size() && places[at] != kNone && hashes[at] < hash) ++at;
  return at;
}

uint32_t StoreIndex::find(uint64_t id) const {
  const uint64_t hash = hash_id(id);
  const Part& part = parts_[hash >> 56];
  const uint64_t at = part.seek(hash);
  return at < part.places.size() && part.places[at] != kNone && part.hashes[at] == hash
             ? part.places[at]
             : kNone;
}

void StoreIndex::prefetch(uint64_t id) const {
  const uint64_t hash = hash_id(id);
  const Part& part = parts_[hash >> 56];
  if (part.homes == 0) return;
  const uint64_t at = part.home(hash);
  __builtin_prefetch(&part.hashes[at]);
  __builtin_prefetch(&part.places[at]);
}

void StoreIndex::find(const uint64_t* ids, size_t n, uint32_t* places) const {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch(ids[i + kAhead]);
    places[i] = find(ids[i]);
  }
}

uint32_t StoreIndex::set(uint64_t id, uint32_t place) {
  const uint64_t hash = hash_id(id);
  Part& part = parts_[hash >> 56];
  uint64_t at = part.seek(hash);
  if (at < part.places.size() && part.places[at] != kNone && part.hashes[at] == hash) {
    return std::exchange(part.places[at], place);
  }
  if ((part.count + 1) * 25 > part.homes * 22) {
    part.resize(std::max(kFirst, part.homes + part.homes / 8));
    at = part.seek(hash);
  }
  while (!part.insert(at, hash, place)) {
    part.resize(part.homes + std::max<uint64_t>(8, part.homes / 8));
    at = part.seek(hash);
  }
  ++size_;
  return kNone;
}

bool StoreIndex::Part::insert(uint64_t at, uint64_t hash, uint32_t place) {
  uint64_t end = at;
  while (end < places.size() && places[end] != kNone) ++end;
  if (end == places.size()) return false;
  std::memmove(&hashes[at] + 1, &hashes[at], (end - at) * 8);
  std::memmove(&places[at] + 1, &places[at], (end - at) * 4);
  hashes[at] = hash;
  places[at] = place;
  ++count;
  return true;
}

uint32_t StoreIndex::erase(uint64_t id) {
  const uint64_t hash = hash_id(id);
  Part& part = parts_[hash >> 56];
  uint64_t at = part.seek(hash);
  if (at >= part.places.size() || part.places[at] == kNone || part.hashes[at] != hash) return kNone;
  const uint32_t place = part.places[at];
  // Those behind it that are not at home move up.
  for (uint64_t next = at + 1; next < part.places.size() && part.places[next] != kNone &&
                               part.home(part.hashes[next]) < next;
       ++next, ++at) {
    part.hashes[at] = part.hashes[next];
    part.places[at] = part.places[next];
  }
  part.places[at] = kNone;
  --part.count;
  --size_;
  return place;
}

void StoreIndex::Part::resize(uint64_t wanted) {
  for (;; wanted += wanted / 8) {
    const uint64_t length = wanted + 32 + wanted / 256;
    Part grown;
    grown.hashes = std::vector<uint64_t>(length);
    grown.places = std::vector<uint32_t>(length, kNone);
    grown.homes = wanted;
    uint64_t next = 0;  // entries come in ascending order: none is shifted
    bool fits = true;
    for (uint64_t i = 0; i < places.size() && fits; ++i) {
      if (places[i] == kNone) continue;
      const uint64_t at = std::max(next, grown.home(hashes[i]));
      fits = at < length;
      if (!fits) break;
      grown.hashes[at] = hashes[i];
      grown.places[at] = places[i];
      next = at + 1;
    }
    if (!fits) continue;
    grown.count = count;
    *this = std::move(grown);
    return;
  }
}

}  // namespace dynamicemb
