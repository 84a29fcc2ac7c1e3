// The opening half of SsdStore: what belongs to the content, and what a crash left.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>

#include "store.h"

namespace dynamicemb {
namespace {

constexpr size_t kManifestLimit = size_t{12} << 20;  // half a million segments, each an open file

bool has_flushed(const SegmentContent& content) {
  return std::find(content.kinds.begin(), content.kinds.end(), uint8_t{kFlushed}) !=
         content.kinds.end();
}

}  // namespace

// A segment that is being opened. `durable`: its records that must be there.
struct SsdStore::Loaded {
  std::unique_ptr<LogSegment> segment;
  SegmentContent content;
  uint64_t number = 0, durable = 0;
  bool summary = false;
  bool limited = false;
};

Manifest SsdStore::read_manifest(const std::string& path, const std::string& snapshot) {
  Manifest manifest = Manifest::parse(files_->read_text(path, kManifestLimit), path);
  if (!manifest.older && manifest.snapshot != snapshot)
    throw CorruptStore(
        path, "it is " + (manifest.snapshot.empty() ? std::string("the manifest of a store")
                                                    : "the snapshot '" + manifest.snapshot + "'"));
  if (manifest.shape.payload != shape_.payload)
    throw std::invalid_argument("the rows at " + config_.path + " have " +
                                std::to_string(manifest.shape.payload) + " bytes; expected " +
                                std::to_string(shape_.payload));
  return manifest;
}

void SsdStore::open_snapshot() {
  const std::string path = snapshot_path(config_.snapshot);
  if (!files_->exists(path)) throw StoreError(ENOENT, path, "no snapshot");
  const Manifest manifest = read_manifest(path, config_.snapshot);
  shape_ = manifest.shape;
  older_ = manifest.older;
  content_ = replay(manifest.segments, false);
  reading_ = true;
}

void SsdStore::open_folder() {
  for (const char* part : {"", "/segments", "/snapshots"}) files_->make_folder(config_.path + part);
  auto lock = std::make_unique<FolderLock>(config_.path + "/LOCK");
  const std::string path = config_.path + "/MANIFEST";
  if (!files_->exists(path)) {
    if (!segments_on_disk().empty())
      throw CorruptStore(path, "missing, although there are segments");
    shape_.store = StoreId::random();
    write_manifest(empty_manifest());
  }
  const Manifest manifest = read_manifest(path, "");
  shape_ = manifest.shape;  // block and capacity are fixed when the folder is made
  older_ = manifest.older;
  read_snapshots(manifest);
  std::vector<Manifest::Entry> entries = manifest.segments;
  next_number_ = manifest.next;
  for (const Manifest::Entry& newer : newer_segments(manifest)) entries.push_back(newer);
  content_ = replay(entries, true);
  next_number_ = manifest.next;
  if (!content_.segments.empty())
    next_number_ = std::max(next_number_, content_.segments.back()->number() + 1);
  for (const auto& segment : content_.segments) {
    on_disk_.insert(segment->number());
    unflushed_ = unflushed_ || segment->durable() < segment->records();
  }
  if (older_ && !shape_.store.known()) shape_.store = StoreId::random();
  if (manifest.closed) write_manifest(present());  // before anything else is written
  remove_unused_files();
  lock_ = std::move(lock);
}

void SsdStore::read_snapshots(const Manifest& content) {
  for (const std::string& name : files_->list(config_.path + "/snapshots")) {
    const std::string file = snapshot_path(name);
    Manifest manifest = read_manifest(file, name);
    if (manifest.older && !older_)
      throw CorruptStore(file, "it has format 1, and the manifest has format 2");
    if (older_ && !shape_.store.known()) shape_.store = manifest.shape.store;
    if (!manifest.older && manifest.shape.store != shape_.store)
      throw CorruptStore(file, "it belongs to another store");
    const auto held = content.holds.find(name);
    if (held != content.holds.end() && held->second != manifest.sum())
      throw CorruptStore(file, "it is not the one that was there when the store was closed");
    for (const Manifest::Entry& entry : manifest.segments) on_disk_.insert(entry.number);
    snapshots_[name] = std::move(manifest);
  }
  for (const auto& [name, sum] : content.holds)
    if (!snapshots_.contains(name))
      throw CorruptStore(snapshot_path(name), "this snapshot is missing");
}

std::vector<uint64_t> SsdStore::segments_on_disk() const {
  std::vector<uint64_t> numbers;  // ascending, as their names are
  for (const std::string& name : files_->list(config_.path + "/segments")) {
    unsigned long long number = 0;
    if (std::sscanf(name.c_str(), "%12llu", &number) == 1 &&
        segment_path(number) == config_.path + "/segments/" + name)
      numbers.push_back(number);
  }
  return numbers;
}

std::unique_ptr<LogSegment> SsdStore::open_segment(uint64_t number) {
  return LogSegment::open(*files_, shape_, segment_path(number), number, config_.direct, older_);
}

// The segments that were written after the manifest. Finds files that nothing needs.
std::vector<Manifest::Entry> SsdStore::newer_segments(const Manifest& manifest) {
  std::set<uint64_t> needed = on_disk_;  // by snapshots
  for (const Manifest::Entry& entry : manifest.segments) needed.insert(entry.number);
  std::vector<Manifest::Entry> newer;
  bool gap = false;
  for (const uint64_t number : segments_on_disk()) {
    const bool after = number >= manifest.next && !manifest.closed;
    if (!after && needed.contains(number)) continue;
    const auto segment = open_segment(number);
    const Origin origin = segment->origin();
    if (!after) {
      if (origin == Origin::kHere && number >= manifest.next)
        throw CorruptStore(segment->path(), "it is newer than MANIFEST, which closed the store");
      if (origin == Origin::kHere || origin == Origin::kUnwritten)
        on_disk_.insert(number);  // an earlier process could not remove it, or had no time to
      else
        set_aside(number);
      continue;
    }
    if (origin == Origin::kElsewhere) throw CorruptStore(segment->path(), segment->problem());
    // If the machine went down before the folder was synced, nothing behind a gap was flushed.
    gap = gap || number != next_number_;
    if (!gap) {
      newer.push_back({number, Manifest::kAll});
      next_number_ = number + 1;
      continue;
    }
    SegmentContent content;
    if (!segment->read_summary(content)) content = segment->scan();
    if (has_flushed(content))
      throw CorruptStore(segment_path(next_number_), "this segment is missing");
    set_aside(number);
  }
  return newer;
}

void SsdStore::set_aside(uint64_t number) {
  const std::string path = segment_path(number), folder = config_.path + "/set-aside";
  files_->make_folder(folder);
  std::string to;
  for (int i = 1; to.empty() || files_->exists(to); ++i)
    to = folder + path.substr(path.rfind('/')) + '.' + std::to_string(i);
  files_->rename(path, to);
  counts_.set_aside.push_back(to);
}

SsdStore::Content SsdStore::replay(const std::vector<Manifest::Entry>& entries, bool recover) {
  std::vector<Loaded> all;
  for (const auto& [number, records, durable] : entries) {
    const std::string path = segment_path(number);
    if (!files_->exists(path)) throw CorruptStore(path, "this segment is missing");
    Loaded one;
    one.number = number;
    one.limited = records != Manifest::kAll;
    one.durable = one.limited ? records : durable;
    one.segment = open_segment(number);
    one.summary = one.segment->read_summary(one.content);
    if (!one.summary) one.content = one.segment->scan();
    const Origin origin = one.segment->origin();
    if (origin != Origin::kHere) {
      // A file that a crash left unfinished has no record yet.
      if (origin == Origin::kElsewhere || !recover || one.durable > 0 || !one.content.kinds.empty())
        throw CorruptStore(path, one.segment->problem());
      one.content = {{0}, {kDamaged}};
    }
    if (one.content.ids.size() < one.durable)
      throw CorruptStore(path, "records are missing at its end: it has " +
                                   std::to_string(one.content.ids.size()) + " of " +
                                   std::to_string(one.durable));
    if (one.limited) {
      one.content.ids.resize(records);
      one.content.kinds.resize(records);
    }
    all.push_back(std::move(one));
  }
  if (recover) verify_tail(all);

  Content content;
  for (Loaded& one : all) {
    const std::vector<uint8_t>& kinds = one.content.kinds;
    for (uint64_t place = 0; place < kinds.size(); ++place)
      if (kinds[place] == kDamaged) one.segment->damaged(place);
    one.segment->set_records(kinds.size());
    one.segment->set_durable(one.durable);
    if (one.limited) one.segment->set_limited();
    content.records += kinds.size();
    LogSegment& segment = *one.segment;
    const uint64_t base = content.add(std::move(one.segment)) * shape_.capacity;
    AlignedBuffer buffer;
    for (uint64_t place = 0; place < kinds.size(); ++place) {
      if (kinds[place] == kRow) {
        content.index.set(one.content.ids[place], static_cast<uint32_t>(base + place));
      } else if (kinds[place] == kErased) {
        const RecordHeader* record = segment.read(place, buffer);
        const auto* ids = reinterpret_cast<const std::byte*>(record + 1);
        for (uint32_t i = 0; i < record->count; ++i) {
          uint64_t id;
          std::memcpy(&id, ids + 8 * i, 8);
          content.index.erase(id);
        }
      }
    }
    if (!one.summary && !one.limited) segment.finish(one.content);  // written with the next rows
  }
  return content;
}

// What was flushed, or counted by the manifest, must be intact; what comes after it counts up to
// the first damage.
void SsdStore::verify_tail(std::vector<Loaded>& all) {
  size_t flushed = 0;  // segments up to here hold such records, `within` of the last one
  uint64_t within = 0;
  for (size_t k = all.size(); k > 0 && flushed == 0; --k) {
    const std::vector<uint8_t>& kinds = all[k - 1].content.kinds;
    const auto last = std::find(kinds.rbegin(), kinds.rend(), uint8_t{kFlushed});
    within = std::max(static_cast<uint64_t>(kinds.rend() - last), all[k - 1].durable);
    if (within > 0) flushed = k;
  }
  for (size_t k = flushed > 0 ? flushed - 1 : 0; k < all.size(); ++k) {
    const uint64_t begin = k + 1 == flushed ? within : 0;
    SegmentContent& content = all[k].content;
    if (begin == content.kinds.size() && begin > 0) continue;
    if (all[k].summary) {  // the summary may have been faster than the records
      SegmentContent scanned = all[k].segment->scan();
      scanned.kinds.resize(content.kinds.size(), kDamaged);
      std::copy(scanned.kinds.begin() + static_cast<std::ptrdiff_t>(begin), scanned.kinds.end(),
                content.kinds.begin() + static_cast<std::ptrdiff_t>(begin));
    }
    const auto from = content.kinds.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto bad = std::find(from, content.kinds.end(), uint8_t{kDamaged});
    if (bad == content.kinds.end()) continue;
    content.kinds.erase(bad, content.kinds.end());
    content.ids.resize(content.kinds.size());
    all[k].summary = false;
    const size_t keep = content.kinds.empty() ? k : k + 1;
    for (size_t last = all.size(); last > keep; --last) {  // the newest first: no gap after a crash
      if (all[last - 1].segment->origin() == Origin::kUnknown)
        set_aside(all[last - 1].number);
      else
        files_->remove(segment_path(all[last - 1].number));
    }
    all.resize(keep);
    return;
  }
}

}  // namespace dynamicemb
