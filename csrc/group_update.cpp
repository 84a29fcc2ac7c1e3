// What follows from the gradient of a call: row updates, sums, the gradient of weights.
#include <cstring>
#include <memory>

#include "group_tasks.h"
#include "parallel.h"

namespace dynamicemb {
namespace {

constexpr uint32_t kSumBlock = 256;  // occurrences summed in order; blocks are then summed in order
constexpr uint32_t kFetched = 16;    // gradients of a row that are fetched before its update

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

// Updates the rows of one task. Rows do not depend on each other, so first come those of ids that
// occur once: most of them, and without a list of occurrences to look at.
class RowUpdates {
 public:
  RowUpdates(const Segment& segment, const Gradients& gradients, const OptimizerStep& step)
      : segment_(segment),
        table_(*segment.table),
        gradients_(gradients),
        step_(step),
        kernels_(kernels()),
        dim_(table_.config_.dim),
        direct_(gradients.plain() && step.max_gradient == 0),
        buffers_(3 * size_t{dim_}) {}

  // The rows that occur first in [begin, end), at most kChunk positions.
  void run(size_t begin, size_t end) {
    const Batch& batch = *segment_.batch;
    Row alone[kChunk + 1], repeated[kChunk + 1];  // one more: what is not counted is overwritten
    uint32_t numbers[kChunk];
    batch.rows_at(begin, end - begin, numbers);
    size_t singles = 0, others = 0;
    for (size_t position = begin; position < end; ++position) {
      const auto [slot, at] = batch.places_[position];
      const uint32_t number = numbers[position - begin];
      const bool there = slot < kSideRow;
      alone[singles] = {slot, number, static_cast<uint32_t>(position), 1};
      singles += there & (at == Batch::kAlone);
      repeated[others] = {slot, number, at, 0};
      others += there & (at < Batch::kAlone);
    }
    for (Row& row : std::span(repeated, others)) {
      const auto [first, last] = batch.spans_[row.first];
      row.first = first;
      row.count = last - first;
    }
    update<32>({alone, singles}, [](const Row& row) { return &row.first; });
    update<8>({repeated, others}, [&](const Row& row) { return batch.occurrences_ + row.first; });
  }

 private:
  struct Row {
    uint32_t slot, number;
    uint32_t first, count;  // of its occurrences
  };

  // kBurst: rows that are fetched in one go; going on with others meanwhile is slower.
  template <size_t kBurst, class Occurrences>
  void update(std::span<const Row> rows, const Occurrences& occurrences) {
    const size_t gradient_bytes = dim_ * bytes_of(gradients_.type());
    size_t fetched = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      while (fetched < rows.size() && fetched < i + kBurst) {
        for (const Row& row : rows.subspan(fetched, std::min(kBurst, rows.size() - fetched))) {
          prefetch_bytes(data(row), table_.stride_);
          if (table_.state_.scalar) prefetch(&table_.records_[row.slot]);
          const uint32_t* at = occurrences(row);
          for (uint32_t k = 0; k < std::min(row.count, kFetched); ++k)
            prefetch_bytes(gradients_.row(segment_.id_begin + at[k]), gradient_bytes);
        }
        fetched += kBurst;
      }
      update_row(rows[i], occurrences(rows[i]));
    }
  }

  void update_row(const Row& at, const uint32_t* occurrences) {
    float *sum = buffers_.data(), *scratch = sum + dim_, *wide = scratch + dim_;
    const float* total = sum;
    if (direct_ && at.count == 1) {
      total = reinterpret_cast<const float*>(gradients_.row(segment_.id_begin + *occurrences));
    } else {
      gradients_.sum(segment_, occurrences, at.count, step_.max_gradient, sum, scratch);
    }
    std::byte* row = data(at);
    float* scalar = &table_.records_[at.slot].scalar;
    const auto optimize = kernels_.optimize[static_cast<size_t>(step_.kind)];
    const DataType type = table_.config_.type;
    if (type == DataType::kFloat32) {
      float* weights = reinterpret_cast<float*>(row);
      return optimize(weights, table_.row_state(row), scalar, total, sum, dim_, step_);
    }
    kernels_.widen(type, row, wide, dim_);
    optimize(wide, table_.row_state(row), scalar, total, sum, dim_, step_);
    if (step_.stochastic_rounding) {
      kernels_.narrow_stochastic(type, wide, row, dim_, step_.rounding_seed, table_.keys_[at.slot],
                                 step_.step);
    } else {
      kernels_.narrow(type, wide, row, dim_);
    }
  }

  std::byte* data(const Row& row) const {
    return table_.rows_.data() + size_t{row.number} * table_.stride_;
  }

  const Segment& segment_;
  const Table& table_;
  const Gradients& gradients_;
  const OptimizerStep& step_;
  const Kernels& kernels_;
  const uint32_t dim_;
  const bool direct_;  // the gradient of an id that occurs once is there as a row
  std::vector<float> buffers_;
};

void Group::update(std::span<const Segment> segments, const Pooling& pooling, const void* gradient,
                   std::span<const OptimizerStep> steps, int threads) {
  refresh(segments, threads);
  const Gradients gradients(segments, pooling, gradient, threads);
  // A row is updated by the task of its first occurrence, so that gradients are read in order.
  const std::vector<Task> tasks = output_tasks(segments, Pooling{});
  parallel_for(threads, tasks.size(), [&](size_t task) {
    const auto [s, begin, end] = tasks[task];
    RowUpdates(segments[s], gradients, steps[s]).run(begin, end);
  });
  for (const Segment& segment : segments)
    segment.table->counters_.dropped_gradients += segment.batch->rows_gone();
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
    const RowSource source = table.source(batch.side_.data());
    std::vector<uint32_t> rows(end - begin);
    batch.rows_at(begin, rows.size(), rows.data());
    std::vector<float> row(dim), incoming(dim);
    for (size_t i = begin; i < end; ++i) {
      const size_t occurrence = segment.id_begin + i;
      kernels().widen(table.config_.type, source.at(rows[i - begin]), row.data(), dim);
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
