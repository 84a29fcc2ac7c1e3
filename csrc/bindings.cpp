// The Python face of the engine: addresses and sizes in, numbers out. Checks are in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "checksum.h"
#include "dedup.h"
#include "group.h"

namespace nb = nanobind;

using namespace nb::literals;
using namespace dynamicemb;

void bind_plugin(nb::module_& m);    // bindings_plugin.cpp
void bind_redis(nb::module_& m);     // bindings_redis.cpp
void bind_serving(nb::module_& m);   // bindings_serving.cpp
void bind_slot_map(nb::module_& m);  // bindings_slot_map.cpp
void bind_store(nb::module_& m);     // bindings_store.cpp

namespace {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

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

RowBuffers buffers(Address ids, Address embeddings, Address state, Address scores) {
  return {at<uint64_t>(ids), at<std::byte>(embeddings), at<float>(state), at<uint64_t>(scores)};
}

void bind_table(nb::module_& m) {
  nb::class_<Initializer>(m, "Initializer")
      .def(
          "__init__",
          [](Initializer* self, int mode, float value, float lower, float upper, float mean,
             float std_dev, float cdf_lower, float cdf_upper, uint64_t seed) {
            new (self) Initializer{static_cast<InitializerMode>(mode),
                                   value,
                                   lower,
                                   upper,
                                   mean,
                                   std_dev,
                                   cdf_lower,
                                   cdf_upper,
                                   seed};
          },
          nb::kw_only(), "mode"_a, "value"_a, "lower"_a, "upper"_a, "mean"_a, "std_dev"_a,
          "cdf_lower"_a, "cdf_upper"_a, "seed"_a);

  nb::class_<EmptyTable>(m, "EmptyTable");

  nb::class_<Table>(m, "Table")
      .def(
          "__init__",
          [](Table* self, uint32_t dim, int type, uint64_t init_buckets, uint64_t max_buckets,
             uint32_t width, double max_load_factor, int strategy, const Initializer& initializer,
             float missing_value, uint32_t state_columns, bool state_scalar,
             std::vector<float> initial_state) {
            TableConfig config;
            config.dim = dim;
            config.type = static_cast<DataType>(type);
            config.init_buckets = init_buckets;
            config.max_buckets = max_buckets;
            config.width = width;
            config.max_load_factor = max_load_factor;
            config.strategy = static_cast<ScoreStrategy>(strategy);
            config.initializer = initializer;
            config.missing_value = missing_value;
            new (self) Table(config, {state_columns, state_scalar, std::move(initial_state)});
          },
          nb::kw_only(), "dim"_a, "type"_a, "init_buckets"_a, "max_buckets"_a, "width"_a,
          "max_load_factor"_a, "strategy"_a, "initializer"_a, "missing_value"_a, "state_columns"_a,
          "state_scalar"_a, "initial_state"_a)
      .def_prop_ro("size", &Table::size)
      .def_prop_ro("capacity", &Table::capacity)
      .def_prop_ro("bytes", &Table::bytes)
      .def_prop_rw("next_row_number", &Table::next_row_number, &Table::set_next_row_number)
      .def("counters",
           [](const Table& self) {
             const Counters& c = self.counters();
             return std::vector<uint64_t>{c.hits,     c.misses,     c.inserts,          c.evictions,
                                          c.failures, c.rejections, c.dropped_gradients};
           })
      .def("reset_counters", &Table::reset_counters)
      .def(
          "find",
          [](const Table& self, Address ids, size_t n, int threads, Address slots) {
            nb::gil_scoped_release release;
            std::shared_lock lock(self.mutex());
            std::vector<uint32_t> found(n);
            self.find(at<uint64_t>(ids), n, threads, found.data());
            for (size_t i = 0; i < n; ++i)
              at<int64_t>(slots)[i] = found[i] == kNoSlot ? -1 : int64_t{found[i]};
          },
          "ids"_a, "n"_a, "threads"_a, "slots"_a)
      .def(
          "read",
          [](const Table& self, Address ids, size_t n, int threads, Address found,
             Address embeddings, Address state, Address scores) {
            nb::gil_scoped_release release;
            std::shared_lock lock(self.mutex());
            std::vector<uint32_t> slots(n);
            self.find(at<uint64_t>(ids), n, threads, slots.data());
            for (size_t i = 0; i < n; ++i) at<bool>(found)[i] = slots[i] != kNoSlot;
            self.read(slots.data(), n, threads, buffers(0, embeddings, state, scores));
          },
          "ids"_a, "n"_a, "threads"_a, "found"_a, "embeddings"_a, "state"_a, "scores"_a)
      .def(
          "erase",
          [](Table& self, Address ids, size_t n, int threads, Address removed) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.erase(at<uint64_t>(ids), n, threads, at<bool>(removed));
          },
          "ids"_a, "n"_a, "threads"_a, "removed"_a)
      .def(
          "expire",
          [](Table& self, uint64_t before, uint64_t slots) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            return self.expire(before, slots);
          },
          "before"_a, "slots"_a)
      .def("clear",
           [](Table& self) {
             nb::gil_scoped_release release;
             std::unique_lock lock(self.mutex());
             self.clear();
           })
      .def("when_empty",
           [](const Table& self) {
             std::shared_lock lock(self.mutex());
             return self.when_empty();
           })
      .def(
          "make_empty",
          [](Table& self, const EmptyTable& before) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.make_empty(before);
          },
          "before"_a)
      .def(
          "export_rows",
          [](const Table& self, uint64_t cursor, size_t limit, std::optional<uint64_t> threshold,
             std::optional<uint64_t> changed_since, int threads, Address ids, Address embeddings,
             Address state, Address scores) {
            nb::gil_scoped_release release;
            std::shared_lock lock(self.mutex());
            std::vector<uint32_t> slots(limit);
            const Wanted wanted{threshold.has_value(), threshold.value_or(0),
                                changed_since.has_value(), changed_since.value_or(0)};
            const size_t count = self.export_rows(cursor, limit, wanted, slots.data());
            self.read(slots.data(), count, threads, buffers(ids, embeddings, state, scores));
            return std::make_pair(count, cursor);
          },
          "cursor"_a, "limit"_a, "threshold"_a.none(), "changed_since"_a.none(), "threads"_a,
          "ids"_a, "embeddings"_a, "state"_a, "scores"_a)
      .def("mark_changes",
           [](Table& self) {
             nb::gil_scoped_release release;
             std::unique_lock lock(self.mutex());
             return self.mark_changes();
           })
      .def(
          "log_removals",
          [](Table& self, size_t limit) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.removals().start(self.mark_changes(), limit);
          },
          "limit"_a)
      .def_prop_ro("logs_removals", [](const Table& self) { return self.removals().on(); })
      .def_prop_ro("removals_known_since",
                   [](const Table& self) { return self.removals().known_since(); })
      .def(
          "reserve",
          [](Table& self, uint64_t rows) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.reserve(rows);
          },
          "rows"_a)
      .def(
          "set_state_layout",
          [](Table& self, uint32_t columns, bool scalar, std::vector<float> initial) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.set_state_layout({columns, scalar, std::move(initial)});
          },
          "columns"_a, "scalar"_a, "initial"_a)
      .def(
          "set_initializer",
          [](Table& self, const Initializer& initializer) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.set_initializer(initializer);
          },
          "initializer"_a);
}

void bind_changes(nb::module_& m) {
  m.def(
      "removed_since",
      [](const Table& table, uint64_t mark) {
        std::vector<uint64_t> ids;
        {
          nb::gil_scoped_release release;
          std::shared_lock lock(table.mutex());
          ids = table.removals().since(mark);
        }
        return nb::bytes(ids.data(), 8 * ids.size());
      },
      "table"_a, "mark"_a, "The ids removed after this mark, 8 bytes each.");
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

void bind_group(nb::module_& m) {
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

NB_MODULE(_engine, m) {
  // torch keeps modules alive past the interpreter's end; that is no leak of ours to report.
  nb::set_leak_warnings(false);
  m.doc() = "The C++ engine of dynamicemb. Private: use dynamicemb.table.";
  (void)dynamicemb::kernels();  // a wrong DYNAMICEMB_ISA fails the import, not a later call
  m.def(
      "valid_offsets",
      [](Address address, size_t count, int64_t total) {
        const auto* offsets = at<int64_t>(address);
        uint64_t sign = 0;  // one pass that vectorises: valid differences do not overflow
        for (size_t i = 1; i < count; ++i)
          sign |= static_cast<uint64_t>(offsets[i]) - static_cast<uint64_t>(offsets[i - 1]);
        return offsets[0] == 0 && offsets[count - 1] == total && (sign >> 63) == 0;
      },
      "address"_a, "count"_a, "total"_a, "Whether offsets go from 0 to total and never decrease.");
  m.def(
      "xxh64",
      [](Address data, size_t size) {
        nb::gil_scoped_release release;
        return xxh64(at<void>(data), size);
      },
      "data"_a, "size"_a, "XXH64 with seed 0 of bytes in memory.");
  m.def(
      "distinct_ids",
      [](Address ids, size_t count, Address distinct, Address places, Address counts) {
        nb::gil_scoped_release release;
        return distinct_ids(at<uint64_t>(ids), count, at<uint64_t>(distinct), at<int64_t>(places),
                            at<int64_t>(counts));
      },
      "ids"_a, "count"_a, "distinct"_a, "places"_a, "counts"_a,
      "The distinct ids in order of first occurrence, every id's place among them, and counts.");
  m.def(
      "initialize_rows",
      [](const Initializer& initializer, Address ids, size_t count, uint32_t dim, Address rows) {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < count; ++i)
          kernels().initialize(initializer, at<uint64_t>(ids)[i], at<float>(rows) + i * dim, dim);
      },
      "initializer"_a, "ids"_a, "count"_a, "dim"_a, "rows"_a,
      "What new rows of ids would be, as float32.");
  m.def("instruction_set", [] { return std::string(kernels().name); });
  bind_table(m);
  bind_changes(m);
  bind_plugin(m);
  bind_redis(m);
  bind_serving(m);
  bind_slot_map(m);
  bind_store(m);
  bind_batch(m);
  bind_group(m);
}
