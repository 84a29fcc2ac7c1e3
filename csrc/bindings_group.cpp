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

// The ids of a call, those of each table beside each other, and what becomes of their rows.
struct Call {
  std::vector<Segment> segments;
  Pooling pooling;

  // `batches`: one per table, or none where nothing is trained. `bounds`: where the ids of each
  // table begin, and the end.
  Call(const std::vector<std::shared_ptr<Table>>& tables,
       const std::vector<std::shared_ptr<Batch>>& batches, const std::vector<size_t>& features,
       const std::vector<size_t>& bounds, const Pooling& how)
      : pooling(how) {
    size_t feature = 0, column = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      segments.push_back({tables[t], batches.empty() ? nullptr : batches[t], bounds[t],
                          bounds[t + 1] - bounds[t], feature, features[t], column});
      feature += features[t];
      column += features[t] * tables[t]->config().dim;
    }
  }

  std::vector<const Table*> tables() const {
    std::vector<const Table*> pointers;
    for (const Segment& segment : segments) pointers.push_back(segment.table.get());
    return pointers;
  }
};

void bind_calls(nb::module_& m) {
  nb::class_<OptimizerStep>(m, "OptimizerStep")
      .def(
          "__init__",
          [](OptimizerStep* self, int kind, float learning_rate, float epsilon, float beta2,
             float one_minus_beta1, float one_minus_beta2, float adam_rate,
             float bias_correction2_sqrt, float momentum, float one_minus_dampening,
             float weight_decay, float decay_factor, float lambda1, float lambda2, float ftrl_beta,
             float max_gradient, bool nesterov, bool decoupled_decay, bool maximize,
             bool stochastic_rounding, uint64_t rounding_seed, uint32_t step, int64_t iteration,
             double decay1, double decay2) {
            new (self) OptimizerStep{.kind = static_cast<OptimizerKind>(kind),
                                     .learning_rate = learning_rate,
                                     .epsilon = epsilon,
                                     .beta2 = beta2,
                                     .one_minus_beta1 = one_minus_beta1,
                                     .one_minus_beta2 = one_minus_beta2,
                                     .adam_rate = adam_rate,
                                     .bias_correction2_sqrt = bias_correction2_sqrt,
                                     .momentum = momentum,
                                     .one_minus_dampening = one_minus_dampening,
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
          "one_minus_dampening"_a, "weight_decay"_a, "decay_factor"_a, "lambda1"_a, "lambda2"_a,
          "ftrl_beta"_a, "max_gradient"_a, "nesterov"_a, "decoupled_decay"_a, "maximize"_a,
          "stochastic_rounding"_a, "rounding_seed"_a, "step"_a, "iteration"_a, "decay1"_a,
          "decay2"_a);

  nb::class_<Call>(m, "Call")
      .def(
          "__init__",
          [](Call* self, const std::vector<std::shared_ptr<Table>>& tables,
             const std::vector<std::shared_ptr<Batch>>& batches,
             const std::vector<size_t>& features, const std::vector<size_t>& bounds, bool pooled,
             bool mean, size_t batch_size, Address offsets, Address weights, int type,
             size_t stride) {
            const size_t known = batches.empty() ? tables.size() : batches.size();
            if (known != tables.size() || features.size() != tables.size() ||
                bounds.size() != tables.size() + 1)
              throw nb::value_error("one batch, number of features and bound per table");
            new (self) Call(tables, batches, features, bounds,
                            {pooled, mean, batch_size, at<int64_t>(offsets), at<float>(weights),
                             static_cast<DataType>(type), stride});
          },
          "tables"_a, "batches"_a, "features"_a, "bounds"_a, "pooled"_a, "mean"_a, "batch_size"_a,
          "offsets"_a, "weights"_a, "type"_a, "stride"_a)
      .def(
          "evaluate",
          [](const Call& self, Address ids, Address out, int threads) {
            nb::gil_scoped_release release;
            Reading locks(self.tables());
            Group::evaluate(self.segments, at<uint64_t>(ids), self.pooling, at<void>(out), threads);
          },
          "ids"_a, "out"_a, "threads"_a)
      .def(
          "read",
          [](const Call& self, Address out, int threads) {
            nb::gil_scoped_release release;
            Reading locks(self.tables());
            Group::read(self.segments, self.pooling, at<void>(out), threads);
          },
          "out"_a, "threads"_a)
      .def(
          "update",
          [](const Call& self, Address gradient, const std::vector<OptimizerStep>& steps,
             int threads) {
            nb::gil_scoped_release release;
            Writing locks(self.tables());
            Group::update(self.segments, self.pooling, at<void>(gradient), steps, threads);
            for (const Segment& segment : self.segments) segment.batch->touch_if_marked();
          },
          "gradient"_a, "steps"_a, "threads"_a)
      .def(
          "weight_gradient",
          [](const Call& self, Address gradient, Address out, int threads) {
            nb::gil_scoped_release release;
            Reading locks(self.tables());
            Group::weight_gradient(self.segments, self.pooling, at<void>(gradient), at<float>(out),
                                   threads);
          },
          "gradient"_a, "out"_a, "threads"_a)
      .def(
          "reduce",
          [](const Call& self, size_t t, Address gradient, float max_gradient, int threads,
             Address ids, Address sums) {
            nb::gil_scoped_release release;
            const Segment& segment = self.segments.at(t);
            Reading locks({segment.table.get()});
            return Group::reduce(segment, self.pooling, at<void>(gradient), max_gradient, threads,
                                 at<uint64_t>(ids), at<float>(sums));
          },
          "t"_a, "gradient"_a, "max_gradient"_a, "threads"_a, "ids"_a, "sums"_a);
}

}  // namespace

void bind_group(nb::module_& m) {
  bind_batch(m);
  bind_calls(m);
}

}  // namespace dynamicemb
