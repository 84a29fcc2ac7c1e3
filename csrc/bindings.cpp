// The extension module, and the functions that belong to no class.
#include "bindings.h"

#include <nanobind/stl/string.h>

#include "checksum.h"
#include "dedup.h"
#include "kernels.h"

namespace nb = nanobind;

using namespace nb::literals;
using namespace dynamicemb;

NB_MODULE(_engine, m) {
  // torch keeps modules alive past the interpreter's end; that is no leak of ours to report.
  nb::set_leak_warnings(false);
  m.doc() = "The C++ engine of dynamicemb. Private: use dynamicemb.table.";
  (void)kernels();  // a wrong DYNAMICEMB_ISA fails the import, not a later call
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
  m.def("instruction_set", [] { return std::string(kernels().name); });
  bind_table(m);
  bind_group(m);
  bind_plugin(m);
  bind_redis(m);
  bind_serving(m);
  bind_slot_map(m);
  bind_store(m);
}
