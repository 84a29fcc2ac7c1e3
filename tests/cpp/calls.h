// Optimizer steps, and calls over several tables.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "group.h"
#include "tables.h"

namespace dynamicemb::testing {

inline OptimizerStep step_of(OptimizerKind kind, int option) {
  OptimizerStep step;
  step.kind = kind;
  step.learning_rate = 0.125f;
  step.epsilon = 1e-3f;
  step.beta2 = 0.9f;
  step.one_minus_beta1 = 0.2f;
  step.one_minus_beta2 = 0.1f;
  step.adam_rate = 0.15f;
  step.bias_correction2_sqrt = 0.6f;
  step.momentum = 0.8f;
  step.one_minus_dampening = 0.9f;
  step.lambda1 = 0.05f;
  step.lambda2 = 0.01f;
  step.ftrl_beta = 1.0f;
  step.step = static_cast<uint32_t>(option);
  step.iteration = 5 + option;
  step.decay1 = 0.8;
  step.decay2 = 0.9;
  if (option == 1) step.weight_decay = 0.1f, step.nesterov = true;
  if (option == 2) step.weight_decay = 0.1f, step.decoupled_decay = true, step.decay_factor = 0.99f;
  if (option == 3) {
    step.maximize = true, step.max_gradient = 0.5f, step.stochastic_rounding = true;
    step.one_minus_beta1 = 0.7f, step.decay1 = 0.3;  // the other form of torch.lerp
  }
  return step;
}

inline StateLayout state_for(OptimizerKind kind, uint32_t dim) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return layout_of(0, false);
    case OptimizerKind::kMomentum:
    case OptimizerKind::kAdagrad:
      return layout_of(dim, false);
    case OptimizerKind::kRowwiseAdagrad:
      return layout_of(0, true);
    case OptimizerKind::kPartialRowwiseAdam:
      return layout_of(dim, true);
    case OptimizerKind::kSmartDecayAdam: {
      StateLayout layout = layout_of(2 * dim + dim % 2 + 2, false);
      const int64_t last = 2;
      std::memcpy(&layout.initial[layout.columns - 2], &last, sizeof last);
      return layout;
    }
    default:
      return layout_of(2 * dim, false);
  }
}

// Several tables in one call: ids feature-major, `features[t]` features for table t.
struct Call {
  Ids ids;
  std::vector<int64_t> offsets{0};
  Floats weights;
  std::vector<Segment> segments;
  size_t batch_size, stride = 0, features = 0;

  Call(const std::vector<SharedTable>& tables, const std::vector<size_t>& features_of, size_t batch,
       size_t longest, uint64_t universe, Random& random)
      : batch_size(batch) {
    for (size_t t = 0; t < tables.size(); ++t) {
      Segment segment{.table = tables[t],
                      .batch = nullptr,
                      .id_begin = ids.size(),
                      .first_feature = features,
                      .features = features_of[t],
                      .column = stride};
      for (size_t bag = 0; bag < features_of[t] * batch; ++bag) {
        const size_t length = random.below(longest + 1);
        for (size_t i = 0; i < length; ++i) {
          const uint64_t id = random.below(universe);
          ids.push_back(random.below(3) ? id : id % 17);  // some ids are frequent
        }
        offsets.push_back(static_cast<int64_t>(ids.size()));
      }
      segment.id_count = ids.size() - segment.id_begin;
      stride += features_of[t] * tables[t]->config().dim;
      features += features_of[t];
      segments.push_back(segment);
    }
    weights = random_floats(random, ids.size());
  }

  void train(uint64_t score, int threads) {
    std::vector<Batch*> batches;
    for (Segment& segment : segments) {
      segment.batch =
          std::make_shared<Batch>(segment.table, BatchMode::kTrain, ids.data() + segment.id_begin,
                                  segment.id_count, nullptr);
      batches.push_back(segment.batch.get());
    }
    run_all(batches, std::vector<BatchScore>(batches.size(), {score, score}), threads);
  }
  Pooling pooling(bool mean, bool weighted, DataType type) const {
    return {true, mean,  batch_size, offsets.data(), weighted ? weights.data() : nullptr,
            type, stride};
  }
};

}  // namespace dynamicemb::testing
