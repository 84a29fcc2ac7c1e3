// The writing half of SsdStore: appending, flushing, cleaning, snapshots.
#include <unistd.h>

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
  new_files_ = true;
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
  checked(columns);
  std::unique_lock lock(mutex_);
  check_writable();
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
  std::unique_lock lock(mutex_);
  check_writable();
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
  for (const auto& segment : content_.segments)
    if (segment->pending() != 0) segment->write(all || segment.get() != active_);
}

void SsdStore::make_durable() {
  drain(true);
  for (const auto& segment : content_.segments) segment->sync();
  if (new_files_) {
    files_->sync_folder(config_.path + "/segments");
    new_files_ = false;
  }
}

void SsdStore::flush() {
  std::unique_lock lock(mutex_);
  check_writable();
  flush_locked();
}

void SsdStore::flush_locked() {
  // A segment whose sync failed once may have lost pages although they look written.
  std::vector<LogSegment*> suspects;
  for (const auto& segment : content_.segments)
    if (segment->suspect()) suspects.push_back(segment.get());
  for (LogSegment* segment : suspects) {
    if (segment == active_) active_ = nullptr;
    const auto ordinal = std::find(content_.by_ordinal.begin(), content_.by_ordinal.end(), segment);
    relocate(*segment, static_cast<uint32_t>(ordinal - content_.by_ordinal.begin()),
             segment == content_.segments.front().get());
  }
  if (!unflushed_ && suspects.empty()) return;
  for (LogSegment* segment : suspects) segment->give_up();
  make_durable();
  uint32_t place;
  append(0, kFlushed, 0, place);
  active_->seal_record();
  make_durable();
  unflushed_ = false;
  if (!suspects.empty()) drop(suspects);
}

// ---- cleaning ----

void SsdStore::relocate(LogSegment& segment, uint32_t ordinal, bool oldest) {
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
    const auto ordinal = std::find(content_.by_ordinal.begin(), content_.by_ordinal.end(), segment);
    try {
      // Those before it in the deque go with it, so its erasures are needed no more.
      relocate(*segment, static_cast<uint32_t>(ordinal - content_.by_ordinal.begin()), true);
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
}

void SsdStore::drop(const std::vector<LogSegment*>& victims) {
  const auto dropped = [&](const LogSegment* segment) {
    return std::find(victims.begin(), victims.end(), segment) != victims.end();
  };
  std::vector<Manifest::Entry> kept = entries();
  for (const LogSegment* victim : victims)
    std::erase_if(kept, [&](const auto& entry) { return entry.number == victim->number(); });
  write_manifest(std::move(kept));
  for (LogSegment*& segment : content_.by_ordinal) {
    if (segment == nullptr || !dropped(segment)) continue;
    content_.records -= segment->records();
    segment = nullptr;
  }
  std::erase_if(content_.segments, [&](const auto& segment) { return dropped(segment.get()); });
  remove_unused_files();
}

std::vector<Manifest::Entry> SsdStore::entries() const {
  std::vector<Manifest::Entry> entries;
  for (const auto& segment : content_.segments)
    entries.push_back(
        {segment->number(), segment->limited() ? segment->records() : Manifest::kAll});
  return entries;
}

void SsdStore::write_manifest(std::vector<Manifest::Entry> segments) {
  Manifest manifest{shape_, next_number_, std::move(segments), {}};
  files_->replace(config_.path, "MANIFEST", manifest.text());
}

// ---- content as a whole ----

void SsdStore::clear() {
  std::unique_lock lock(mutex_);
  check_writable();
  write_manifest({});
  content_ = {};
  active_ = nullptr;
  unflushed_ = false;
  remove_unused_files();
}

void SsdStore::snapshot(const std::string& name, const std::string& note) {
  std::unique_lock lock(mutex_);
  check_writable();
  flush_locked();
  Manifest manifest{shape_, next_number_, {}, note};
  for (const auto& segment : content_.segments)
    if (segment->records() != 0)
      manifest.segments.push_back({segment->number(), segment->records()});
  files_->replace(config_.path + "/snapshots", name, manifest.text());
  snapshots_[name] = std::move(manifest);
  remove_unused_files();  // those that only a snapshot of this name before held
}

std::string SsdStore::load_snapshot(const std::string& name) {
  std::unique_lock lock(mutex_);
  check_writable();
  const auto found = snapshots_.find(name);
  if (found == snapshots_.end()) throw StoreError(ENOENT, snapshot_path(name), "no snapshot");
  const Manifest& manifest = found->second;
  Content content = replay(manifest.segments, false);
  write_manifest(manifest.segments);
  content_ = std::move(content);
  active_ = nullptr;
  unflushed_ = false;
  remove_unused_files();
  return manifest.note;
}

void SsdStore::drop_snapshot(const std::string& name) {
  std::unique_lock lock(mutex_);
  check_writable();
  if (!snapshots_.contains(name)) throw StoreError(ENOENT, snapshot_path(name), "no snapshot");
  files_->remove(snapshot_path(name));
  files_->sync_folder(config_.path + "/snapshots");
  snapshots_.erase(name);
  remove_unused_files();
}

std::vector<std::string> SsdStore::snapshots() const {
  std::shared_lock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, manifest] : snapshots_) names.push_back(name);
  return names;
}

void SsdStore::close() {
  std::unique_lock lock(mutex_);
  if (reading_) {
    content_ = {};
    reading_ = false;
  }
  if (lock_ < 0) return;
  flush_locked();
  if (active_ != nullptr) {  // with a summary it opens faster; without, as well
    active_->finish(active_content_);
    active_ = nullptr;
    make_durable();
  }
  content_ = {};
  ::close(lock_);
  lock_ = -1;
}

}  // namespace dynamicemb
