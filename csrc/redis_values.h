// The values that Redis answers an MGET with, as they arrive.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace dynamicemb
