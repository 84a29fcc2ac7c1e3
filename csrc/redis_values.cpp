#include "redis_values.h"

#include <charconv>
#include <cstring>

namespace dynamicemb {
namespace {

constexpr std::string_view kMissing = "$-1\r\n";
constexpr std::size_t kLongestHead = 24;  // "$", 20 digits, end of line

// What is wrong with a value that does not begin as it should; kNone: too little of it is there.
ValueProblem problem_of(std::string_view text, const ValueShape& shape, std::size_t& size) {
  const std::size_t end = text.substr(0, kLongestHead).find("\r\n");
  if (end == text.npos)
    return text.size() < kLongestHead ? ValueProblem::kNone : ValueProblem::kUnknown;
  const auto [last, error] = std::from_chars(text.data() + 1, text.data() + end, size);
  if (text[0] != '$' || error != std::errc{} || last != text.data() + end)
    return ValueProblem::kUnknown;
  if (size != shape.tag_bytes + shape.row_bytes) return ValueProblem::kSize;
  return text.size() < shape.head_bytes ? ValueProblem::kNone : ValueProblem::kTag;
}

}  // namespace

ValuesRead read_values(const char* text, std::size_t length, std::size_t wanted,
                       const ValueShape& shape, char* rows, bool* found) {
  ValuesRead read;
  const std::size_t whole = shape.head_bytes + shape.row_bytes + 2;
  for (; read.values < wanted; ++read.values) {
    const char* at = text + read.bytes;
    const std::size_t left = length - read.bytes;
    if (left >= whole && std::memcmp(at, shape.head, shape.head_bytes) == 0) {
      if (std::memcmp(at + whole - 2, "\r\n", 2) != 0) {
        read.problem = ValueProblem::kUnknown;
        return read;
      }
      std::memcpy(rows + read.values * shape.row_bytes, at + shape.head_bytes, shape.row_bytes);
      found[read.values] = true;
      read.bytes += whole;
    } else if (left >= kMissing.size() && std::string_view(at, kMissing.size()) == kMissing) {
      std::memset(rows + read.values * shape.row_bytes, 0, shape.row_bytes);
      found[read.values] = false;
      read.bytes += kMissing.size();
    } else {
      // A value of which the end has not come looks like all others so far.
      const std::size_t known = left < shape.head_bytes ? left : shape.head_bytes;
      const bool begins_well = std::memcmp(at, shape.head, known) == 0 ||
                               kMissing.starts_with(std::string_view(at, left));
      if (!begins_well) read.problem = problem_of({at, left}, shape, read.size);
      return read;
    }
  }
  return read;
}

Piece read_piece(std::string_view text) {
  if (text.empty() || (text[0] != '$' && text[0] != ':' && text[0] != '+')) return {};
  const std::size_t end = text.find("\r\n");
  if (end == text.npos) return {};
  Piece piece{PieceKind::kText, end + 2, text.substr(1, end - 1)};
  if (text[0] == '+') return piece;
  const char* last = text.data() + end;
  const auto [digits, error] = std::from_chars(text.data() + 1, last, piece.number);
  if (error != std::errc{} || digits != last) return {};
  if (text[0] == ':') {
    piece.kind = PieceKind::kNumber;
  } else if (piece.number == -1) {
    piece.kind = PieceKind::kMissing;
  } else {
    const std::size_t left = text.size() - piece.bytes;
    const auto size = static_cast<std::uint64_t>(piece.number);  // a negative one is too large
    if (left < 2 || size > left - 2 || text.substr(piece.bytes + size, 2) != "\r\n") return {};
    piece.text = text.substr(piece.bytes, size);
    piece.bytes += size + 2;
  }
  return piece;
}

}  // namespace dynamicemb
