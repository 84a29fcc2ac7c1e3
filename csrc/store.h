// Rows of one size on an SSD, found by id.
//
// A log: rows are appended to segments (store_segment.h) in writes of 1 MiB or more, and an index
// in memory (store_index.h) says where the newest record of an id is. An erased id leaves a record
// that says so. When less than about half of the records are the newest of their id, the oldest
// segments are cleaned: what is live in them is appended again, and they are dropped.
//
// What flush() returned from survives a crash. The order of things makes it so: records are on the
// disk before the record that says "flushed", or the manifest (store_manifest.h) that counts them;
// the copies of a cleaned segment are on the disk before the manifest forgets it; its file goes
// last. Recovery replays the segments in order, refuses damage to what was flushed or counted, and
// cuts the log at the first damage after it.
//
// Any call to the system may fail, and the one after it too. Rows that could not be written stay in
// memory, are found, and are written by the next call that can. What a failed call may have changed
// on the disk (the manifest, a snapshot) is in doubt and is written again before anything that
// relies on it. Nothing is given up before its copy is on the disk.
//
// Files belong to the store that made them and to one place in it; both are written in them.
// Opening refuses the content if a file of it is another one, is missing or was cut. It deletes
// only what a crash can have left; other files that are in the way are moved to the folder
// "set-aside".
//
// A forked child has a copy of the store that reads what was there at the fork. It changes nothing.
#pragma once

#include <sys/types.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
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
  std::string problem;                 // why old segments cannot be cleaned or removed, if so
  std::vector<std::string> set_aside;  // files that opening moved there
};

class SsdStore {
 public:
  // Opens or makes the folder; StoreError (EWOULDBLOCK) if another store has it open,
  // std::invalid_argument if its rows have another size, CorruptStore if it is damaged.
  explicit SsdStore(const StoreConfig& config, std::shared_ptr<Files> files = nullptr);
  ~SsdStore();  // closes if it can; close() says if it cannot

  uint64_t size() const;
  void find(const uint64_t* ids, size_t n, bool* found, std::span<const Column> columns) const;
  void contains(const uint64_t* ids, size_t n, bool* found) const;
  void insert(const uint64_t* ids, size_t n, std::span<const Column> columns);
  // Rows of `payload` bytes from now on, while there are neither rows nor snapshots.
  void set_payload(uint64_t payload);
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

  using ReadLock = std::shared_lock<std::shared_mutex>;

  bool here() const;  // in the process that opened it
  uint64_t capacity_of(uint64_t payload) const;
  std::string segment_path(uint64_t number) const;
  std::string snapshot_path(const std::string& name) const;
  void open_folder();
  void open_snapshot();
  void read_snapshots(const Manifest& content);
  Manifest read_manifest(const std::string& path, const std::string& snapshot);
  std::unique_ptr<LogSegment> open_segment(uint64_t number);
  std::vector<uint64_t> segments_on_disk() const;
  std::vector<Manifest::Entry> newer_segments(const Manifest& manifest);
  void set_aside(uint64_t number);
  ReadLock reading(bool even_if_closed = false) const;
  std::unique_lock<std::shared_mutex> writing();
  Content replay(const std::vector<Manifest::Entry>& entries, bool recover);
  void verify_tail(std::vector<Loaded>& all);
  std::byte* append(uint64_t id, RecordKind kind, uint32_t count, uint32_t& place);
  void start_segment();
  void drain(bool all);
  void make_durable();
  void flush_locked();
  void replace_suspects();
  void write_manifest(Manifest manifest);
  void write_snapshot(const std::string& name, const Manifest& manifest);
  void upgrade();
  void settle();
  Manifest present() const;
  Manifest empty_manifest() const;
  void clean(uint64_t credit);
  void relocate(LogSegment& segment, bool oldest);
  void drop(const std::vector<LogSegment*>& victims);
  void remove_unused_files();
  const Column* checked(std::span<const Column> columns) const;

  StoreConfig config_;
  SegmentShape shape_;
  std::shared_ptr<Files> files_;
  const pid_t process_;
  std::unique_ptr<FolderLock> lock_;
  bool reading_ = false;  // a snapshot: there is no lock
  mutable std::shared_mutex mutex_;
  mutable WaitingThreads threads_;
  Content content_;
  LogSegment* active_ = nullptr;
  uint32_t active_ordinal_ = 0;
  SegmentContent active_content_;
  uint64_t next_number_ = 0;
  std::map<std::string, Manifest> snapshots_;
  std::set<uint64_t> on_disk_;  // segments of this store that may have a file
  bool older_ = false;          // the files have format 1 until the manifest is written again
  bool unflushed_ = false;
  bool new_files_ = false;
  // A call failed that may have replaced the manifest, or the file of a snapshot by this one (or
  // removed it). Memory is right.
  bool manifest_in_doubt_ = false;
  std::map<std::string, Manifest> snapshots_in_doubt_;
  std::string unremoved_;  // why a file that nothing needs is still there
  uint64_t credit_ = 0;    // records that may be cleaned, earned by inserting
  StoreStats counts_;
};

}  // namespace dynamicemb
