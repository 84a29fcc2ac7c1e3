// How the work over the outputs of a call is cut into tasks.
#pragma once

#include <algorithm>
#include <vector>

#include "group.h"

namespace dynamicemb {

inline constexpr size_t kChunk = 2048;  // occurrences per task

// A task of one segment: outputs [begin, end), which are occurrences or bags of the segment.
struct Task {
  size_t segment, begin, end;
};

inline std::vector<Task> output_tasks(std::span<const Segment> segments, const Pooling& pooling) {
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

// Where the output of bag `bag` of a segment starts, in elements.
inline size_t output_of_bag(const Segment& segment, const Pooling& pooling, size_t bag) {
  const size_t feature = bag / pooling.batch_size;
  return (bag - feature * pooling.batch_size) * pooling.stride + segment.column +
         feature * segment.table->config().dim;
}

}  // namespace dynamicemb
