// The Python face of one table.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <mutex>
#include <shared_mutex>

#include "bindings.h"
#include "table.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace dynamicemb {
namespace {

RowBuffers buffers(Address ids, Address embeddings, Address state, Address scores) {
  return {at<uint64_t>(ids), at<std::byte>(embeddings), at<float>(state), at<uint64_t>(scores)};
}

}  // namespace

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
          "set_initial_state",
          [](Table& self, std::vector<float> initial) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.set_initial_state(std::move(initial));
          },
          "initial"_a)
      .def(
          "set_initializer",
          [](Table& self, const Initializer& initializer) {
            nb::gil_scoped_release release;
            std::unique_lock lock(self.mutex());
            self.set_initializer(initializer);
          },
          "initializer"_a);

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
  m.def(
      "initialize_rows",
      [](const Initializer& initializer, Address ids, size_t count, uint32_t dim, Address rows) {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < count; ++i)
          kernels().initialize(initializer, at<uint64_t>(ids)[i], at<float>(rows) + i * dim, dim);
      },
      "initializer"_a, "ids"_a, "count"_a, "dim"_a, "rows"_a,
      "What new rows of ids would be, as float32.");
}

}  // namespace dynamicemb
