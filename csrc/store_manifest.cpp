#include "store_manifest.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string_view>

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

// Strings instead of streams: a stream needs the C++ library's locales, and a process may have
// several copies of that library, of which torch brings one.
std::string Manifest::body() const {
  const auto number = [](uint64_t value) { return std::to_string(value); };
  std::string body = "dynamicemb-ssd 2\nstore " + hexadecimal(shape.store.high) +
                     hexadecimal(shape.store.low) + '\n';
  body += snapshot.empty() ? "content\n" : "snapshot " + snapshot + '\n';
  body += "rows " + number(shape.payload) + ' ' + number(shape.block) + ' ' +
          number(shape.capacity) + "\nnext " + number(next) + '\n';
  for (const Entry& entry : segments)
    body += "segment " + number(entry.number) + ' ' +
            (entry.records == kAll ? "all" : number(entry.records)) + ' ' + number(entry.durable) +
            '\n';
  for (const auto& [name, sum] : holds) body += "holds " + name + ' ' + hexadecimal(sum) + '\n';
  if (closed) body += "closed\n";
  body += "note ";
  for (const char c : note) {
    static constexpr char kDigits[] = "0123456789abcdef";
    body += kDigits[static_cast<unsigned char>(c) >> 4];
    body += kDigits[static_cast<unsigned char>(c) & 15];
  }
  body += '\n';
  return body;
}

std::string Manifest::text() const { return body() + "xxh64 " + hexadecimal(sum()) + "\n"; }

uint64_t Manifest::sum() const {
  const std::string text = body();
  return xxh64(text.data(), text.size());
}

Manifest Manifest::parse(const std::string& text, const std::string& path) {
  const auto refuse = [&](const char* problem) { throw CorruptStore(path, problem); };
  const size_t last = text.size() < 2 ? std::string::npos : text.rfind('\n', text.size() - 2);
  if (last == std::string::npos) refuse("it is no list of segments");
  const std::string body = text.substr(0, last + 1);
  if (text.substr(last + 1) != "xxh64 " + hexadecimal(xxh64(body.data(), body.size())) + "\n")
    refuse("it is damaged (its checksum does not fit)");
  std::string_view rest(body);
  // The next word of the line, without the space or the end of the line after it.
  const auto word = [&] {
    const size_t end = std::min(rest.find_first_of(" \n"), rest.size());
    const std::string_view found = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return found;
  };
  const auto read = [&](std::string_view digits, auto& value, int base) {
    const char* end = digits.data() + digits.size();
    const auto result = std::from_chars(digits.data(), end, value, base);
    if (result.ec != std::errc() || result.ptr != end) refuse("it has a number that is none");
  };
  const auto number = [&](auto& value) { read(word(), value, 10); };
  Manifest manifest;
  const std::string_view kind = word(), version = word();
  if (kind != "dynamicemb-ssd" || (version != "1" && version != "2"))
    refuse("it has a format that is neither 1 nor 2");
  manifest.older = version == "1";
  while (!rest.empty()) {
    const std::string_view line = word();
    if (line == "rows") {
      number(manifest.shape.payload);
      number(manifest.shape.block);
      number(manifest.shape.capacity);
    } else if (line == "next") {
      number(manifest.next);
    } else if (line == "segment") {
      Entry entry{};
      number(entry.number);
      const std::string_view records = word();
      if (records == "all")
        entry.records = kAll;
      else
        read(records, entry.records, 10);
      if (!manifest.older) number(entry.durable);
      if (!manifest.segments.empty() && manifest.segments.back().number >= entry.number)
        refuse("its segments are not in order");
      manifest.segments.push_back(entry);
    } else if (line == "store") {
      const std::string_view id = word();
      if (id.size() != 32) refuse("the id of its store is none");
      read(id.substr(0, 16), manifest.shape.store.high, 16);
      read(id.substr(16), manifest.shape.store.low, 16);
    } else if (line == "snapshot") {
      manifest.snapshot = word();
    } else if (line == "holds") {
      const std::string_view name = word();
      read(word(), manifest.holds[std::string(name)], 16);
    } else if (line == "content") {
    } else if (line == "closed") {
      manifest.closed = true;
    } else if (line == "note") {
      const std::string_view digits = word();
      for (size_t i = 0; i + 1 < digits.size(); i += 2) {
        const int high = digit(digits[i]), low = digit(digits[i + 1]);
        if (high < 0 || low < 0) refuse("its note is not hexadecimal");
        manifest.note.push_back(static_cast<char>(high << 4 | low));
      }
    } else {
      refuse("it has a line of another kind");
    }
  }
  if (manifest.older == manifest.shape.store.known()) refuse("it has no id of a store");
  return manifest;
}

}  // namespace dynamicemb
