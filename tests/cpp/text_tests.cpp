// Replies of Redis in memory that ends where they end: nothing behind it is read.
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "redis_values.h"

namespace {

using namespace dynamicemb;

// A text in memory of just its size, so that the address sanitizer sees a byte too many.
struct Exact {
  explicit Exact(std::string_view text) : bytes(new char[text.size()]), size(text.size()) {
    std::memcpy(bytes.get(), text.data(), size);
  }
  operator std::string_view() const { return {bytes.get(), size}; }
  std::unique_ptr<char[]> bytes;
  std::size_t size;
};

void pieces_are_read_once_they_are_whole() {
  const std::vector<std::pair<std::string, PieceKind>> pieces = {
      {"+OK\r\n", PieceKind::kText},
      {":-9223372036854775808\r\n", PieceKind::kNumber},
      {"$-1\r\n", PieceKind::kMissing},
      {"$0\r\n\r\n", PieceKind::kText},
      {"$5\r\na\r\nbc\r\n", PieceKind::kText}};
  for (const auto& [text, kind] : pieces) {
    for (std::size_t size = 0; size < text.size(); ++size)
      CHECK(read_piece(Exact(std::string_view(text).substr(0, size))).kind == PieceKind::kOther);
    const Exact whole(text), longer(text + "$9");
    for (const std::string_view at : {std::string_view(whole), std::string_view(longer)}) {
      const Piece piece = read_piece(at);
      CHECK(piece.kind == kind);
      CHECK(piece.bytes == text.size());
    }
  }
  CHECK(read_piece("$5\r\na\r\nbc\r\n").text == "a\r\nbc");
  CHECK(read_piece(":-12\r\n").number == -12);
}

void what_is_no_piece_is_left_alone() {
  for (const char* text :
       {"", "*1\r\n:1\r\n", "-ERR\r\n", "$-2\r\nabc\r\n", "$18446744073709551615\r\nabc\r\n",
        "$9223372036854775807\r\nabc\r\n", ":x\r\n", ":\r\n", "$3\r\nabcd\r\n", "$\r\n", "\r\n"})
    CHECK(read_piece(Exact(text)).kind == PieceKind::kOther);
}

void any_bytes_are_read_within_their_bounds() {
  std::mt19937 draw(1);
  const std::string_view letters = "$:+*-\r\n0123459aT";
  const ValueShape shape{"$5\r\nT", 5, 1, 4};
  for (int round = 0; round < 20'000; ++round) {
    std::string text(draw() % 40, ' ');
    for (char& one : text) one = letters[draw() % letters.size()];
    if (round % 3 == 0) text = "$5\r\nT1234\r\n" + text;
    const Exact exact(text);
    const Piece piece = read_piece(exact);
    CHECK(piece.bytes <= text.size());
    CHECK(piece.text.size() <= piece.bytes);
    char rows[3 * 4];
    bool found[3];
    const ValuesRead read = read_values(exact.bytes.get(), exact.size, 3, shape, rows, found);
    CHECK(read.bytes <= text.size());
    CHECK(read.values <= 3);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Test tests[] = {
      TEST(pieces_are_read_once_they_are_whole),
      TEST(what_is_no_piece_is_left_alone),
      TEST(any_bytes_are_read_within_their_bounds),
  };
  return run_tests(argc, argv, tests);
}
