// Replies of Redis, as they arrive: any that is one piece, and the rows that MGET answers with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dynamicemb {

enum class ValueProblem : std::uint8_t {
  kNone = 0,
  kSize = 1,     // a value of another size
  kTag = 2,      // a value that begins with another tag
  kUnknown = 3,  // not a value
};

// What every value of a table begins with: "$SIZE\r\n" and the tag of `tag_bytes`.
struct ValueShape {
  const char* head;
  std::size_t head_bytes;
  std::size_t tag_bytes;
  std::size_t row_bytes;  // after the tag
};

struct ValuesRead {
  std::size_t bytes = 0;   // of the text that were read
  std::size_t values = 0;  // whole ones
  ValueProblem problem = ValueProblem::kNone;
  std::size_t size = 0;  // kSize: that of the next value
};

// Reads up to `wanted` values from the text, of which the last may be a part. Rows go to rows[0],
// rows[1] ..; found[i] says whether there was one; else the row is zeros.
ValuesRead read_values(const char* text, std::size_t length, std::size_t wanted,
                       const ValueShape& shape, char* rows, bool* found);

enum class PieceKind : std::uint8_t {
  kOther = 0,  // an array, an error, no reply, or one of which the end has not come
  kText = 1,
  kNumber = 2,
  kMissing = 3,  // a text that is not there
};

// A reply that is one piece.
struct Piece {
  PieceKind kind = PieceKind::kOther;
  std::size_t bytes = 0;  // of the text before it that it takes
  std::string_view text;
  std::int64_t number = 0;
};

// The one that `text` begins with.
Piece read_piece(std::string_view text);

}  // namespace dynamicemb
