// The Python face of batches, and of calls over several tables.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "bindings.h"
#include "group.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace dynamicemb {
namespace {

// Holds the locks of several tables, taken in one order so that two calls cannot wait for each
// other. Construct it with the interpreter lock released.
template <class Lock>
class Locks {
 public:
  explicit Locks(std::vector<const Table*> tables) {
    std::sort(tables.begin(), tables.end());
    tables.erase(std::unique(tables.begin(), tables.end()), tables.end());
    for (const Table* table : tables) held_.emplace_back(table->mutex());
  }

 private:
  std::vector<Lock> held_;
};
using Reading = Locks<std::shared_lock<std::shared_mutex>>;
using Writing = Locks<std::unique_lock<std::shared_mutex>>;

std::vector<const Table*> tables_of(const std::vector<Segment>& segments) {
  std::vector<const Table*> tables;
  for (const Segment& segment : segments) tables.push_back(segment.table.get());
  return tables;
}

std::vector<const Table*> tables_of(const std::vector<std::shared_ptr<Batch>>& batches) {
  std::vector<const Table*> tables;
  for (const auto& batch : batches) tables.push_back(&batch->table());
  return tables;
}

std::vector<Batch*> plain(const std::vector<std::shared_ptr<Batch>>& batches) {
  std::vector<Batch*> pointers;
  for (const auto& batch : batches) pointers.push_back(batch.get());
  return pointers;
}

std::vector<BatchScore> scores_of(const std::vector<std::pair<uint64_t, uint64_t>>& pairs) {
  std::vector<BatchScore> scores;
  for (const auto& [value, timestamp] : pairs) scores.push_back({value, timestamp});
  return scores;
}

void bind_batch(nb::module_& m) {
  using Batches = std::vector<std::shared_ptr<Batch>>;
  using Scores = std::vector<std::pair<uint64_t, uint64_t>>;

  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch* self, std::shared_ptr<Table> table, int mode, Address ids, size_t n,
             Address counts) {
            new (self) Batch(std::move(table), static_cast<BatchMode>(mode), at<uint64_t>(ids), n,
                             at<int64_t>(counts));
          },
          "table"_a, "mode"_a, "ids"_a, "n"_a, "counts"_a)
      .def(
          "give",
          [](Batch& self, Address embeddings, Address state, Address scores) {
            self.give({at<std::byte>(embeddings), at<float>(state), at<uint64_t>(scores)});
          },
          "embeddings"_a, "state"_a, "scores"_a)
      .def("keep_evicted", &Batch::keep_evicted)
      .def("collect_missing", &Batch::collect_missing)
      .def(
          "missing",
          [](const Batch& self, Address ids, Address counts) {
            self.missing(at<uint64_t>(ids), at<int64_t>(counts));
          },
          "ids"_a, "counts"_a)
      .def(
          "admit",
          [](Batch& self, Address mask, const Initializer& initializer, Address rows) {
            nb::gil_scoped_release release;
            self.admit(at<bool>(mask), initializer, at<float>(rows));
          },
          "mask"_a, "initializer"_a, "rows"_a)
      .def(
          "protect",
          [](Batch& self, Batch& other) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.table().mutex());
            self.protect(other);
          },
          "other"_a)
      .def_prop_ro("failures", &Batch::failures)
      .def_prop_ro("rejections", &Batch::rejections)
      .def_prop_ro("size", &Batch::size)
      .def_prop_ro("evicted_count", [](const Batch& self) { return self.evicted().ids.size(); })
      .def(
          "evicted",
          [](const Batch& self, Address ids, Address embeddings, Address state, Address scores) {
            const Evicted& e = self.evicted();
            std::copy(e.ids.begin(), e.ids.end(), at<uint64_t>(ids));
            std::copy(e.embeddings.begin(), e.embeddings.end(), at<std::byte>(embeddings));
            std::copy(e.state.begin(), e.state.end(), at<float>(state));
            std::copy(e.scores.begin(), e.scores.end(), at<uint64_t>(scores));
          },
          "ids"_a, "embeddings"_a, "state"_a, "scores"_a)
      .def("slots", [](const Batch& self, Address out) { self.slots(at<int64_t>(out)); })
      .def("written", [](const Batch& self, Address out) { self.written(at<bool>(out)); });

  m.def(
      "find_batches",
      [](const Batches& batches, int threads) {
        nb::gil_scoped_release release;
        Reading locks(tables_of(batches));
        find_all(plain(batches), threads);
      },
      "batches"_a, "threads"_a);
  m.def(
      "commit_batches",
      [](const Batches& batches, const Scores& scores, int threads) {
        nb::gil_scoped_release release;
        Writing locks(tables_of(batches));
        commit_all(plain(batches), scores_of(scores), threads);
      },
      "batches"_a, "scores"_a, "threads"_a);
  m.def(
      "run_batches",
      [](const Batches& batches, const Scores& scores, int threads) {
        nb::gil_scoped_release release;
        Writing locks(tables_of(batches));
        run_all(plain(batches), scores_of(scores), threads);
      },
      "batches"_a, "scores"_a, "threads"_a);
}

void bind_calls(nb::module_& m) {
  nb::class_<Segment>(m, "Segment")
      .def(
          "__init__",
          [](Segment* self, std::shared_ptr<Table> table, std::shared_ptr<Batch> batch,
             size_t id_begin, size_t id_count, size_t first_feature, size_t features,
             size_t column) {
            new (self) Segment{std::move(table), std::move(batch), id_begin, id_count,
                               first_feature,    features,         column};
          },
          "table"_a, "batch"_a.none(), "id_begin"_a, "id_count"_a, "first_feature"_a, "features"_a,
          "column"_a);

  nb::class_<Pooling>(m, "Pooling")
      .def(
          "__init__",
          [](Pooling* self, bool pooled, bool mean, size_t batch_size, Address offsets,
             Address weights, int type, size_t stride) {
            new (self) Pooling{pooled,
                               mean,
                               batch_size,
                               at<int64_t>(offsets),
                               at<float>(weights),
                               static_cast<DataType>(type),
                               stride};
          },
          nb::kw_only(), "pooled"_a, "mean"_a, "batch_size"_a, "offsets"_a, "weights"_a, "type"_a,
          "stride"_a);

  nb::class_<OptimizerStep>(m, "OptimizerStep")
      .def(
          "__init__",
          [](OptimizerStep* self, int kind, float learning_rate, float epsilon, float beta2,
             float one_minus_beta1, float one_minus_beta2, float adam_rate,
             float bias_correction2_sqrt, float momentum, float dampening, float weight_decay,
             float decay_factor, float lambda1, float lambda2, float ftrl_beta, float max_gradient,
             bool nesterov, bool decoupled_decay, bool maximize, bool stochastic_rounding,
             uint64_t rounding_seed, uint32_t step, int64_t iteration, double decay1,
             double decay2) {
            new (self) OptimizerStep{.kind = static_cast<OptimizerKind>(kind),
                                     .learning_rate = learning_rate,
                                     .epsilon = epsilon,
                                     .beta2 = beta2,
                                     .one_minus_beta1 = one_minus_beta1,
                                     .one_minus_beta2 = one_minus_beta2,
                                     .adam_rate = adam_rate,
                                     .bias_correction2_sqrt = bias_correction2_sqrt,
                                     .momentum = momentum,
                                     .dampening = dampening,
                                     .weight_decay = weight_decay,
                                     .decay_factor = decay_factor,
                                     .lambda1 = lambda1,
                                     .lambda2 = lambda2,
                                     .ftrl_beta = ftrl_beta,
                                     .max_gradient = max_gradient,
                                     .nesterov = nesterov,
                                     .decoupled_decay = decoupled_decay,
                                     .maximize = maximize,
                                     .stochastic_rounding = stochastic_rounding,
                                     .rounding_seed = rounding_seed,
                                     .step = step,
                                     .iteration = iteration,
                                     .decay1 = decay1,
                                     .decay2 = decay2};
          },
          nb::kw_only(), "kind"_a, "learning_rate"_a, "epsilon"_a, "beta2"_a, "one_minus_beta1"_a,
          "one_minus_beta2"_a, "adam_rate"_a, "bias_correction2_sqrt"_a, "momentum"_a,
          "dampening"_a, "weight_decay"_a, "decay_factor"_a, "lambda1"_a, "lambda2"_a,
          "ftrl_beta"_a, "max_gradient"_a, "nesterov"_a, "decoupled_decay"_a, "maximize"_a,
          "stochastic_rounding"_a, "rounding_seed"_a, "step"_a, "iteration"_a, "decay1"_a,
          "decay2"_a);

  using Segments = std::vector<Segment>;
  m.def(
      "evaluate",
      [](const Segments& segments, Address ids, const Pooling& pooling, Address out, int threads) {
        nb::gil_scoped_release release;
        Reading locks(tables_of(segments));
        Group::evaluate(segments, at<uint64_t>(ids), pooling, at<void>(out), threads);
      },
      "segments"_a, "ids"_a, "pooling"_a, "out"_a, "threads"_a);
  m.def(
      "read",
      [](const Segments& segments, const Pooling& pooling, Address out, int threads) {
        nb::gil_scoped_release release;
        Reading locks(tables_of(segments));
        Group::read(segments, pooling, at<void>(out), threads);
      },
      "segments"_a, "pooling"_a, "out"_a, "threads"_a);
  m.def(
      "update",
      [](const Segments& segments, const Pooling& pooling, Address gradient,
         const std::vector<OptimizerStep>& steps, int threads) {
        nb::gil_scoped_release release;
        Writing locks(tables_of(segments));
        Group::update(segments, pooling, at<void>(gradient), steps, threads);
        for (const Segment& segment : segments) segment.batch->touch_if_marked();
      },
      "segments"_a, "pooling"_a, "gradient"_a, "steps"_a, "threads"_a);
  m.def(
      "weight_gradient",
      [](const Segments& segments, const Pooling& pooling, Address gradient, Address out,
         int threads) {
        nb::gil_scoped_release release;
        Reading locks(tables_of(segments));
        Group::weight_gradient(segments, pooling, at<void>(gradient), at<float>(out), threads);
      },
      "segments"_a, "pooling"_a, "gradient"_a, "out"_a, "threads"_a);
  m.def(
      "reduce",
      [](const Segment& segment, const Pooling& pooling, Address gradient, float max_gradient,
         int threads, Address ids, Address sums) {
        nb::gil_scoped_release release;
        Reading locks({segment.table.get()});
        return Group::reduce(segment, pooling, at<void>(gradient), max_gradient, threads,
                             at<uint64_t>(ids), at<float>(sums));
      },
      "segment"_a, "pooling"_a, "gradient"_a, "max_gradient"_a, "threads"_a, "ids"_a, "sums"_a);
}

}  // namespace

void bind_group(nb::module_& m) {
  bind_batch(m);
  bind_calls(m);
}

}  // namespace dynamicemb
