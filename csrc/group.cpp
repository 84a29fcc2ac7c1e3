#include "group.h"

#include <cstring>

#include "group_tasks.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr size_t kFetchedAhead = 64;  // rows to pool that are fetched in one go, before their use
constexpr size_t kStreamBytes = 1 << 24;  // outputs of this size are written past the caches

std::byte* element(void* base, DataType type, size_t index) {
  return static_cast<std::byte*>(base) + index * bytes_of(type);
}

// Whether the rows of the segments are more than the caches keep.
bool streams(std::span<const Segment> segments, const Pooling& pooling) {
  size_t bytes = 0;
  for (const Segment& segment : segments)
    bytes += segment.id_count * segment.table->config().dim * bytes_of(pooling.type);
  return bytes >= kStreamBytes;
}

// Pools the bags [begin, end) of a segment; `rows` are the row numbers from occurrence `first` on.
void pool_bags(const Segment& segment, const Pooling& pooling, const RowSource& source,
               const uint32_t* rows, size_t first, size_t begin, size_t end, void* out) {
  const int64_t* offsets = pooling.offsets + segment.first_feature * pooling.batch_size;
  const auto last = static_cast<size_t>(offsets[end]);
  const auto pool = kernels().pool;
  size_t fetched = first;
  for (size_t bag = begin; bag < end; ++bag) {
    const auto from = static_cast<size_t>(offsets[bag]), to = static_cast<size_t>(offsets[bag + 1]);
    while (fetched < last && fetched < to + kFetchedAhead) {
      const size_t count = std::min(kFetchedAhead, last - fetched);
      prefetch_rows(source, rows + (fetched - first), count);
      fetched += count;
    }
    const size_t length = to - from;
    const Bag work{.rows = rows + (from - first),
                   .weights = pooling.weights == nullptr ? nullptr : pooling.weights + from,
                   .length = length,
                   .divisor = pooling.mean && length > 1 ? static_cast<float>(length) : 1.0f};
    pool(source, work, pooling.type,
         element(out, pooling.type, output_of_bag(segment, pooling, bag)));
  }
}

// The rows of a task's occurrences.
struct Found {
  RowSource source;
  const uint32_t* rows;
};

// Writes all outputs; find(task, first, last) gives the rows of the occurrences [first, last) of
// the call, which task's outputs are made of.
template <class Find>
void write_outputs(std::span<const Segment> segments, const Pooling& pooling, int threads,
                   const Find& find, void* out) {
  const std::vector<Task> tasks = output_tasks(segments, pooling);
  const bool stream = streams(segments, pooling);
  parallel_for(threads, tasks.size(), [&](size_t i) {
    const Task& task = tasks[i];
    const Segment& segment = segments[task.segment];
    if (pooling.pooled) {
      const int64_t* offsets = pooling.offsets + segment.first_feature * pooling.batch_size;
      const auto first = static_cast<size_t>(offsets[task.begin]);
      const Found found = find(task, first, static_cast<size_t>(offsets[task.end]));
      pool_bags(segment, pooling, found.source, found.rows, first, task.begin, task.end, out);
    } else {
      const size_t first = segment.id_begin + task.begin;
      const Found found = find(task, first, segment.id_begin + task.end);
      kernels().gather(found.source, found.rows, task.end - task.begin, stream, pooling.type,
                       element(out, pooling.type, first * pooling.stride), pooling.stride);
    }
  });
}

struct PartitionTask {
  size_t segment, partition;
};

std::vector<PartitionTask> partition_tasks(std::span<const Segment> segments) {
  std::vector<PartitionTask> tasks;
  for (size_t s = 0; s < segments.size(); ++s)
    for (size_t p = 0; p < segments[s].batch->partitions(); ++p) tasks.push_back({s, p});
  return tasks;
}

}  // namespace

void Group::evaluate(std::span<const Segment> segments, const uint64_t* ids, const Pooling& pooling,
                     void* out, int threads) {
  std::vector<std::vector<std::byte>> missing(segments.size());
  for (size_t s = 0; s < segments.size(); ++s) {
    const Table& table = *segments[s].table;
    missing[s].resize(table.stride_);
    const std::vector<float> constant(table.config_.dim, table.config_.missing_value);
    kernels().narrow(table.config_.type, constant.data(), missing[s].data(), table.config_.dim);
  }
  write_outputs(
      segments, pooling, threads,
      [&](const Task& task, size_t first, size_t last) {
        const Table& table = *segments[task.segment].table;
        thread_local std::vector<uint32_t> rows;
        rows.resize(last - first);
        table.find(ids + first, last - first, 1, rows.data());
        table.rows_of(rows.data(), rows.size(), rows.data());
        return Found{table.source(missing[task.segment].data()), rows.data()};
      },
      out);
}

void Group::refresh(std::span<const Segment> segments, int threads) {
  std::vector<Segment> stale;
  for (const Segment& segment : segments) {
    segment.batch->fit_side();
    if (segment.batch->stale()) stale.push_back(segment);
  }
  if (stale.empty()) return;
  const auto tasks = partition_tasks(stale);
  parallel_for(threads, tasks.size(), [&](size_t task) {
    Batch& batch = *stale[tasks[task].segment].batch;
    batch.locate(tasks[task].partition);
    if (batch.places_ != nullptr) batch.publish(batch.parts_[tasks[task].partition]);
  });
  // A row that is gone may come back: then it is looked for again.
  for (const Segment& segment : stale)
    if (segment.batch->rows_gone() == 0) segment.batch->version_ = segment.table->version_;
}

void Group::read(std::span<const Segment> segments, const Pooling& pooling, void* out,
                 int threads) {
  refresh(segments, threads);
  write_outputs(
      segments, pooling, threads,
      [&](const Task& task, size_t first, size_t last) {
        const Segment& segment = segments[task.segment];
        thread_local std::vector<uint32_t> rows;
        rows.resize(last - first);
        segment.batch->rows_at(first - segment.id_begin, rows.size(), rows.data());
        return Found{segment.table->source(segment.batch->side_.data()), rows.data()};
      },
      out);
}

}  // namespace dynamicemb
