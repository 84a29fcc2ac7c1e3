// The Python face of mapped tables.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "serving.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynamicemb {

void bind_serving(nb::module_& m) {
  nb::class_<MappedShard>(m, "MappedShard")
      .def(
          "__init__",
          [](MappedShard* self, Address index, uint64_t slots, Address ids, uint64_t rows,
             Address removed_ids, uint64_t removed, Address values, Address first_rows,
             uint64_t buckets) {
            new (self) MappedShard{at<uint64_t>(index),
                                   slots,
                                   at<uint64_t>(ids),
                                   rows,
                                   at<uint64_t>(removed_ids),
                                   removed,
                                   at<std::byte>(values),
                                   at<uint64_t>(first_rows),
                                   buckets};
          },
          nb::kw_only(), "index"_a = 0, "slots"_a = 0, "ids"_a, "rows"_a, "removed_ids"_a,
          "removed"_a, "values"_a, "first_rows"_a = 0, "buckets"_a = 0)
      .def(
          "build_index",
          [](const MappedShard& self, Address index) {
            nb::gil_scoped_release release;
            return build_index(self, at<uint64_t>(index));
          },
          "index"_a, "Fills zeroed words from the ids; False if an id comes twice.");

  nb::class_<MappedTable>(m, "MappedTable")
      .def(
          "__init__",
          [](MappedTable* self, size_t row_bytes,
             const std::vector<std::tuple<int, uint64_t, std::vector<MappedShard>>>& layers) {
            std::vector<MappedLayer> made;
            for (const auto& [distribution, block, shards] : layers)
              made.push_back({static_cast<Distribution>(distribution), block, shards});
            new (self) MappedTable(row_bytes, std::move(made));
          },
          nb::kw_only(), "row_bytes"_a, "layers"_a,
          "Layers are (distribution, block, shards), the newest first.")
      .def(
          "find",
          [](const MappedTable& self, Address ids, size_t n, int threads, Address missing,
             Address found, Address out) {
            nb::gil_scoped_release release;
            self.find(at<uint64_t>(ids), n, threads, at<std::byte>(missing), at<bool>(found),
                      at<std::byte>(out));
          },
          "ids"_a, "n"_a, "threads"_a, "missing"_a, "found"_a, "out"_a);
  m.def("index_slots", &index_slots, "ids"_a);
  m.def(
      "count_by_bucket",
      [](Address ids, size_t n, uint64_t buckets, uint64_t last, Address counts) {
        nb::gil_scoped_release release;
        const bool in_order =
            count_by_bucket(at<uint64_t>(ids), n, buckets, last, at<uint64_t>(counts));
        return std::pair(in_order, last);
      },
      "ids"_a, "n"_a, "buckets"_a, "last"_a, "counts"_a,
      "(whether ids came in the order of their buckets, the bucket of the last)");
}

}  // namespace dynamicemb
