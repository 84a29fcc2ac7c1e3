// Lookups and updates over several tables in one call.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "batch.h"

namespace dynamicemb {

// How occurrences become output rows, and gradients of output rows become gradients of rows.
struct Pooling {
  bool pooled = false;
  bool mean = false;
  size_t batch_size = 0;               // bags per feature
  const int64_t* offsets = nullptr;    // features * batch_size + 1, feature-major, into all ids
  const float* weights = nullptr;      // per occurrence
  DataType type = DataType::kFloat32;  // of the output and its gradient
  size_t stride = 0;                   // elements per output row
};

// The ids [id_begin, id_begin + id_count) of the call belong to one table. Pooled, they are the
// bags of features [first_feature, first_feature + features), and feature f's output starts at
// column + (f - first_feature) * dim.
struct Segment {
  std::shared_ptr<Table> table;
  std::shared_ptr<Batch> batch;  // null when nothing is trained
  size_t id_begin = 0, id_count = 0;
  size_t first_feature = 0, features = 0;
  size_t column = 0;
};

class Gradients;

class Group {
 public:
  // Evaluation: finds only. `ids` are those of the whole call.
  static void evaluate(std::span<const Segment> segments, const uint64_t* ids,
                       const Pooling& pooling, void* out, int threads);
  // Training: reads the rows the batches found or made.
  static void read(std::span<const Segment> segments, const Pooling& pooling, void* out,
                   int threads);
  // One optimizer update of every distinct row, with the sum of its gradients.
  static void update(std::span<const Segment> segments, const Pooling& pooling,
                     const void* gradient, std::span<const OptimizerStep> steps, int threads);
  // d loss / d weight of every occurrence, from the rows as they are now.
  static void weight_gradient(std::span<const Segment> segments, const Pooling& pooling,
                              const void* gradient, float* out, int threads);
  // The summed gradient of every distinct stored row: ids and fp32 rows; returns how many. The
  // buffers hold as many rows as the segment has ids.
  static size_t reduce(const Segment& segment, const Pooling& pooling, const void* gradient,
                       float max_gradient, int threads, uint64_t* ids, float* sums);

 private:
  static void refresh(std::span<const Segment> segments, int threads);
};

}  // namespace dynamicemb
