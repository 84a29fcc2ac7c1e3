// The Python face of replies of Redis.
#include <nanobind/stl/tuple.h>

#include "bindings.h"
#include "redis_values.h"

namespace nb = nanobind;

using namespace nb::literals;

namespace dynamicemb {

void bind_redis(nb::module_& m) {
  m.def(
      "read_redis_values",
      [](Address text, size_t length, size_t wanted, nb::bytes head, size_t tag_bytes,
         size_t row_bytes, Address rows, Address found) {
        const ValueShape shape{head.c_str(), head.size(), tag_bytes, row_bytes};
        // With the GIL: a copy of some microseconds is shorter than the wait to get it back.
        const ValuesRead read =
            read_values(at<char>(text), length, wanted, shape, at<char>(rows), at<bool>(found));
        return std::make_tuple(read.bytes, read.values, static_cast<int>(read.problem), read.size);
      },
      "text"_a, "length"_a, "wanted"_a, "head"_a, "tag_bytes"_a, "row_bytes"_a, "rows"_a, "found"_a,
      "(bytes read, values read, problem, size) of values that MGET answers with.");
  m.def(
      "read_redis_pieces",
      [](Address text, size_t length, size_t wanted) {
        nb::list pieces;
        size_t used = 0;
        for (; wanted > 0; --wanted) {
          const Piece piece = read_piece({at<char>(text) + used, length - used});
          if (piece.kind == PieceKind::kOther) break;
          if (piece.kind == PieceKind::kText)
            pieces.append(nb::bytes(piece.text.data(), piece.text.size()));
          else if (piece.kind == PieceKind::kNumber)
            pieces.append(nb::int_(piece.number));
          else
            pieces.append(nb::none());
          used += piece.bytes;
        }
        return std::make_tuple(used, pieces);
      },
      "text"_a, "length"_a, "wanted"_a,
      nb::sig("def read_redis_pieces(text: int, length: int, wanted: int) -> "
              "tuple[int, list[bytes | int | None]]"),
      "(bytes read, replies) up to the first that is not one piece, or not whole: texts as bytes, "
      "numbers as int, a missing text as None.");
}

}  // namespace dynamicemb
