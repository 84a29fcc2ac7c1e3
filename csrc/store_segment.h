// One file of an SSD store: records of one size, appended, never changed.
//
//   file    = header block, records, [summary]      at multiples of the block size
//   header  = magic, sizes, number of the segment, id of the store, salt, checksum
//   record  = checksum (8), id (8), kind (4), count (4), payload; rounded up to 8 bytes
//   summary = block {magic, records, number, checksum of the rest, checksum}, ids, kinds
//
// A record's checksum covers the salt, the number of its segment and its place in it, so that a
// record in the wrong place or of another store is a damaged one. The summary is there once a
// segment takes no more records: opening reads it instead of the records. Everything is
// little-endian.
//
// In format 1 a header has neither id nor salt (the salt of its records is 0). Such a file is read
// as long as the manifest has format 1 too; then stamp() replaces its header.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "store_files.h"

namespace dynamicemb {

struct RecordHeader {
  uint64_t checksum;
  uint64_t id;
  uint32_t kind;
  uint32_t count;
};
static_assert(sizeof(RecordHeader) == 24);

enum RecordKind : uint32_t {
  kDamaged = 0,  // never written
  kRow = 1,
  kErased = 2,  // the payload holds `count` ids that are gone
  kFlushed = 3  // everything before it is on the disk
};

// Tells a store from every other one. All zeros: not known.
struct StoreId {
  uint64_t high = 0, low = 0;

  auto operator<=>(const StoreId&) const = default;
  bool known() const { return *this != StoreId{}; }
  static StoreId random();
};

// What all segments of a store share.
struct SegmentShape {
  StoreId store;
  uint32_t block = 4096;  // multiple of all offsets and sizes given to the system
  uint64_t payload = 0;   // bytes
  uint64_t capacity = 0;  // records

  uint64_t record() const { return (sizeof(RecordHeader) + payload + 7) / 8 * 8; }
  uint64_t offset(uint64_t place) const { return block + place * record(); }
  uint64_t aligned(uint64_t bytes) const { return (bytes + block - 1) / block * block; }
  uint64_t summary() const { return aligned(offset(capacity)); }
};

// Memory at a block boundary, as direct access wants it.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  void reserve(size_t bytes);
  void append(const std::byte* from, size_t bytes);  // nullptr: zeros
  void drop_front(size_t bytes);
  void clear() { size_ = 0; }
  void shrink(size_t bytes) { size_ = bytes; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0, room_ = 0;
};

// What a segment holds, as its summary or a scan says. Places with kind kDamaged hold no record.
struct SegmentContent {
  std::vector<uint64_t> ids;
  std::vector<uint8_t> kinds;

  uint64_t bytes() const { return ids.capacity() * sizeof(uint64_t) + kinds.capacity(); }
};

// Where the header of a file says that it belongs.
enum class Origin {
  kHere,       // in this place of this store
  kUnwritten,  // nowhere, there is no byte but zeros: a crash came before the first write
  kElsewhere,  // in another place, or in another store
  kUnknown,    // it is damaged, or no header
};

class LogSegment {
 public:
  // A new one, in memory until the first write; or one that has a file. `older`: format 1 is taken
  // as well, and the id of the store, if it is not known yet, is that of the first file that has
  // it.
  LogSegment(Files& files, const SegmentShape& shape, std::string path, uint64_t number,
             bool direct);
  static std::unique_ptr<LogSegment> open(Files& files, SegmentShape& shape, std::string path,
                                          uint64_t number, bool direct, bool older);
  ~LogSegment();
  LogSegment(const LogSegment&) = delete;
  LogSegment& operator=(const LogSegment&) = delete;

  // Of the file when it was opened; if it is not kHere, problem() says why.
  Origin origin() const { return origin_; }
  const std::string& problem() const { return problem_; }
  bool has_file() const { return descriptor_ >= 0; }
  bool older_format() const { return older_format_; }
  // Writes the header of the present format. Until it returns the file may have either.
  void stamp(const StoreId& store);
  uint64_t number() const { return number_; }
  const std::string& path() const { return path_; }
  uint64_t records() const { return records_; }
  void set_records(uint64_t records) { records_ = records; }
  // Its file has more records than belong to the content.
  bool limited() const { return limited_; }
  void set_limited() { limited_ = true; }
  // The records that certainly survive a crash of the machine.
  uint64_t durable() const { return durable_; }
  // An earlier process may have written more than it synced.
  void set_durable(uint64_t records);
  bool full() const { return records_ == shape_.capacity; }
  size_t pending() const { return pending_.size(); }
  bool direct() const { return direct_; }

  // The payload of the new record, to be filled before seal_record().
  std::byte* append(uint64_t id, RecordKind kind, uint32_t count);
  void seal_record();
  // No more records: the summary follows. `content` as replay needs it.
  void finish(const SegmentContent& content);
  // Writes what waits: all of it, or only whole pieces of 1 MiB. What could not be written stays.
  void write(bool all);
  void sync();
  // A sync failed: the system may have dropped pages that were written, and say so only once. So
  // nothing of it is written or synced any more; what counts in it must be copied elsewhere.
  bool suspect() const { return suspect_; }
  // All that counts in it is elsewhere: it is not read either.
  bool retired() const { return retired_; }
  void retire();

  // A record as bytes, checked; CorruptStore if it is damaged. `buffer` is room for reading.
  const RecordHeader* read(uint64_t place, AlignedBuffer& buffer) const;
  // The records [begin, end), not checked; fewer at the end of a damaged file.
  std::span<const std::byte> read_range(uint64_t begin, uint64_t end, AlignedBuffer& buffer) const;
  bool valid(const std::byte* record, uint64_t place) const;
  [[noreturn]] void damaged(uint64_t place) const;
  // The content by the summary; false if there is none.
  bool read_summary(SegmentContent& content) const;
  // The content by reading every record of the file.
  SegmentContent scan() const;
  uint64_t disk_bytes() const;

 private:
  uint64_t checksum(const std::byte* record, uint64_t place) const;
  void map();
  void read_header(SegmentShape& shape, bool older);

  Files& files_;
  const SegmentShape shape_;
  const std::string path_;
  const uint64_t number_;
  bool direct_;
  int descriptor_ = -1;
  const std::byte* mapped_ = nullptr;  // its records, unless access is direct
  uint64_t records_ = 0;
  uint64_t written_ = 0;   // bytes of the file that need not be written again
  AlignedBuffer pending_;  // the bytes from there on
  bool summary_pending_ = false;
  uint64_t durable_ = 0;
  uint64_t salt_ = 0;
  bool synced_ = true;
  bool suspect_ = false;
  bool retired_ = false;
  bool limited_ = false;
  bool older_format_ = false;
  Origin origin_ = Origin::kHere;
  std::string problem_;
};

}  // namespace dynamicemb
