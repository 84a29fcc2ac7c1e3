// The writing half of SsdStore: appending, flushing, cleaning, snapshots.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>

#include "store.h"

namespace dynamicemb {
namespace {

constexpr size_t kAhead = 16;                // ids whose place in the index is loaded ahead
constexpr size_t kWrite = (1 << 20) + 8192;  // bytes that wait before they are written

}  // namespace

void SsdStore::start_segment() {
  if (active_ != nullptr) active_->finish(active_content_);
  active_ = nullptr;
  if (content_.by_ordinal.size() * shape_.capacity >= StoreIndex::kNone - shape_.capacity &&
      std::find(content_.by_ordinal.begin(), content_.by_ordinal.end(), nullptr) ==
          content_.by_ordinal.end())
    throw StoreError(EFBIG, config_.path, "more than 2^32 records in");
  auto segment = std::make_unique<LogSegment>(*files_, shape_, segment_path(next_number_),
                                              next_number_, config_.direct);
  active_ = segment.get();
  active_ordinal_ = content_.add(std::move(segment));
  active_content_ = {};
  on_disk_.insert(next_number_);
  ++next_number_;
}

std::byte* SsdStore::append(uint64_t id, RecordKind kind, uint32_t count, uint32_t& place) {
  if (active_ == nullptr || active_->full()) start_segment();
  place = static_cast<uint32_t>(active_ordinal_ * shape_.capacity + active_->records());
  active_content_.ids.push_back(id);
  active_content_.kinds.push_back(static_cast<uint8_t>(kind));
  ++content_.records;
  unflushed_ = true;
  return active_->append(id, kind, count);
}

void SsdStore::insert(const uint64_t* ids, size_t n, std::span<const Column> columns) {
  const auto lock = writing();
  checked(columns);
  // Written while it is in the processor's caches. A failure waits until all rows are taken.
  std::exception_ptr failure;
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) content_.index.prefetch(ids[i + kAhead]);
    uint32_t place;
    std::byte* payload = append(ids[i], kRow, 0, place);
    for (const Column& column : columns) {
      if (column.bytes != 0) std::memcpy(payload, column.data + i * column.bytes, column.bytes);
      payload += column.bytes;
    }
    active_->seal_record();
    content_.index.set(ids[i], place);
    if (!failure && active_->pending() >= kWrite) {
      try {
        drain(false);
      } catch (const StoreError&) {
        failure = std::current_exception();
      }
    }
  }
  if (failure) std::rethrow_exception(failure);
  drain(false);
  clean(3 * n);
}

void SsdStore::erase(const uint64_t* ids, size_t n, bool* removed) {
  const auto lock = writing();
  std::vector<uint64_t> gone;
  for (size_t i = 0; i < n; ++i) {
    removed[i] = content_.index.erase(ids[i]) != StoreIndex::kNone;
    if (removed[i]) gone.push_back(ids[i]);
  }
  const size_t together = shape_.payload / 8;
  for (size_t begin = 0; begin < gone.size(); begin += together) {
    const size_t count = std::min(together, gone.size() - begin);
    uint32_t place;
    std::memcpy(append(0, kErased, static_cast<uint32_t>(count), place), &gone[begin], count * 8);
    active_->seal_record();
  }
  drain(false);
  clean(3 * n);
}

void SsdStore::drain(bool all) {
  if (manifest_in_doubt_) settle();  // it may say that nothing comes after it
  for (const auto& segment : content_.segments) {
    if (segment->pending() == 0 || segment->suspect()) continue;
    if (!segment->has_file()) new_files_ = true;
    segment->write(all || segment.get() != active_);
  }
}

void SsdStore::make_durable() {
  drain(true);
  for (const auto& segment : content_.segments) {
    if (segment->suspect()) continue;
    try {
      segment->sync();
    } catch (const StoreError&) {
      if (segment.get() == active_) active_ = nullptr;
      throw;
    }
  }
  if (new_files_) {
    files_->sync_folder(config_.path + "/segments");
    new_files_ = false;
  }
}

void SsdStore::flush() {
  const auto lock = writing();
  flush_locked();
}

void SsdStore::flush_locked() {
  replace_suspects();
  std::vector<LogSegment*> retired;
  for (const auto& segment : content_.segments)
    if (segment->retired()) retired.push_back(segment.get());
  if (unflushed_ || !retired.empty()) make_durable();
  if (!retired.empty()) drop(retired);
  settle();
  if (unflushed_) {
    uint32_t place;
    append(0, kFlushed, 0, place);
    active_->seal_record();
    make_durable();
    unflushed_ = false;
  }
  remove_unused_files();
}

void SsdStore::replace_suspects() {
  std::vector<LogSegment*> suspects;
  for (const auto& segment : content_.segments)
    if (segment->suspect() && !segment->retired()) suspects.push_back(segment.get());
  for (LogSegment* segment : suspects) {
    relocate(*segment, segment == content_.segments.front().get());
    segment->retire();
  }
}

// ---- cleaning ----

void SsdStore::relocate(LogSegment& segment, bool oldest) {
  const auto found = std::find(content_.by_ordinal.begin(), content_.by_ordinal.end(), &segment);
  const auto ordinal = static_cast<uint64_t>(found - content_.by_ordinal.begin());
  const uint64_t base = ordinal * shape_.capacity, record = shape_.record();
  const uint64_t step = std::max<uint64_t>(1, (uint64_t{1} << 20) / record);
  AlignedBuffer buffer;
  for (uint64_t begin = 0; begin < segment.records(); begin += step) {
    const uint64_t end = std::min(segment.records(), begin + step);
    const auto bytes = segment.read_range(begin, end, buffer);
    for (uint64_t place = begin; place < end; ++place) {
      const std::byte* from = bytes.data() + (place - begin) * record;
      if ((place - begin + 1) * record > bytes.size() || !segment.valid(from, place))
        segment.damaged(place);
      RecordHeader header;
      std::memcpy(&header, from, sizeof header);
      uint32_t moved;
      if (header.kind == kRow && content_.index.find(header.id) == base + place) {
        std::memcpy(append(header.id, kRow, 0, moved), from + sizeof header, shape_.payload);
        active_->seal_record();
        content_.index.set(header.id, moved);
        ++counts_.cleaned_rows;
      } else if (header.kind == kErased && !oldest) {
        // Older records of these ids may be in older segments.
        std::vector<uint64_t> gone(header.count);
        std::memcpy(gone.data(), from + sizeof header, 8 * gone.size());
        std::erase_if(gone,
                      [&](uint64_t id) { return content_.index.find(id) != StoreIndex::kNone; });
        if (gone.empty()) continue;
        std::memcpy(append(0, kErased, static_cast<uint32_t>(gone.size()), moved), gone.data(),
                    8 * gone.size());
        active_->seal_record();
      }
    }
    drain(false);
  }
}

void SsdStore::clean(uint64_t credit) {
  const uint64_t capacity = shape_.capacity;
  credit_ = std::min(credit_ + credit, 16 * capacity);
  const auto more_than = [&](uint64_t tenths, uint64_t dropped) {
    return content_.records - dropped > content_.index.size() * tenths / 10 + 2 * capacity;
  };
  if (!more_than(15, 0)) return;
  if (std::any_of(content_.segments.begin(), content_.segments.end(),
                  [](const auto& segment) { return segment->suspect(); }))
    flush_locked();
  std::vector<LogSegment*> victims;
  uint64_t dropped = 0;
  while (victims.size() < content_.segments.size() &&
         (more_than(19, dropped) || (more_than(15, dropped) && credit_ >= capacity))) {
    LogSegment* segment = content_.segments[victims.size()].get();
    if (segment == active_) break;
    try {
      // Those before it in the deque go with it, so its erasures are needed no more.
      relocate(*segment, true);
      counts_.problem.clear();
    } catch (const CorruptStore& error) {
      counts_.problem = error.what();  // find() of such a row says so as well
      break;
    }
    victims.push_back(segment);
    dropped += segment->records();
    credit_ -= std::min(credit_, segment->records());
  }
  if (victims.empty()) return;
  flush_locked();
  drop(victims);
  counts_.cleaned_segments += victims.size();
  remove_unused_files();
}

void SsdStore::drop(const std::vector<LogSegment*>& victims) {
  const auto dropped = [&](const LogSegment* segment) {
    return std::find(victims.begin(), victims.end(), segment) != victims.end();
  };
  Manifest kept = present();
  for (const LogSegment* victim : victims)
    std::erase_if(kept.segments, [&](const auto& e) { return e.number == victim->number(); });
  write_manifest(std::move(kept));
  for (LogSegment*& segment : content_.by_ordinal) {
    if (segment == nullptr || !dropped(segment)) continue;
    content_.records -= segment->records();
    segment = nullptr;
  }
  std::erase_if(content_.segments, [&](const auto& segment) { return dropped(segment.get()); });
}

// The call that leaves files behind has succeeded; those that stay are tried again by later calls.
void SsdStore::remove_unused_files() {
  unremoved_.clear();
  std::set<uint64_t> used;
  for (const auto& segment : content_.segments) used.insert(segment->number());
  for (const auto* snapshots : {&snapshots_, &snapshots_in_doubt_})
    for (const auto& [name, manifest] : *snapshots)
      for (const auto& entry : manifest.segments) used.insert(entry.number);
  for (auto number = on_disk_.begin(); number != on_disk_.end();) {
    if (used.contains(*number)) {
      ++number;
      continue;
    }
    try {
      files_->remove(segment_path(*number));
      number = on_disk_.erase(number);
    } catch (const StoreError& error) {
      unremoved_ = error.what();
      ++number;
    }
  }
}

// ---- manifests ----

Manifest SsdStore::empty_manifest() const {
  Manifest manifest;
  manifest.shape = shape_;
  manifest.next = next_number_;
  return manifest;
}

// The content as far as it has files: segments get them in order. Of one whose sync failed, what
// was synced before counts.
Manifest SsdStore::present() const {
  Manifest manifest = empty_manifest();
  for (const auto& segment : content_.segments) {
    if (!segment->has_file()) {
      manifest.next = segment->number();
      break;
    }
    const bool limited = segment->limited() || segment->suspect();
    if (limited && segment->durable() == 0) continue;
    manifest.segments.push_back(
        {segment->number(), limited ? segment->durable() : Manifest::kAll, segment->durable()});
  }
  return manifest;
}

void SsdStore::write_manifest(Manifest manifest) {
  if (older_) upgrade();
  if (new_files_) files_->sync_folder(config_.path + "/segments");
  new_files_ = false;
  manifest_in_doubt_ = true;
  files_->replace(config_.path, "MANIFEST", manifest.text());
  manifest_in_doubt_ = false;
  older_ = false;
}

void SsdStore::write_snapshot(const std::string& name, const Manifest& manifest) {
  files_->replace(config_.path + "/snapshots", name, manifest.text());
}

// Gives every file the format that the next manifest will have.
void SsdStore::upgrade() {
  std::set<uint64_t> done;
  for (const auto& segment : content_.segments) {
    if (segment->retired()) continue;  // a snapshot may still have its file
    if (segment->older_format()) segment->stamp(shape_.store);
    done.insert(segment->number());
  }
  for (auto& [name, manifest] : snapshots_) {
    for (Manifest::Entry& entry : manifest.segments) {
      entry.durable = entry.records;
      if (!done.insert(entry.number).second) continue;
      const auto segment = open_segment(entry.number);
      if (segment->older_format()) segment->stamp(shape_.store);
    }
    manifest.shape.store = shape_.store;
    manifest.snapshot = name;
    write_snapshot(name, manifest);
  }
}

// Makes the files that are in doubt what memory says.
void SsdStore::settle() {
  while (!snapshots_in_doubt_.empty()) {
    const std::string name = snapshots_in_doubt_.begin()->first;
    const auto known = snapshots_.find(name);
    if (known != snapshots_.end()) {
      write_snapshot(name, known->second);
    } else {
      files_->remove(snapshot_path(name));
      files_->sync_folder(config_.path + "/snapshots");
    }
    snapshots_in_doubt_.erase(name);
  }
  if (manifest_in_doubt_ || older_) write_manifest(present());
}

// ---- content as a whole ----

void SsdStore::clear() {
  const auto lock = writing();
  write_manifest(empty_manifest());
  content_ = {};
  active_ = nullptr;
  unflushed_ = false;
  remove_unused_files();
}

void SsdStore::set_payload(uint64_t payload) {
  const auto lock = writing();
  if (content_.index.size() != 0 || !snapshots_.empty())
    throw std::logic_error("the store at " + config_.path + " has rows; they cannot change size");
  SegmentShape shape = shape_;
  shape.payload = payload;
  shape.capacity = capacity_of(payload);
  Manifest manifest = empty_manifest();
  manifest.shape = shape;
  write_manifest(std::move(manifest));
  shape_ = shape;
  content_ = {};
  active_ = nullptr;
  unflushed_ = false;
  remove_unused_files();
}

void SsdStore::snapshot(const std::string& name, const std::string& note) {
  const auto lock = writing();
  flush_locked();
  Manifest manifest = empty_manifest();
  manifest.note = note;
  manifest.snapshot = name;
  for (const auto& segment : content_.segments)
    if (segment->records() != 0)
      manifest.segments.push_back({segment->number(), segment->records(), segment->records()});
  snapshots_in_doubt_[name] = manifest;
  write_snapshot(name, manifest);
  snapshots_[name] = std::move(manifest);
  snapshots_in_doubt_.erase(name);
  remove_unused_files();  // those that only a snapshot of this name before held
}

std::string SsdStore::load_snapshot(const std::string& name) {
  const auto lock = writing();
  const auto found = snapshots_.find(name);
  if (found == snapshots_.end()) throw StoreError(ENOENT, snapshot_path(name), "no snapshot");
  const Manifest& manifest = found->second;
  Content content = replay(manifest.segments, false);
  Manifest loaded = empty_manifest();
  loaded.segments = manifest.segments;
  write_manifest(std::move(loaded));
  content_ = std::move(content);
  active_ = nullptr;
  unflushed_ = false;
  remove_unused_files();
  return manifest.note;
}

void SsdStore::drop_snapshot(const std::string& name) {
  const auto lock = writing();
  const auto found = snapshots_.find(name);
  if (found == snapshots_.end()) throw StoreError(ENOENT, snapshot_path(name), "no snapshot");
  snapshots_in_doubt_[name] = found->second;
  files_->remove(snapshot_path(name));
  files_->sync_folder(config_.path + "/snapshots");
  snapshots_.erase(name);
  snapshots_in_doubt_.erase(name);
  remove_unused_files();
}

std::vector<std::string> SsdStore::snapshots() const {
  const ReadLock lock = reading(true);
  std::vector<std::string> names;
  for (const auto& [name, manifest] : snapshots_) names.push_back(name);
  return names;
}

void SsdStore::close() {
  if (!here()) {  // gives its copy back
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;
    content_ = {};
    reading_ = false;
    lock_ = nullptr;
    return;
  }
  const std::unique_lock lock(mutex_);
  if (reading_) {
    content_ = {};
    reading_ = false;
  }
  if (!lock_) return;
  flush_locked();
  if (active_ != nullptr) {  // with a summary it opens faster
    active_->finish(active_content_);
    active_ = nullptr;
  }
  make_durable();
  Manifest manifest = present();
  manifest.closed = true;
  for (const auto& [name, snapshot] : snapshots_) manifest.holds[name] = snapshot.sum();
  write_manifest(std::move(manifest));
  content_ = {};
  lock_ = nullptr;
}

}  // namespace dynamicemb
