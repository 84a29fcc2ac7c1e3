#include "store.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace dynamicemb {
namespace {

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
    : config_(config),
      files_(files ? std::move(files) : std::make_shared<Files>()),
      process_(::getpid()) {
  shape_.block = config.block;
  shape_.payload = config.payload;
  shape_.capacity = capacity_of(config.payload);
  if (config.snapshot.empty())
    open_folder();
  else
    open_snapshot();
}

SsdStore::~SsdStore() {
  try {
    close();
  } catch (const std::exception&) {  // what was flushed before is safe
  }
}

bool SsdStore::here() const { return ::getpid() == process_; }

uint64_t SsdStore::capacity_of(uint64_t payload) const {
  SegmentShape shape = shape_;
  shape.payload = payload;
  // 2^20 records need 12 bits for the segment: 2^32 places in all.
  return std::clamp<uint64_t>(config_.segment_bytes / shape.record(), 16, uint64_t{1} << 20);
}

std::string SsdStore::segment_path(uint64_t number) const {
  char name[32];
  std::snprintf(name, sizeof name, "%012llu.rows", static_cast<unsigned long long>(number));
  return config_.path + "/segments/" + name;
}

std::string SsdStore::snapshot_path(const std::string& name) const {
  return config_.path + "/snapshots/" + name;
}

SsdStore::ReadLock SsdStore::reading(bool even_if_closed) const {
  ReadLock lock(mutex_, std::defer_lock);
  if (here()) {
    lock.lock();
  } else if (!lock.try_lock()) {  // by a thread that the child does not have
    throw std::logic_error("the store at " + config_.path +
                           " was being changed when this process was forked; open it here");
  }
  if (!lock_ && !reading_ && !even_if_closed)
    throw std::logic_error("the store at " + config_.path + " is closed");
  return lock;
}

std::unique_lock<std::shared_mutex> SsdStore::writing() {
  if (!here())
    throw std::logic_error("the store at " + config_.path + " was opened by process " +
                           std::to_string(process_) + "; a forked child can only read it");
  std::unique_lock lock(mutex_);
  if (reading_) throw std::logic_error("the store at " + config_.path + " is open for reading");
  if (!lock_) throw std::logic_error("the store at " + config_.path + " is closed");
  return lock;
}

// ---- reading ----

uint64_t SsdStore::size() const {
  const ReadLock lock = reading(true);
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
  const ReadLock lock = reading();
  checked(columns);
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
  const ReadLock lock = reading();
  std::vector<uint32_t> places(n);
  content_.index.find(ids, n, places.data());
  for (size_t i = 0; i < n; ++i) found[i] = places[i] != StoreIndex::kNone;
}

size_t SsdStore::export_rows(Cursor& cursor, size_t limit, uint64_t* ids,
                             std::span<const Column> columns) const {
  const ReadLock lock = reading();
  checked(columns);
  size_t count = 0;
  AlignedBuffer buffer;
  const uint64_t record = shape_.record();
  const uint64_t step = std::max<uint64_t>(1, (uint64_t{1} << 20) / record);
  for (const auto& segment : content_.segments) {
    if (segment->number() < cursor.number || segment->retired()) continue;
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
  const ReadLock lock = reading();
  StoreStats stats = counts_;
  stats.rows = content_.index.size();
  stats.records = content_.records;
  stats.segments = content_.segments.size();
  stats.index_bytes = content_.index.bytes() + active_content_.bytes();
  stats.direct = config_.direct;
  if (stats.problem.empty()) stats.problem = unremoved_;
  for (const auto& segment : content_.segments) {
    stats.pending_bytes += segment->pending();
    stats.disk_bytes += segment->disk_bytes();
    stats.direct = stats.direct && segment->direct();
  }
  return stats;
}

}  // namespace dynamicemb
