#include "store_segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "checksum.h"
#include "hash.h"

namespace dynamicemb {
namespace {

constexpr size_t kPiece = size_t{1} << 20;  // bytes of a write, at least
constexpr size_t kMapped = 64 * 1024;       // longer reads are better off without a mapping
constexpr char kHeaderMagic[8] = {'D', 'E', 'M', 'B', 'S', 'E', 'G', '2'};
constexpr char kHeaderMagic1[8] = {'D', 'E', 'M', 'B', 'S', 'E', 'G', '1'};
constexpr char kSummaryMagic[8] = {'D', 'E', 'M', 'B', 'I', 'D', 'S', '1'};

struct FileHeader {
  char magic[8];
  uint64_t block, payload, capacity, number;
  StoreId store;
  uint64_t salt;  // of the checksums of records
  uint64_t checksum;
};

struct FileHeader1 {
  char magic[8];
  uint64_t block, payload, capacity, number;
  uint64_t checksum;
};

struct SummaryHeader {
  char magic[8];
  uint64_t records, number;
  uint64_t content;  // checksum of ids and kinds
  uint64_t checksum;
};

template <class T>
uint64_t sum_before(const T& header) {
  return xxh64(&header, offsetof(T, checksum));
}

FileHeader header_of(const SegmentShape& shape, uint64_t number, uint64_t salt) {
  FileHeader header{};
  std::memcpy(header.magic, kHeaderMagic, 8);
  header.block = shape.block;
  header.payload = shape.payload;
  header.capacity = shape.capacity;
  header.number = number;
  header.store = shape.store;
  header.salt = salt;
  header.checksum = sum_before(header);
  return header;
}

}  // namespace

StoreId StoreId::random() {
  StoreId id;
  while (!id.known())
    if (::getentropy(&id, sizeof id) != 0) throw StoreError(errno, "/dev/urandom", "reading");
  return id;
}

void AlignedBuffer::reserve(size_t bytes) {
  if (bytes <= room_) return;
  const size_t room = std::max(bytes, room_ + room_ / 2) / 4096 * 4096 + 4096;
  std::unique_ptr<std::byte, Free> grown(static_cast<std::byte*>(std::aligned_alloc(4096, room)));
  if (!grown) throw std::bad_alloc();
  if (size_ != 0) std::memcpy(grown.get(), data_.get(), size_);
  data_ = std::move(grown);
  room_ = room;
}

void AlignedBuffer::append(const std::byte* from, size_t bytes) {
  reserve(size_ + bytes);
  if (bytes != 0) {
    if (from != nullptr)
      std::memcpy(data_.get() + size_, from, bytes);
    else
      std::memset(data_.get() + size_, 0, bytes);
  }
  size_ += bytes;
}

void AlignedBuffer::drop_front(size_t bytes) {
  if (bytes == 0) return;
  std::memmove(data_.get(), data_.get() + bytes, size_ - bytes);
  size_ -= bytes;
}

LogSegment::LogSegment(Files& files, const SegmentShape& shape, std::string path, uint64_t number,
                       bool direct)
    : files_(files),
      shape_(shape),
      path_(std::move(path)),
      number_(number),
      direct_(direct),
      salt_(hash_id(shape.store.high) ^ shape.store.low) {
  const FileHeader header = header_of(shape_, number_, salt_);
  pending_.append(reinterpret_cast<const std::byte*>(&header), sizeof header);
  pending_.append(nullptr, shape_.block - sizeof header);
}

std::unique_ptr<LogSegment> LogSegment::open(Files& files, SegmentShape& shape, std::string path,
                                             uint64_t number, bool direct, bool older) {
  auto segment = std::make_unique<LogSegment>(files, shape, std::move(path), number, direct);
  segment->pending_.clear();
  segment->descriptor_ = files.open(segment->path_, O_RDWR, segment->direct_);
  segment->written_ = files.size(segment->descriptor_, segment->path_);
  segment->read_header(shape, older);
  segment->map();
  return segment;
}

void LogSegment::read_header(SegmentShape& shape, bool older) {
  AlignedBuffer buffer;
  buffer.reserve(shape_.block);
  const size_t got = files_.read(descriptor_, buffer.data(), shape_.block, 0, path_);
  origin_ = Origin::kUnwritten;
  problem_ = "it is empty";
  if (std::all_of(buffer.data(), buffer.data() + got, [](std::byte b) { return b == std::byte{}; }))
    return;
  origin_ = Origin::kUnknown;
  problem_ = "its header is damaged";
  if (got < shape_.block) return;
  FileHeader header;
  std::memcpy(&header, buffer.data(), sizeof header);
  older_format_ = std::memcmp(header.magic, kHeaderMagic1, 8) == 0;
  if (older_format_) {
    FileHeader1 header1;
    std::memcpy(&header1, buffer.data(), sizeof header1);
    if (header1.checksum != sum_before(header1)) return;
    header.store = shape.store;
    header.salt = 0;
  } else if (std::memcmp(header.magic, kHeaderMagic, 8) != 0 ||
             header.checksum != sum_before(header)) {
    return;
  }
  if (older && !shape.store.known()) shape.store = header.store;
  origin_ = Origin::kElsewhere;
  if (older_format_ && !older) {
    problem_ = "it has format 1, and the manifest has format 2";
  } else if (header.store != shape.store) {
    problem_ = "it belongs to another store";
  } else if (header.number != number_) {
    problem_ = "it is segment " + std::to_string(header.number) + " of the store";
  } else if (header.block != shape_.block || header.payload != shape_.payload ||
             header.capacity != shape_.capacity) {
    problem_ = "its records have another size";
  } else {
    origin_ = Origin::kHere;
    problem_.clear();
    salt_ = header.salt;
  }
}

void LogSegment::stamp(const StoreId& store) {
  SegmentShape shape = shape_;
  shape.store = store;
  const FileHeader header = header_of(shape, number_, salt_);
  AlignedBuffer buffer;
  buffer.append(reinterpret_cast<const std::byte*>(&header), sizeof header);
  buffer.append(nullptr, shape_.block - sizeof header);
  files_.write(descriptor_, buffer.data(), shape_.block, 0, path_);
  files_.sync(descriptor_, path_);
  older_format_ = false;
}

LogSegment::~LogSegment() {
  if (mapped_ != nullptr) files_.unmap(mapped_, shape_.summary());
  if (descriptor_ >= 0) files_.close(descriptor_);
}

void LogSegment::map() {
  if (!direct_) mapped_ = files_.map(descriptor_, shape_.summary());
}

uint64_t LogSegment::checksum(const std::byte* record, uint64_t place) const {
  return xxh64(record + 8, shape_.record() - 8) ^ hash_id((number_ << 32 ^ place) ^ salt_);
}

bool LogSegment::valid(const std::byte* record, uint64_t place) const {
  RecordHeader header;
  std::memcpy(&header, record, sizeof header);
  return header.checksum == checksum(record, place) && header.kind >= kRow &&
         header.kind <= kFlushed && (header.kind != kErased || header.count * 8 <= shape_.payload);
}

void LogSegment::damaged(uint64_t place) const {
  throw CorruptStore(path_, "the record at byte " + std::to_string(shape_.offset(place)) +
                                " is damaged (its checksum does not fit)");
}

std::byte* LogSegment::append(uint64_t id, RecordKind kind, uint32_t count) {
  const size_t at = pending_.size();
  pending_.reserve(at + shape_.record());
  pending_.append(nullptr, shape_.record());
  const RecordHeader header{0, id, kind, count};
  std::memcpy(pending_.data() + at, &header, sizeof header);
  synced_ = false;
  return pending_.data() + at + sizeof header;
}

void LogSegment::seal_record() {
  std::byte* record = pending_.data() + pending_.size() - shape_.record();
  const uint64_t sum = checksum(record, records_);
  std::memcpy(record, &sum, sizeof sum);
  ++records_;
}

void LogSegment::finish(const SegmentContent& content) {
  if (pending_.size() == 0 || !full()) {  // reopened, or not full: leaves a hole in the file
    write(true);
    pending_.clear();
    written_ = shape_.summary();
  }
  SummaryHeader header{};
  std::memcpy(header.magic, kSummaryMagic, 8);
  header.records = content.ids.size();
  header.number = number_;
  std::vector<std::byte> rest(content.ids.size() * 9);
  if (!rest.empty()) {
    std::memcpy(rest.data(), content.ids.data(), content.ids.size() * 8);
    std::memcpy(rest.data() + content.ids.size() * 8, content.kinds.data(), content.kinds.size());
  }
  header.content = xxh64(rest.data(), rest.size());
  header.checksum = sum_before(header);
  pending_.append(nullptr, shape_.summary() - (written_ + pending_.size()));
  pending_.append(reinterpret_cast<const std::byte*>(&header), sizeof header);
  pending_.append(nullptr, shape_.block - sizeof header);
  pending_.append(rest.data(), rest.size());
  pending_.append(nullptr, shape_.aligned(pending_.size()) - pending_.size());
  summary_pending_ = true;
  synced_ = false;
}

void LogSegment::write(bool all) {
  const size_t waiting = pending_.size();
  const size_t bytes = all || summary_pending_ ? waiting : waiting / kPiece * kPiece;
  if (bytes == 0) return;
  if (descriptor_ < 0) {
    descriptor_ = files_.open(path_, O_RDWR | O_CREAT | O_TRUNC, direct_);
    map();
  }
  const size_t padded = shape_.aligned(bytes);
  if (padded > waiting) pending_.append(nullptr, padded - waiting);
  try {
    files_.write(descriptor_, pending_.data(), padded, written_, path_);
  } catch (...) {
    pending_.shrink(waiting);
    throw;
  }
  pending_.shrink(waiting);
  if (summary_pending_) {
    written_ += waiting;
    pending_ = {};
    summary_pending_ = false;
    return;
  }
  // A record whose end is still to come stays in memory as a whole, from its block on.
  const uint64_t end = written_ + bytes;
  const uint64_t whole = end < shape_.block ? 0 : (end - shape_.block) / shape_.record();
  const uint64_t keep = std::min(end, shape_.offset(whole)) / shape_.block * shape_.block;
  pending_.drop_front(keep - written_);
  written_ = keep;
}

void LogSegment::sync() {
  if (synced_ || descriptor_ < 0) return;
  try {
    files_.sync(descriptor_, path_);
  } catch (...) {
    suspect_ = true;
    throw;
  }
  synced_ = true;
  durable_ = records_;
}

void LogSegment::set_durable(uint64_t records) {
  durable_ = std::min(records, records_);
  if (durable_ < records_) synced_ = false;
}

void LogSegment::retire() {
  retired_ = true;
  pending_ = {};
  summary_pending_ = false;
}

std::span<const std::byte> LogSegment::read_range(uint64_t begin, uint64_t end,
                                                  AlignedBuffer& buffer) const {
  const uint64_t low = shape_.offset(begin), high = shape_.offset(end);
  if (low >= written_) {
    const uint64_t first = std::min<uint64_t>(low - written_, pending_.size());
    return {pending_.data() + first, std::min<uint64_t>(high - low, pending_.size() - first)};
  }
  const uint64_t file_high = std::min(high, written_);
  const uint64_t from = direct_ ? low / shape_.block * shape_.block : low;
  const uint64_t to = direct_ ? shape_.aligned(file_high) : file_high;
  buffer.clear();
  buffer.reserve(to - from + (high - file_high));
  uint64_t got = to - from;
  if (mapped_ != nullptr && to - from <= kMapped) {
    files_.read_mapped(buffer.data(), mapped_ + from, to - from, path_);
  } else {
    got = files_.read(descriptor_, buffer.data(), to - from, from, path_);
  }
  uint64_t bytes = got > low - from ? std::min(got - (low - from), file_high - low) : 0;
  if (bytes == file_high - low && high > file_high) {
    const uint64_t more = std::min<uint64_t>(high - file_high, pending_.size());
    std::memcpy(buffer.data() + (low - from) + bytes, pending_.data(), more);
    bytes += more;
  }
  return {buffer.data() + (low - from), bytes};
}

const RecordHeader* LogSegment::read(uint64_t place, AlignedBuffer& buffer) const {
  const auto bytes = read_range(place, place + 1, buffer);
  if (bytes.size() < shape_.record() || !valid(bytes.data(), place)) damaged(place);
  return reinterpret_cast<const RecordHeader*>(bytes.data());
}

bool LogSegment::read_summary(SegmentContent& content) const {
  if (written_ < shape_.summary() + shape_.block) return false;
  AlignedBuffer buffer;
  buffer.reserve(shape_.block);
  if (files_.read(descriptor_, buffer.data(), shape_.block, shape_.summary(), path_) < shape_.block)
    return false;
  SummaryHeader header;
  std::memcpy(&header, buffer.data(), sizeof header);
  if (std::memcmp(header.magic, kSummaryMagic, 8) != 0 || header.checksum != sum_before(header) ||
      header.number != number_ || header.records > shape_.capacity)
    return false;
  const uint64_t bytes = shape_.aligned(header.records * 9);
  buffer.reserve(bytes);
  if (files_.read(descriptor_, buffer.data(), bytes, shape_.summary() + shape_.block, path_) <
          header.records * 9 ||
      xxh64(buffer.data(), header.records * 9) != header.content)
    return false;
  content.ids.resize(header.records);
  content.kinds.resize(header.records);
  if (header.records != 0) {
    std::memcpy(content.ids.data(), buffer.data(), header.records * 8);
    std::memcpy(content.kinds.data(), buffer.data() + header.records * 8, header.records);
  }
  return true;
}

SegmentContent LogSegment::scan() const {
  SegmentContent content;
  if (written_ <= shape_.block) return content;
  const uint64_t most =
      std::min(shape_.capacity, (written_ - shape_.block + shape_.record() - 1) / shape_.record());
  const uint64_t step = std::max<uint64_t>(1, kPiece / shape_.record());
  AlignedBuffer buffer;
  uint64_t good = 0;  // places up to the last record that holds
  for (uint64_t begin = 0; begin < most; begin += step) {
    const uint64_t end = std::min(most, begin + step);
    const auto bytes = read_range(begin, end, buffer);
    for (uint64_t place = begin; place < end; ++place) {
      const uint64_t at = (place - begin) * shape_.record();
      RecordHeader header{0, 0, kDamaged, 0};
      if (at + shape_.record() <= bytes.size() && valid(bytes.data() + at, place)) {
        std::memcpy(&header, bytes.data() + at, sizeof header);
        good = place + 1;
      }
      content.ids.push_back(header.id);
      content.kinds.push_back(static_cast<uint8_t>(header.kind));
    }
  }
  content.ids.resize(good);
  content.kinds.resize(good);
  return content;
}

uint64_t LogSegment::disk_bytes() const {
  return descriptor_ < 0 ? 0 : files_.disk_bytes(descriptor_, path_);
}

}  // namespace dynamicemb
