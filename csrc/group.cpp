#include "group.h"

#include <algorithm>
#include <cstring>

#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr size_t kChunk = 2048;       // occurrences per task
constexpr size_t kFetchedAhead = 64;  // rows to pool that are fetched in one go, before their use
constexpr uint32_t kFetched = 16;     // gradients of a row that are fetched before its update
constexpr size_t kStreamBytes = 1 << 24;  // outputs of this size are written past the caches
constexpr uint32_t kSumBlock = 256;  // occurrences summed in order; blocks are then summed in order

// A task of one segment: outputs [begin, end), which are occurrences or bags of the segment.
struct Task {
  size_t segment, begin, end;
};

std::vector<Task> output_tasks(std::span<const Segment> segments, const Pooling& pooling) {
  std::vector<Task> tasks;
  for (size_t s = 0; s < segments.size(); ++s) {
    const size_t outputs =
        pooling.pooled ? segments[s].features * pooling.batch_size : segments[s].id_count;
    size_t step = kChunk;
    if (pooling.pooled)
      step = std::clamp<size_t>(kChunk * outputs / std::max<size_t>(segments[s].id_count, 1), 1,
                                kChunk);
    for (size_t begin = 0; begin < outputs; begin += step)
      tasks.push_back({s, begin, std::min(outputs, begin + step)});
  }
  return tasks;
}

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

// Where the output of bag `bag` of a segment starts, in elements.
size_t output_of_bag(const Segment& segment, const Pooling& pooling, size_t bag) {
  const size_t feature = bag / pooling.batch_size;
  return (bag - feature * pooling.batch_size) * pooling.stride + segment.column +
         feature * segment.table->config().dim;
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

}  // namespace

// Occurrence -> its gradient row and the factor it entered the output with.
class Gradients {
 public:
  Gradients(std::span<const Segment> segments, const Pooling& pooling, const void* gradient,
            int threads)
      : pooling_(pooling), gradient_(static_cast<const std::byte*>(gradient)) {
    if (!pooling.pooled) return;
    size_t ids = 0;
    for (const Segment& segment : segments)
      ids = std::max(ids, segment.id_begin + segment.id_count);
    places_.reset(new size_t[ids]);
    if (pooling.mean) scales_.reset(new float[ids]);
    for (const Segment& segment : segments) {
      const size_t bags = segment.features * pooling.batch_size;
      const int64_t* offsets = pooling.offsets + segment.first_feature * pooling.batch_size;
      parallel_for(threads, (bags + kChunk - 1) / kChunk, [&](size_t task) {
        const size_t end = std::min(bags, (task + 1) * kChunk);
        for (size_t bag = task * kChunk; bag < end; ++bag) {
          const auto from = static_cast<size_t>(offsets[bag]);
          const auto to = static_cast<size_t>(offsets[bag + 1]);
          std::fill(&places_[from], &places_[to], output_of_bag(segment, pooling, bag));
          if (!pooling.mean) continue;
          const float part = 1.0f / static_cast<float>(to - from);
          for (size_t i = from; i < to; ++i)
            scales_[i] = pooling.weights != nullptr ? pooling.weights[i] * part : part;
        }
      });
    }
  }

  const std::byte* row(size_t occurrence) const {
    const size_t place = pooling_.pooled ? places_[occurrence] : occurrence * pooling_.stride;
    return gradient_ + place * bytes_of(pooling_.type);
  }

  DataType type() const { return pooling_.type; }
  // Whether the gradient of an occurrence is the fp32 row itself.
  bool plain() const {
    return pooling_.type == DataType::kFloat32 && pooling_.weights == nullptr && !pooling_.mean;
  }

  float scale(size_t occurrence) const {
    const float* scales = this->scales();
    return scales != nullptr ? scales[occurrence] : 1.0f;
  }

  // sum = the gradients of `count` occurrences: blocks of kSumBlock in order, then their sums.
  void sum(const Segment& segment, const uint32_t* occurrences, uint32_t count, float clamp,
           float* sum, float* scratch) const {
    const uint32_t dim = segment.table->config().dim;
    const size_t elements = pooling_.batch_size * pooling_.stride;
    if (pooling_.type != DataType::kFloat32 || clamp != 0 || elements >= kSideRow ||
        (!pooling_.pooled && pooling_.weights != nullptr))
      return sum_any(segment, occurrences, count, clamp, sum, scratch);
    if (!pooling_.pooled) return sum_rows(segment, occurrences, count, sum, scratch);
    const RowSource source{gradient_, nullptr, sizeof(float), dim, pooling_.type};
    sum_blocks(count, dim, sum, scratch, [&](uint32_t begin, uint32_t end, float* into) {
      uint32_t rows[kSumBlock];  // by element: bags of several features start at any column
      float factors[kSumBlock];
      for (uint32_t i = begin; i < end; ++i) {
        const size_t occurrence = segment.id_begin + occurrences[i];
        rows[i - begin] = static_cast<uint32_t>(places_[occurrence]);
        factors[i - begin] = scale(occurrence);
      }
      prefetch_rows(source, rows, end - begin);
      kernels().pool(source, {rows, scales() != nullptr ? factors : nullptr, end - begin, 1.0f},
                     DataType::kFloat32, into);
    });
  }

 private:
  const float* scales() const { return scales_ ? scales_.get() : pooling_.weights; }

  // Rows of an fp32 gradient that is not pooled.
  void sum_rows(const Segment& segment, const uint32_t* occurrences, uint32_t count, float* sum,
                float* scratch) const {
    const uint32_t dim = segment.table->config().dim;
    const RowSource source{row(segment.id_begin), nullptr, pooling_.stride * sizeof(float), dim,
                           pooling_.type};
    if (count > kFetched)
      prefetch_rows(source, occurrences + kFetched, std::min(count, kSumBlock) - kFetched);
    sum_blocks(count, dim, sum, scratch, [&](uint32_t begin, uint32_t end, float* into) {
      prefetch_rows(source, occurrences + end, std::min(kSumBlock, count - end));
      kernels().pool(source, {occurrences + begin, nullptr, end - begin, 1.0f}, DataType::kFloat32,
                     into);
    });
  }

  void sum_any(const Segment& segment, const uint32_t* occurrences, uint32_t count, float clamp,
               float* sum, float* scratch) const {
    const uint32_t dim = segment.table->config().dim;
    const size_t bytes = dim * bytes_of(pooling_.type);
    const auto accumulate = kernels().accumulate;
    sum_blocks(count, dim, sum, scratch, [&](uint32_t begin, uint32_t end, float* into) {
      std::fill_n(into, dim, 0.0f);
      for (uint32_t i = begin; i < end; ++i) {
        if (i + 4 < count) prefetch_bytes(row(segment.id_begin + occurrences[i + 4]), bytes);
        const size_t occurrence = segment.id_begin + occurrences[i];
        accumulate(pooling_.type, row(occurrence), clamp, scale(occurrence), into, dim);
      }
    });
  }

  template <class SumBlock>
  static void sum_blocks(uint32_t count, uint32_t dim, float* sum, float* scratch,
                         const SumBlock& sum_block) {
    if (count <= kSumBlock) return sum_block(0, count, sum);
    std::fill_n(sum, dim, 0.0f);
    for (uint32_t begin = 0; begin < count; begin += kSumBlock) {
      sum_block(begin, std::min(count, begin + kSumBlock), scratch);
      kernels().accumulate(DataType::kFloat32, scratch, 0, 1.0f, sum, dim);
    }
  }

  const Pooling& pooling_;
  const std::byte* gradient_;
  // Pooled: where the gradient of each occurrence starts, in elements; for means, its factor.
  std::unique_ptr<size_t[]> places_;
  std::unique_ptr<float[]> scales_;
};

namespace {

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
  const std::vector<Task> tasks = output_tasks(segments, pooling);
  const bool stream = streams(segments, pooling);
  parallel_for(threads, tasks.size(), [&](size_t task) {
    const auto [s, begin, end] = tasks[task];
    const Segment& segment = segments[s];
    const Table& table = *segment.table;
    size_t first = segment.id_begin + begin, last = segment.id_begin + end;
    if (pooling.pooled) {
      const int64_t* offsets = pooling.offsets + segment.first_feature * pooling.batch_size;
      first = static_cast<size_t>(offsets[begin]);
      last = static_cast<size_t>(offsets[end]);
    }
    thread_local std::vector<uint32_t> rows;
    rows.resize(last - first);
    table.find(ids + first, last - first, 1, rows.data());
    for (uint32_t& row : rows)
      row = row == kNoSlot ? kSideRow : static_cast<uint32_t>(table.row_of(row));
    const RowSource source{table.rows_.data(), missing[s].data(), table.stride_, table.config_.dim,
                           table.config_.type};
    if (pooling.pooled) {
      pool_bags(segment, pooling, source, rows.data(), first, begin, end, out);
    } else {
      kernels().gather(source, rows.data(), rows.size(), stream, pooling.type,
                       element(out, pooling.type, first * pooling.stride), pooling.stride);
    }
  });
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
    if (batch.rows_) batch.publish(batch.parts_[tasks[task].partition]);
  });
  for (const Segment& segment : stale) segment.batch->version_ = segment.table->version_;
}

void Group::read(std::span<const Segment> segments, const Pooling& pooling, void* out,
                 int threads) {
  refresh(segments, threads);
  const std::vector<Task> tasks = output_tasks(segments, pooling);
  const bool stream = streams(segments, pooling);
  parallel_for(threads, tasks.size(), [&](size_t task) {
    const auto [s, begin, end] = tasks[task];
    const Segment& segment = segments[s];
    const Table& table = *segment.table;
    const Batch& batch = *segment.batch;
    const RowSource source{table.rows_.data(), batch.side_.data(), table.stride_, table.config_.dim,
                           table.config_.type};
    if (pooling.pooled) {
      const int64_t* offsets = pooling.offsets + segment.first_feature * pooling.batch_size;
      const auto first = static_cast<size_t>(offsets[begin]);
      pool_bags(segment, pooling, source, batch.rows_ + (first - segment.id_begin), first, begin,
                end, out);
    } else {
      kernels().gather(source, batch.rows_ + begin, end - begin, stream, pooling.type,
                       element(out, pooling.type, (segment.id_begin + begin) * pooling.stride),
                       pooling.stride);
    }
  });
}

void Group::update(std::span<const Segment> segments, const Pooling& pooling, const void* gradient,
                   std::span<const OptimizerStep> steps, int threads) {
  refresh(segments, threads);
  const Gradients gradients(segments, pooling, gradient, threads);
  // A row is updated by the task of its first occurrence, so that gradients are read in order.
  const std::vector<Task> tasks = output_tasks(segments, Pooling{});
  std::vector<uint64_t> dropped(tasks.size(), 0);
  parallel_for(threads, tasks.size(), [&](size_t task) {
    const auto [s, begin, end] = tasks[task];
    dropped[task] = update_range(segments[s], gradients, steps[s], begin, end);
  });
  for (size_t i = 0; i < tasks.size(); ++i)
    segments[tasks[i].segment].table->counters_.dropped_gradients += dropped[i];
}

uint64_t Group::update_range(const Segment& segment, const Gradients& gradients,
                             const OptimizerStep& step, size_t begin, size_t end) {
  const Table& table = *segment.table;
  const Batch& batch = *segment.batch;
  const uint32_t dim = table.config_.dim;
  const size_t gradient_bytes = dim * bytes_of(gradients.type());
  const bool in_place = table.config_.type == DataType::kFloat32;
  const bool direct = gradients.plain() && step.max_gradient == 0;
  const Kernels& kernel = kernels();
  const auto optimize = kernel.optimize[static_cast<size_t>(step.kind)];
  thread_local std::vector<float> buffers;
  buffers.resize(3 * size_t{dim});
  float* sum = buffers.data();
  float* scratch = sum + dim;
  float* wide = scratch + dim;
  uint64_t dropped = 0;
  constexpr size_t kDistance = 16;  // rows between a prefetch and its use
  for (size_t position = begin; position < end; ++position) {
    if (const size_t ahead = position + kDistance; ahead < end) {
      const uint32_t entry = batch.entry_at_[ahead];
      if (entry != kNoSlot && batch.entry_slots_[entry] != kNoSlot) {
        const uint32_t slot = batch.entry_slots_[entry];
        prefetch_bytes(table.row(slot), table.stride_);
        if (table.state_.scalar) prefetch(&table.records_[slot]);
        const auto [first, last] = batch.spans_[entry];
        const uint32_t fetched = std::min(last, first + kFetched);
        for (uint32_t i = first; i < fetched; ++i)
          prefetch_bytes(gradients.row(segment.id_begin + batch.occurrences_[i]), gradient_bytes);
      }
    }
    const uint32_t entry = batch.entry_at_[position];
    if (entry == kNoSlot || batch.entry_fate_[entry] != Batch::kThere) continue;
    const uint32_t slot = batch.entry_slots_[entry];
    if (slot == kNoSlot) {  // evicted or erased between forward and backward
      ++dropped;
      continue;
    }
    const auto [first, last] = batch.spans_[entry];
    const uint32_t count = last - first;
    const float* total = sum;
    if (direct && count == 1) {
      total = reinterpret_cast<const float*>(gradients.row(segment.id_begin + position));
    } else {
      gradients.sum(segment, batch.occurrences_ + first, count, step.max_gradient, sum, scratch);
    }
    std::byte* row = table.row(slot);
    float* scalar = &table.records_[slot].scalar;
    if (in_place) {
      optimize(reinterpret_cast<float*>(row), table.row_state(row), scalar, total, sum, dim, step);
      continue;
    }
    kernel.widen(table.config_.type, row, wide, dim);
    optimize(wide, table.row_state(row), scalar, total, sum, dim, step);
    if (step.stochastic_rounding) {
      kernel.narrow_stochastic(table.config_.type, wide, row, dim, step.rounding_seed,
                               batch.entry_ids_[entry], step.step);
    } else {
      kernel.narrow(table.config_.type, wide, row, dim);
    }
  }
  return dropped;
}

void Group::weight_gradient(std::span<const Segment> segments, const Pooling& pooling,
                            const void* gradient, float* out, int threads) {
  refresh(segments, threads);
  Pooling unweighted = pooling;
  unweighted.weights = nullptr;
  const Gradients gradients(segments, unweighted, gradient, threads);
  Pooling by_occurrence;  // tasks over occurrences, whatever the pooling
  const std::vector<Task> tasks = output_tasks(segments, by_occurrence);
  parallel_for(threads, tasks.size(), [&](size_t task) {
    const auto [s, begin, end] = tasks[task];
    const Segment& segment = segments[s];
    const Table& table = *segment.table;
    const Batch& batch = *segment.batch;
    const uint32_t dim = table.config_.dim;
    const RowSource source{table.rows_.data(), batch.side_.data(), table.stride_, dim,
                           table.config_.type};
    std::vector<float> row(dim), incoming(dim);
    for (size_t i = begin; i < end; ++i) {
      const size_t occurrence = segment.id_begin + i;
      kernels().widen(table.config_.type, source.at(batch.rows_[i]), row.data(), dim);
      kernels().widen(pooling.type, gradients.row(occurrence), incoming.data(), dim);
      out[occurrence] =
          kernels().dot(row.data(), incoming.data(), dim) * gradients.scale(occurrence);
    }
  });
}

size_t Group::reduce(const Segment& segment, const Pooling& pooling, const void* gradient,
                     float max_gradient, int threads, uint64_t* ids, float* sums) {
  const std::span<const Segment> one(&segment, 1);
  const Gradients gradients(one, pooling, gradient, threads);
  const Batch& batch = *segment.batch;
  const uint32_t dim = segment.table->config_.dim;
  std::vector<size_t> start(batch.partitions_ + 1, 0);
  for (size_t p = 0; p < batch.partitions_; ++p) {
    const auto& part = batch.parts_[p];
    start[p + 1] = start[p];
    for (uint32_t entry = part.begin; entry < part.begin + part.unique; ++entry)
      start[p + 1] += batch.entry_fate_[entry] == Batch::kThere;
  }
  parallel_for(threads, batch.partitions_, [&](size_t p) {
    const auto& part = batch.parts_[p];
    std::vector<float> scratch(dim);
    size_t to = start[p];
    for (uint32_t entry = part.begin; entry < part.begin + part.unique; ++entry) {
      if (batch.entry_fate_[entry] != Batch::kThere) continue;
      const auto [first, last] = batch.spans_[entry];
      gradients.sum(segment, batch.occurrences_ + first, last - first, max_gradient,
                    sums + to * dim, scratch.data());
      ids[to++] = batch.entry_ids_[entry];
    }
  });
  return start.back();
}

}  // namespace dynamicemb
