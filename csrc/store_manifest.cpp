#include "store_manifest.h"

#include <charconv>
#include <sstream>

#include "checksum.h"

namespace dynamicemb {
namespace {

std::string hexadecimal(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

int digit(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

std::string Manifest::text() const {
  std::ostringstream out;
  out << "dynamicemb-ssd 1\nrows " << shape.payload << ' ' << shape.block << ' ' << shape.capacity
      << "\nnext " << next << '\n';
  for (const Entry& entry : segments) {
    out << "segment " << entry.number << ' ';
    if (entry.records == kAll)
      out << "all\n";
    else
      out << entry.records << '\n';
  }
  out << "note ";
  for (const char c : note) {
    static constexpr char kDigits[] = "0123456789abcdef";
    out << kDigits[static_cast<unsigned char>(c) >> 4]
        << kDigits[static_cast<unsigned char>(c) & 15];
  }
  out << '\n';
  const std::string body = out.str();
  return body + "xxh64 " + hexadecimal(xxh64(body.data(), body.size())) + "\n";
}

Manifest Manifest::parse(const std::string& text, const std::string& path) {
  const auto refuse = [&](const char* problem) { throw CorruptStore(path, problem); };
  const size_t last = text.size() < 2 ? std::string::npos : text.rfind('\n', text.size() - 2);
  if (last == std::string::npos) refuse("it is no list of segments");
  const std::string body = text.substr(0, last + 1);
  if (text.substr(last + 1) != "xxh64 " + hexadecimal(xxh64(body.data(), body.size())) + "\n")
    refuse("it is damaged (its checksum does not fit)");
  std::istringstream in(body);
  Manifest manifest;
  std::string word, version;
  in >> word >> version;
  if (word != "dynamicemb-ssd" || version != "1") refuse("another format than version 1");
  while (in >> word) {
    if (word == "rows") {
      in >> manifest.shape.payload >> manifest.shape.block >> manifest.shape.capacity;
    } else if (word == "next") {
      in >> manifest.next;
    } else if (word == "segment") {
      Entry entry{};
      std::string records;
      in >> entry.number >> records;
      if (records == "all") {
        entry.records = kAll;
      } else {
        const auto result =
            std::from_chars(records.data(), records.data() + records.size(), entry.records);
        if (result.ec != std::errc()) refuse("it has a number of records that is none");
      }
      if (!manifest.segments.empty() && manifest.segments.back().number >= entry.number)
        refuse("its segments are not in order");
      manifest.segments.push_back(entry);
    } else if (word == "note") {
      std::string digits;
      std::getline(in, digits);
      for (size_t i = 1; i + 1 < digits.size(); i += 2) {
        const int high = digit(digits[i]), low = digit(digits[i + 1]);
        if (high < 0 || low < 0) refuse("its note is not hexadecimal");
        manifest.note.push_back(static_cast<char>(high << 4 | low));
      }
    } else {
      refuse("it has a line of another kind");
    }
  }
  return manifest;
}

}  // namespace dynamicemb
