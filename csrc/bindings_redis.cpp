// The Python face of replies of Redis.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "redis_values.h"

namespace nb = nanobind;

using namespace nb::literals;
using namespace dynamicemb;

void bind_redis(nb::module_& m) {
  m.def(
      "read_redis_values",
      [](std::uintptr_t text, size_t length, size_t wanted, nb::bytes head, size_t tag_bytes,
         size_t row_bytes, std::uintptr_t rows, std::uintptr_t found) {
        const ValueShape shape{head.c_str(), head.size(), tag_bytes, row_bytes};
        // With the GIL: a copy of some microseconds is shorter than the wait to get it back.
        const ValuesRead read =
            read_values(reinterpret_cast<const char*>(text), length, wanted, shape,
                        reinterpret_cast<char*>(rows), reinterpret_cast<bool*>(found));
        return std::make_tuple(read.bytes, read.values, static_cast<int>(read.problem), read.size);
      },
      "text"_a, "length"_a, "wanted"_a, "head"_a, "tag_bytes"_a, "row_bytes"_a, "rows"_a, "found"_a,
      "(bytes read, values read, problem, size) of values that MGET answers with.");
}
