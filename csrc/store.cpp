#include "store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>

namespace dynamicemb {
namespace {

constexpr size_t kManifestLimit = size_t{1} << 30;
constexpr uint64_t kGap = 2048;            // bytes that are read along rather than skipped
constexpr uint64_t kLongest = 256 * 1024;  // bytes of one read
constexpr std::chrono::microseconds kFromMemory{8};  // a read that takes longer came from the disk

void copy_columns(std::span<const Column> columns, size_t row, const std::byte* payload) {
  for (const Column& column : columns) {
    if (column.data != nullptr && column.bytes != 0)
      std::memcpy(column.data + row * column.bytes, payload, column.bytes);
    payload += column.bytes;
  }
}

}  // namespace

uint32_t SsdStore::Content::add(std::unique_ptr<LogSegment> segment) {
  const auto free = std::find(by_ordinal.begin(), by_ordinal.end(), nullptr);
  const auto ordinal = static_cast<uint32_t>(free - by_ordinal.begin());
  if (free == by_ordinal.end())
    by_ordinal.push_back(segment.get());
  else
    *free = segment.get();
  segments.push_back(std::move(segment));
  return ordinal;
}

SsdStore::SsdStore(const StoreConfig& config, std::shared_ptr<Files> files)
    : config_(config), files_(files ? std::move(files) : std::make_shared<Files>()) {
  shape_.block = config.block;
  shape_.payload = config.payload;
  const uint64_t wanted = config.segment_bytes / shape_.record();
  // 2^20 records need 12 bits for the segment: 2^32 places in all.
  shape_.capacity = std::clamp<uint64_t>(wanted, 16, uint64_t{1} << 20);
  try {
    if (config.snapshot.empty())
      open_folder();
    else
      open_snapshot();
  } catch (...) {
    content_ = {};
    if (lock_ >= 0) ::close(lock_);
    throw;
  }
}

SsdStore::~SsdStore() {
  try {
    close();
  } catch (const std::exception&) {  // what was flushed before is safe
    content_ = {};
    if (lock_ >= 0) ::close(lock_);
  }
}

std::string SsdStore::segment_path(uint64_t number) const {
  char name[32];
  std::snprintf(name, sizeof name, "%012llu.rows", static_cast<unsigned long long>(number));
  return config_.path + "/segments/" + name;
}

std::string SsdStore::snapshot_path(const std::string& name) const {
  return config_.path + "/snapshots/" + name;
}

void SsdStore::check_writable() const {
  check_open();
  if (reading_) throw std::logic_error("the store at " + config_.path + " is open for reading");
}

void SsdStore::check_open() const {
  if (lock_ < 0 && !reading_) throw std::logic_error("the store at " + config_.path + " is closed");
}

// ---- opening ----

void SsdStore::open_snapshot() {
  const std::string path = snapshot_path(config_.snapshot);
  if (!files_->exists(path)) throw StoreError(ENOENT, path, "no snapshot");
  const Manifest manifest = Manifest::parse(files_->read_text(path, kManifestLimit), path);
  check_payload(manifest);
  shape_ = manifest.shape;
  content_ = replay(manifest.segments, false);
  reading_ = true;
}

void SsdStore::check_payload(const Manifest& manifest) const {
  if (manifest.shape.payload != shape_.payload)
    throw std::invalid_argument("the rows at " + config_.path + " have " +
                                std::to_string(manifest.shape.payload) + " bytes; expected " +
                                std::to_string(shape_.payload));
}

void SsdStore::open_folder() {
  for (const char* part : {"", "/segments", "/snapshots"}) files_->make_folder(config_.path + part);
  const std::string lock = config_.path + "/LOCK";
  lock_ = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (lock_ < 0) throw StoreError(errno, lock, "opening");
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0)
    throw StoreError(errno, lock, "another process or store has it open; locking");

  Manifest manifest;
  const std::string path = config_.path + "/MANIFEST";
  const bool fresh = !files_->exists(path);
  if (!fresh) {
    manifest = Manifest::parse(files_->read_text(path, kManifestLimit), path);
    check_payload(manifest);
    shape_ = manifest.shape;  // block and capacity are fixed when the folder is made
  }
  for (const std::string& name : files_->list(config_.path + "/snapshots")) {
    const std::string file = snapshot_path(name);
    snapshots_[name] = Manifest::parse(files_->read_text(file, kManifestLimit), file);
  }
  std::vector<uint64_t> numbers;
  for (const std::string& name : files_->list(config_.path + "/segments")) {
    unsigned long long number = 0;
    char rest = 0;
    if (std::sscanf(name.c_str(), "%12llu.row%c", &number, &rest) == 2 && rest == 's')
      numbers.push_back(number);
  }
  auto live = manifest.segments;
  next_number_ = manifest.next;
  for (const uint64_t number : numbers) {  // ascending, as their names are
    if (number < manifest.next) continue;
    if (number != next_number_)
      throw CorruptStore(segment_path(next_number_), "this segment is missing");
    live.push_back({number, Manifest::kAll});
    ++next_number_;
  }
  if (fresh) {
    if (!live.empty()) throw CorruptStore(path, "missing, although there are segments");
    write_manifest({});
  }
  content_ = replay(live, true);
  next_number_ = manifest.next;
  if (!content_.segments.empty())
    next_number_ = std::max(next_number_, content_.segments.back()->number() + 1);
  remove_unused_files();
}

struct SsdStore::Loaded {
  std::unique_ptr<LogSegment> segment;
  SegmentContent content;
  uint64_t number = 0;
  bool summary = false;
  bool limited = false;
};

SsdStore::Content SsdStore::replay(const std::vector<Manifest::Entry>& entries, bool recover) {
  std::vector<Loaded> all;
  for (const auto& [number, records] : entries) {
    const std::string path = segment_path(number);
    if (!files_->exists(path)) throw CorruptStore(path, "this segment is missing");
    Loaded one;
    one.number = number;
    one.limited = records != Manifest::kAll;
    one.segment = LogSegment::open(*files_, shape_, path, number, config_.direct);
    one.summary = one.segment->read_summary(one.content);
    if (!one.summary) one.content = one.segment->scan();
    if (!one.segment->header_holds()) {
      // A file that a crash left unfinished has no record yet.
      if (!recover || !one.content.kinds.empty()) throw CorruptStore(path, "its header is damaged");
      one.content = {{0}, {kDamaged}};
    }
    if (one.limited && one.content.ids.size() < records)
      throw CorruptStore(path, "records are missing at its end");
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

// What was flushed must be whole; what comes after it counts up to the first damage.
void SsdStore::verify_tail(std::vector<Loaded>& all) const {
  size_t flushed = 0;  // segments up to here hold flushed records, `within` of the last one
  uint64_t within = 0;
  for (size_t k = all.size(); k > 0 && flushed == 0; --k) {
    const std::vector<uint8_t>& kinds = all[k - 1].content.kinds;
    const auto last = std::find(kinds.rbegin(), kinds.rend(), uint8_t{kFlushed});
    if (last == kinds.rend() && !all[k - 1].limited) continue;
    flushed = k;
    within = all[k - 1].limited ? kinds.size() : static_cast<uint64_t>(kinds.rend() - last);
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
    for (size_t last = all.size(); last > keep; --last)  // the newest first: no gap, if we die here
      files_->remove(segment_path(all[last - 1].number));
    all.resize(keep);
    return;
  }
}

void SsdStore::remove_unused_files() {
  std::set<uint64_t> used;
  for (const auto& segment : content_.segments) used.insert(segment->number());
  for (const auto& [name, manifest] : snapshots_)
    for (const auto& entry : manifest.segments) used.insert(entry.number);
  for (const std::string& name : files_->list(config_.path + "/segments")) {
    unsigned long long number = 0;
    if (std::sscanf(name.c_str(), "%12llu.rows", &number) == 1 && !used.contains(number) &&
        number < next_number_)
      files_->remove(config_.path + "/segments/" + name);
  }
}

// ---- reading ----

uint64_t SsdStore::size() const {
  std::shared_lock lock(mutex_);
  return content_.index.size();
}

const Column* SsdStore::checked(std::span<const Column> columns) const {
  uint64_t bytes = 0;
  for (const Column& column : columns) bytes += column.bytes;
  if (bytes != shape_.payload)
    throw std::invalid_argument("columns have " + std::to_string(bytes) + " bytes; the rows have " +
                                std::to_string(shape_.payload));
  return columns.data();
}

void SsdStore::find(const uint64_t* ids, size_t n, bool* found,
                    std::span<const Column> columns) const {
  checked(columns);
  std::shared_lock lock(mutex_);
  check_open();
  std::vector<uint32_t> places(n);
  content_.index.find(ids, n, places.data());
  std::vector<uint64_t> wanted;  // place, then row of the output
  wanted.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    found[i] = places[i] != StoreIndex::kNone;
    if (found[i]) wanted.push_back(uint64_t{places[i]} << 32 | i);
  }
  std::sort(wanted.begin(), wanted.end());

  struct Read {
    size_t begin, end;  // of `wanted`
  };
  std::vector<Read> reads;
  const uint64_t record = shape_.record(), capacity = shape_.capacity;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const uint64_t place = wanted[i] >> 32;
    if (!reads.empty()) {
      const uint64_t first = wanted[reads.back().begin] >> 32;
      const uint64_t before = wanted[i - 1] >> 32;
      if (first / capacity == place / capacity && (place - before) * record <= record + kGap &&
          (place - first + 1) * record <= std::max(kLongest, record)) {
        reads.back().end = i + 1;
        continue;
      }
    }
    reads.push_back({i, i + 1});
  }
  const auto read_some = [&](size_t begin, size_t end) {
    thread_local AlignedBuffer buffer;
    for (size_t r = begin; r < end; ++r) {
      const uint64_t first = wanted[reads[r].begin] >> 32;
      const uint64_t last = wanted[reads[r].end - 1] >> 32;
      const LogSegment& segment = *content_.by_ordinal[first / capacity];
      const uint64_t base = first / capacity * capacity;
      const auto bytes = segment.read_range(first - base, last - base + 1, buffer);
      for (size_t i = reads[r].begin; i < reads[r].end; ++i) {
        const uint64_t place = wanted[i] >> 32;
        const uint64_t at = (place - first) * record;
        RecordHeader header{};
        if (at + record <= bytes.size()) std::memcpy(&header, bytes.data() + at, sizeof header);
        const size_t row = wanted[i] & 0xffffffff;
        if (at + record > bytes.size() || !segment.valid(bytes.data() + at, place - base) ||
            header.id != ids[row] || header.kind != kRow)
          segment.damaged(place - base);
        copy_columns(columns, row, bytes.data() + at + sizeof header);
      }
    }
  };
  // While the rows come from memory, one thread is faster than waking others.
  size_t done = 0;
  while (done < reads.size() && !config_.direct) {
    const size_t end = std::min(reads.size(), done + 16);
    const auto start = std::chrono::steady_clock::now();
    read_some(done, end);
    const bool waited = std::chrono::steady_clock::now() - start > (end - done) * kFromMemory;
    done = end;
    if (waited) break;
  }
  const auto threads = static_cast<size_t>(std::max(1, config_.io_threads));
  const size_t left = reads.size() - done;
  const size_t together = std::clamp<size_t>(left / (threads * 4), 1, 32);
  threads_.run(config_.io_threads, (left + together - 1) / together, [&](size_t task) {
    const size_t begin = done + task * together;
    read_some(begin, std::min(reads.size(), begin + together));
  });
}

void SsdStore::contains(const uint64_t* ids, size_t n, bool* found) const {
  std::shared_lock lock(mutex_);
  check_open();
  std::vector<uint32_t> places(n);
  content_.index.find(ids, n, places.data());
  for (size_t i = 0; i < n; ++i) found[i] = places[i] != StoreIndex::kNone;
}

size_t SsdStore::export_rows(Cursor& cursor, size_t limit, uint64_t* ids,
                             std::span<const Column> columns) const {
  checked(columns);
  std::shared_lock lock(mutex_);
  check_open();
  size_t count = 0;
  AlignedBuffer buffer;
  const uint64_t record = shape_.record();
  const uint64_t step = std::max<uint64_t>(1, (uint64_t{1} << 20) / record);
  for (const auto& segment : content_.segments) {
    if (segment->number() < cursor.number) continue;
    if (segment->number() > cursor.number) cursor = {segment->number(), 0};
    const auto ordinal =
        std::find(content_.by_ordinal.begin(), content_.by_ordinal.end(), segment.get()) -
        content_.by_ordinal.begin();
    const uint64_t base = static_cast<uint64_t>(ordinal) * shape_.capacity;
    while (cursor.place < segment->records()) {
      const uint64_t begin = cursor.place, end = std::min(segment->records(), begin + step);
      const auto bytes = segment->read_range(begin, end, buffer);
      for (; cursor.place < end; ++cursor.place) {
        const uint64_t at = (cursor.place - begin) * record;
        if (at + record > bytes.size()) segment->damaged(cursor.place);
        RecordHeader header;
        std::memcpy(&header, bytes.data() + at, sizeof header);
        if (header.kind == kRow && content_.index.find(header.id) == base + cursor.place) {
          if (count == limit) return count;
          if (!segment->valid(bytes.data() + at, cursor.place)) segment->damaged(cursor.place);
          ids[count] = header.id;
          copy_columns(columns, count, bytes.data() + at + sizeof header);
          ++count;
        } else if (!segment->valid(bytes.data() + at, cursor.place)) {
          segment->damaged(cursor.place);  // its id may be the damaged part
        }
      }
    }
    cursor = {segment->number() + 1, 0};
  }
  return count;
}

StoreStats SsdStore::stats() const {
  std::shared_lock lock(mutex_);
  check_open();
  StoreStats stats = counts_;
  stats.rows = content_.index.size();
  stats.records = content_.records;
  stats.segments = content_.segments.size();
  stats.index_bytes = content_.index.bytes() + active_content_.bytes();
  stats.direct = config_.direct;
  for (const auto& segment : content_.segments) {
    stats.pending_bytes += segment->pending();
    stats.disk_bytes += segment->disk_bytes();
    stats.direct = stats.direct && segment->direct();
  }
  return stats;
}

}  // namespace dynamicemb
