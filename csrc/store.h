// Rows of one size on an SSD, found by id.
//
// A log: rows are appended to segments (store_segment.h) in writes of 1 MiB or more, and an index
// in memory (store_index.h) says where the newest record of an id is. An erased id leaves a record
// that says so. When less than about half of the records are the newest of their id, the oldest
// segments are cleaned: what is live in them is appended again, and they are dropped.
//
// What flush() returned from survives a crash. The order of things makes it so: records are on the
// disk before the record that says "flushed"; the copies of a cleaned segment are flushed before
// the manifest (store_manifest.h) forgets it; its file goes last. Recovery replays the segments in
// order, refuses damage before the last "flushed", and cuts the log at the first damage after it.
//
// Rows that could not be written (disk full) stay in memory, are found, and are written by the next
// call that can.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "parallel.h"
#include "store_files.h"
#include "store_index.h"
#include "store_manifest.h"
#include "store_segment.h"

namespace dynamicemb {

struct StoreConfig {
  std::string path;
  uint64_t payload = 0;  // bytes of a row, at least 8
  uint32_t block = 4096;
  uint64_t segment_bytes = uint64_t{64} << 20;
  bool direct = false;   // without the page cache, where the file system can
  int io_threads = 16;   // reads in flight
  std::string snapshot;  // if there is a name: read this one; nothing is locked or written
};

// One part of every row, packed: row i is at data + i * bytes. The parts of a row follow each other
// in its payload.
struct Column {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

struct StoreStats {
  uint64_t rows = 0, records = 0, segments = 0, index_bytes = 0, pending_bytes = 0, disk_bytes = 0,
           cleaned_segments = 0, cleaned_rows = 0;
  bool direct = false;
  std::string problem;  // why old segments cannot be cleaned, if so
};

class SsdStore {
 public:
  // Opens or makes the folder; StoreError (EWOULDBLOCK) if another store has it open,
  // std::invalid_argument if its rows have another size, CorruptStore if it is damaged.
  explicit SsdStore(const StoreConfig& config, std::shared_ptr<Files> files = nullptr);
  ~SsdStore();  // flushes if it can; close() says if it cannot

  uint64_t size() const;
  void find(const uint64_t* ids, size_t n, bool* found, std::span<const Column> columns) const;
  void contains(const uint64_t* ids, size_t n, bool* found) const;
  void insert(const uint64_t* ids, size_t n, std::span<const Column> columns);
  // removed[i]: ids[i] was there and went with this occurrence.
  void erase(const uint64_t* ids, size_t n, bool* removed);
  void clear();

  // Rows in the order of the log, each once, at most `limit`; moves the cursor on.
  struct Cursor {
    uint64_t number = 0, place = 0;
  };
  size_t export_rows(Cursor& cursor, size_t limit, uint64_t* ids,
                     std::span<const Column> columns) const;

  void flush();
  // The content now, to come back to; `note` is kept with it. A name that exists is replaced.
  void snapshot(const std::string& name, const std::string& note);
  std::string load_snapshot(const std::string& name);
  void drop_snapshot(const std::string& name);
  std::vector<std::string> snapshots() const;

  StoreStats stats() const;
  void close();

 private:
  struct Content {
    std::deque<std::unique_ptr<LogSegment>> segments;  // in order of their numbers
    std::vector<LogSegment*> by_ordinal;               // place = ordinal * capacity + place in it
    StoreIndex index;
    uint64_t records = 0;

    uint32_t add(std::unique_ptr<LogSegment> segment);
  };
  struct Loaded;

  std::string segment_path(uint64_t number) const;
  std::string snapshot_path(const std::string& name) const;
  void open_folder();
  void open_snapshot();
  void check_payload(const Manifest& manifest) const;
  void check_open() const;
  void check_writable() const;
  Content replay(const std::vector<Manifest::Entry>& entries, bool recover);
  void verify_tail(std::vector<Loaded>& all) const;
  std::byte* append(uint64_t id, RecordKind kind, uint32_t count, uint32_t& place);
  void start_segment();
  void drain(bool all);
  void make_durable();
  void flush_locked();
  void write_manifest(std::vector<Manifest::Entry> segments);
  std::vector<Manifest::Entry> entries() const;
  void clean(uint64_t credit);
  void relocate(LogSegment& segment, uint32_t ordinal, bool oldest);
  void drop(const std::vector<LogSegment*>& victims);
  void remove_unused_files();
  const Column* checked(std::span<const Column> columns) const;

  StoreConfig config_;
  SegmentShape shape_;
  std::shared_ptr<Files> files_;
  int lock_ = -1;
  bool reading_ = false;  // a snapshot: there is no lock
  mutable std::shared_mutex mutex_;
  mutable WaitingThreads threads_;
  Content content_;
  LogSegment* active_ = nullptr;
  uint32_t active_ordinal_ = 0;
  SegmentContent active_content_;
  uint64_t next_number_ = 0;
  std::map<std::string, Manifest> snapshots_;
  bool unflushed_ = false;
  bool new_files_ = false;
  uint64_t credit_ = 0;  // records that may be cleaned, earned by inserting
  StoreStats counts_;
};

}  // namespace dynamicemb
