// The SSD store without Python: against a model in memory, under failures and crashes at every
// operation, and under the sanitizers.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "checksum.h"
#include "hash.h"
#include "store.h"

namespace {

using namespace dynamicemb;
namespace fs = std::filesystem;

using Model = std::map<uint64_t, uint64_t>;  // id -> the number that fills its row
constexpr size_t kPayload = 40;

constexpr unsigned bit(FileOperation kind) { return 1U << static_cast<unsigned>(kind); }
constexpr unsigned kChanges = bit(FileOperation::kWrite) | bit(FileOperation::kSync) |
                              bit(FileOperation::kRename) | bit(FileOperation::kRemove);

// In memory if it can be, where a sync costs nothing: failures and ends of processes are not those
// of a disk here.
class Folder {
 public:
  explicit Folder(bool on_disk = false) {
    const fs::path memory = "/dev/shm";
    const bool there = !on_disk && ::access(memory.c_str(), W_OK) == 0;
    std::string pattern = (there ? memory : fs::temp_directory_path()) / "store_tests_XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string operator/(const char* name) const { return path_ / name; }

 private:
  fs::path path_;
};

StoreConfig config(const std::string& path, bool direct = false) {
  return {path, kPayload, 512, 64 * 100, direct, 8, {}};  // segments of 100 records
}

std::vector<uint64_t> row(uint64_t number) { return {number, number ^ 1, ~number, 7, number * 3}; }

void put(SsdStore& store, const std::vector<uint64_t>& ids, const std::vector<uint64_t>& numbers) {
  std::vector<uint64_t> rows;
  for (const uint64_t number : numbers)
    for (const uint64_t word : row(number)) rows.push_back(word);
  std::vector<uint64_t> first, rest;  // two columns: 8 and 32 bytes
  for (size_t i = 0; i < numbers.size(); ++i) {
    first.push_back(rows[5 * i]);
    rest.insert(rest.end(), rows.begin() + 5 * i + 1, rows.begin() + 5 * i + 5);
  }
  const Column columns[] = {{reinterpret_cast<std::byte*>(first.data()), 8},
                            {reinterpret_cast<std::byte*>(rest.data()), 32}};
  store.insert(ids.data(), ids.size(), columns);
}

bool holds(const SsdStore& store, const Model& model, const std::vector<uint64_t>& ids) {
  std::vector<uint64_t> rows(ids.size() * 5);
  const auto found = std::make_unique<bool[]>(ids.size());
  const Column columns[] = {{reinterpret_cast<std::byte*>(rows.data()), kPayload}};
  store.find(ids.data(), ids.size(), found.get(), columns);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto known = model.find(ids[i]);
    if (found[i] != (known != model.end())) return false;
    if (found[i] &&
        !std::equal(rows.begin() + 5 * i, rows.begin() + 5 * i + 5, row(known->second).begin()))
      return false;
  }
  return store.size() == model.size();
}

Model exported(const SsdStore& store) {
  Model model;
  SsdStore::Cursor cursor;
  uint64_t ids[33], rows[33 * 5];
  const Column columns[] = {{reinterpret_cast<std::byte*>(rows), kPayload}};
  while (const size_t count = store.export_rows(cursor, 33, ids, columns))
    for (size_t i = 0; i < count; ++i) CHECK(model.emplace(ids[i], rows[5 * i]).second);
  return model;
}

std::vector<uint64_t> all_ids() {
  std::vector<uint64_t> ids;
  for (uint64_t id = 0; id < 400; ++id) ids.push_back(id - 200);  // both ends of the range
  return ids;
}

// One of many operations, done to both.
void step(SsdStore& store, Model& model, std::mt19937_64& random) {
  const size_t n = random() % 60;
  std::vector<uint64_t> ids, numbers;
  for (size_t i = 0; i < n; ++i) {
    ids.push_back(random() % 400 - 200);
    numbers.push_back(random());
  }
  if (random() % 4 == 0) {
    const auto removed = std::make_unique<bool[]>(n);
    std::vector<bool> expected;
    for (const uint64_t id : ids) expected.push_back(model.erase(id) == 1);
    store.erase(ids.data(), n, removed.get());
    for (size_t i = 0; i < n; ++i) CHECK(removed[i] == expected[i]);
  } else {
    for (size_t i = 0; i < n; ++i) model[ids[i]] = numbers[i];
    put(store, ids, numbers);
  }
}

void index_matches_a_map() {
  StoreIndex index;
  std::map<uint64_t, uint32_t> model;
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t id = random() % 50000;
    if (random() % 5 == 0) {
      const auto known = model.find(id);
      CHECK(index.erase(id) == (known == model.end() ? StoreIndex::kNone : known->second));
      model.erase(id);
    } else {
      const auto place = static_cast<uint32_t>(i);
      const auto known = model.find(id);
      CHECK(index.set(id, place) == (known == model.end() ? StoreIndex::kNone : known->second));
      model[id] = place;
    }
  }
  CHECK(index.size() == model.size());
  for (uint64_t id = 0; id < 50000; ++id) {
    const auto known = model.find(id);
    CHECK(index.find(id) == (known == model.end() ? StoreIndex::kNone : known->second));
  }
}

void index_needs_16_bytes_per_row() {
  StoreIndex index;
  for (uint64_t id = 0; id < 1000000; ++id) {
    index.set(id * 0x9E3779B97F4A7C15, 1);
    if (id % 50000 == 49999) CHECK(index.bytes() <= 16 * index.size() + 200000);
  }
}

void store_matches_a_map() {
  for (const bool direct : {false, true}) {
    const Folder folder(direct);
    Model model, saved;
    std::mt19937_64 random(2);
    auto store = std::make_unique<SsdStore>(config(folder / "s", direct));
    for (int i = 0; i < 300; ++i) {
      step(*store, model, random);
      CHECK(holds(*store, model, all_ids()));
      const StoreStats stats = store->stats();
      CHECK(stats.records <= 2 * stats.rows + 300);
      if (i % 50 == 20) {
        store->snapshot("kept", "a note");
        saved = model;
      }
      if (i % 50 == 30) CHECK(exported(*store) == model);
      if (i % 50 == 40) {
        store = nullptr;
        store = std::make_unique<SsdStore>(config(folder / "s", direct));
      }
      if (i % 100 == 49) {
        CHECK(store->load_snapshot("kept") == "a note");
        model = saved;
        CHECK(holds(*store, model, all_ids()));
      }
    }
    CHECK(store->stats().cleaned_segments > 0);
    store->clear();
    CHECK(holds(*store, {}, all_ids()));
    store->load_snapshot("kept");
    CHECK(exported(*store) == saved);
    store->drop_snapshot("kept");
    CHECK(throws<StoreError>([&] { store->load_snapshot("kept"); }));
  }
}

// Whatever fails, the store goes on as if it had not, and a new process finds what was flushed.
void every_operation_may_fail() {
  for (const int error : {ENOSPC, EIO, 0}) {
    for (uint64_t first = 0;; ++first) {
      const Folder folder;
      auto files = std::make_shared<FailingFiles>(kChanges, first, 2, error);
      Model model;
      std::mt19937_64 random(3);
      std::unique_ptr<SsdStore> store;
      for (int tries = 0; !store && tries < 8; ++tries) try {
          store = std::make_unique<SsdStore>(config(folder / "s"), files);
        } catch (const StoreError&) {
        }
      CHECK(store != nullptr);
      for (int i = 0; i < 60; ++i) {
        try {
          step(*store, model, random);
          if (i % 20 == 10) store->snapshot("kept", "");
          if (i % 20 == 15) store->flush();
        } catch (const StoreError& failure) {
          CHECK(failure.error() == error);
          CHECK(failure.path().find(folder / "s") == 0);
        }
        CHECK(holds(*store, model, all_ids()));
      }
      for (int tries = 0; tries < 3; ++tries) try {
          store->flush();
        } catch (const StoreError&) {
        }
      store = nullptr;
      CHECK(holds(SsdStore(config(folder / "s")), model, all_ids()));
      if (files->seen() <= first) break;
      if (first > 40) first += 6;  // the later ones are more of the same
    }
  }
}

// What a crash of the process leaves: the files as they are now.
Model after_a_crash(const Folder& folder) {
  const std::string copy = folder / "crashed";
  fs::remove_all(copy);
  fs::copy(folder / "s", copy, fs::copy_options::recursive);
  return exported(SsdStore(config(copy)));
}

// Every pair of operations fails, from the first try to open on: each failure is a StoreError, the
// rows are there all the time, and when the disk works again the next call succeeds. What was
// flushed is found after a crash at any moment.
void any_two_operations_may_fail() {
  const bool all_pairs = std::getenv("DYNAMICEMB_ALL_PAIRS") != nullptr;
  const unsigned kinds = kChanges | bit(FileOperation::kOpen);
  for (uint64_t first = 0, seen = 1; first < seen; ++first) {
    for (uint64_t then = first + 1; then < (all_pairs ? seen : first + 14); ++then) {
      const Folder folder;
      const auto files = std::make_shared<FailingFiles>(kinds, first, 1, EIO, then);
      std::unique_ptr<SsdStore> store;
      // Until it works, which is after two failures at most.
      const auto insist = [&](auto&& call) {
        for (int tries = 0;; ++tries) {
          try {
            return call();
          } catch (const StoreError& error) {
            CHECK(error.error() == EIO && tries < 2);
            if (tries >= 2) return;
          }
        }
      };
      const auto open = [&] {
        insist([&] { store = std::make_unique<SsdStore>(config(folder / "s"), files); });
      };
      open();
      Model model, flushed, kept;
      std::mt19937_64 random(7);
      for (int i = 0; i < 24; ++i) {
        try {
          step(*store, model, random);
        } catch (const StoreError&) {
        }
        CHECK(holds(*store, model, all_ids()));
        if (i % 5 == 2) {
          try {
            store->flush();
            flushed = model;
          } catch (const StoreError&) {
            if (i % 2 == 0) insist([&] { store->flush(), flushed = model; });
          }
        }
        if (i == 7 || i == 18) insist([&] { store->snapshot("kept", ""), flushed = kept = model; });
        if (i == 12 || i == 20) {
          try {
            store->load_snapshot("kept");
            flushed = model = kept;
          } catch (const StoreError&) {
          }
          CHECK(holds(*store, model, all_ids()));
          insist([&] { store->flush(), flushed = model; });
        }
        if (i == 15) {
          insist([&] { store->close(); });
          flushed = model;
          store = nullptr;
          open();
        }
        if (i == 22) insist([&] { store->drop_snapshot("kept"); });
        const Model found = after_a_crash(folder);
        if (flushed == model) CHECK(found == model);
        for (const auto& [id, number] : flushed)  // unless it changed since
          CHECK(!model.contains(id) || model[id] != number || found.at(id) == number);
      }
      insist([&] { store->flush(); });
      CHECK(exported(*store) == model);
      insist([&] { store->close(); });
      store = nullptr;
      seen = std::max(seen, files->seen());
      CHECK(exported(SsdStore(config(folder / "s"))) == model);
    }
  }
}

// In a process of its own that is killed inside operation number `at`: the state after every flush
// is known, and one of those at or after the last completed one must be found.
void a_crash_loses_nothing_that_was_flushed() {
  for (uint64_t at = 3;; at += 5) {
    const Folder folder;
    const pid_t child = ::fork();
    if (child == 0) {
      const auto files = std::make_shared<FailingFiles>(kChanges, at, 1, -1);
      SsdStore store(config(folder / "s"), files);
      Model model;
      std::mt19937_64 random(4);
      const int progress = ::open((folder / "progress").c_str(), O_WRONLY | O_CREAT, 0644);
      for (char i = 0; i < 100; ++i) {
        step(store, model, random);
        if (i % 5 == 4) {
          store.flush();
          if (::pwrite(progress, &i, 1, 0) != 1) ::_exit(2);
        }
      }
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    char flushed = -1;
    std::ifstream(folder / "progress").read(&flushed, 1);
    const SsdStore store(config(folder / "s"));
    const Model found = exported(store);
    // The rows of any moment from the last flush on: replay the same operations.
    const Folder other;
    SsdStore again(config(other / "s"));
    Model model;
    std::mt19937_64 random(4);
    bool matches = flushed < 0 && found.empty();
    for (int i = 0; i < 100 && !matches; ++i) {
      const Model before = model;
      step(again, model, random);
      if (i < flushed) continue;
      // The last step may be there in part: every row is from before or after it.
      matches = std::all_of(found.begin(), found.end(), [&](const auto& one) {
        const auto a = before.find(one.first), b = model.find(one.first);
        return (a != before.end() && a->second == one.second) ||
               (b != model.end() && b->second == one.second);
      });
      for (const auto& [id, number] : before) {
        const auto b = model.find(id);
        if (b != model.end() && b->second == number && !found.contains(id)) matches = false;
      }
    }
    CHECK(matches);
    if (WIFEXITED(status)) {
      CHECK(WEXITSTATUS(status) == 0);
      break;
    }
  }
}

void damage_is_found() {
  std::mt19937_64 random(5);
  const Folder folder;
  Model model;
  {
    SsdStore store(config(folder / "s"));
    for (int i = 0; i < 20; ++i) step(store, model, random);
    store.snapshot("kept", "");
  }
  std::vector<fs::path> paths;
  for (const auto& entry : fs::recursive_directory_iterator(folder / "s"))
    if (entry.is_regular_file() && entry.file_size() > 0) paths.push_back(entry.path());
  CHECK(paths.size() >= 4);
  for (int i = 0; i < 400; ++i) {
    const fs::path& path = paths[random() % paths.size()];
    const uint64_t size = fs::file_size(path);
    const uint64_t offset = random() % size;
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    char byte = 0;
    file.seekg(static_cast<std::streamoff>(offset)).read(&byte, 1);
    const char flipped = static_cast<char>(byte ^ (1 << random() % 8));
    file.seekp(static_cast<std::streamoff>(offset)).write(&flipped, 1).flush();
    bool same = true;
    try {
      const SsdStore store(config(folder / "s"));
      same = exported(store) == model && holds(store, model, all_ids());
    } catch (const CorruptStore&) {
    }
    CHECK(same);  // or refused
    file.seekp(static_cast<std::streamoff>(offset)).write(&byte, 1).flush();
  }
  CHECK(holds(SsdStore(config(folder / "s")), model, all_ids()));
}

// Several segments and two snapshots, closed.
Model make_closed_store(const std::string& path, uint64_t seed) {
  SsdStore store(config(path));
  Model model;
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20; ++i) {
    step(store, model, random);
    if (i == 5) store.snapshot("first", "");
    if (i == 12) store.snapshot("second", "");
  }
  store.close();
  return model;
}

std::string bytes_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, std::string> all_bytes(const std::string& folder) {
  std::map<std::string, std::string> bytes;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) bytes[entry.path()] = bytes_of(entry.path());
  return bytes;
}

std::vector<fs::path> segments_of(const std::string& store) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(store + "/segments"))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

// The message with which opening refuses; nothing in the folder changes for it.
std::string refusal(const std::string& path) {
  const auto before = all_bytes(path);
  std::string message;
  try {
    const SsdStore store(config(path));
  } catch (const CorruptStore& error) {
    message = error.what();
  }
  CHECK(all_bytes(path) == before);
  return message;
}

void a_closed_store_whose_files_are_others_is_refused() {
  const Folder folder;
  const Model model = make_closed_store(folder / "s", 11);
  make_closed_store(folder / "other", 12);
  const std::string copy = folder / "copy";
  const auto names = [&](const std::string& message, const fs::path& path) {
    return message.find(path.string()) != message.npos;
  };
  const auto segments = segments_of(folder / "s"), others = segments_of(folder / "other");
  CHECK(segments.size() >= 4);
  const auto afresh = [&] {
    fs::remove_all(copy);
    fs::copy(folder / "s", copy, fs::copy_options::recursive);
    return segments_of(copy);
  };
  for (size_t i = 0; i < segments.size(); ++i) {
    auto mine = afresh();
    if (i > 0) {
      fs::rename(mine[0], mine[0].string() + "x");
      fs::rename(mine[i], mine[0]);
      fs::rename(mine[0].string() + "x", mine[i]);
      CHECK(names(refusal(copy), mine[0]));
    }
    mine = afresh();
    fs::copy_file(others[0], mine[i], fs::copy_options::overwrite_existing);
    CHECK(names(refusal(copy), mine[i]));
    CHECK(refusal(copy).find("another store") != std::string::npos);
    mine = afresh();
    fs::remove(mine[i]);
    CHECK(names(refusal(copy), mine[i]));
    for (const uint64_t size : {0, 100, 512, 512 + 64 * 7}) {
      mine = afresh();
      fs::resize_file(mine[i], size);
      CHECK(names(refusal(copy), mine[i]));
    }
  }
  for (const char* name : {"first", "second"}) {
    const std::string file = copy + "/snapshots/" + name;
    afresh();
    fs::remove(file);
    CHECK(names(refusal(copy), file));
    afresh();
    fs::copy_file(folder / "other/snapshots/" + name, file, fs::copy_options::overwrite_existing);
    CHECK(names(refusal(copy), file));
    afresh();
    fs::resize_file(file, 0);
    CHECK(names(refusal(copy), file));
  }
  afresh();
  fs::copy_file(copy + "/snapshots/second", copy + "/snapshots/first",
                fs::copy_options::overwrite_existing);
  CHECK(names(refusal(copy), copy + "/snapshots/first"));
  auto mine = afresh();
  fs::copy_file(folder / "other/MANIFEST", copy + "/MANIFEST",
                fs::copy_options::overwrite_existing);
  CHECK(!refusal(copy).empty());
  mine = afresh();
  fs::remove(copy + "/MANIFEST");
  CHECK(names(refusal(copy), copy + "/MANIFEST"));
  // An older manifest over newer segments.
  mine = afresh();
  {
    SsdStore store(config(copy));
    put(store, {1}, {1});
  }
  fs::copy_file(folder / "s/MANIFEST", copy + "/MANIFEST", fs::copy_options::overwrite_existing);
  CHECK(refusal(copy).find("newer than MANIFEST") != std::string::npos);
  afresh();
  CHECK(holds(SsdStore(config(copy)), model, all_ids()));
}

void files_that_nothing_needs_are_moved_aside() {
  const Folder folder;
  const Model model = make_closed_store(folder / "s", 13);
  make_closed_store(folder / "other", 14);
  const std::string stranger = bytes_of(segments_of(folder / "other")[0]);
  const std::string segments = folder / "s/segments";
  std::ofstream(segments + "/000000099999.rows", std::ios::binary) << stranger;
  std::ofstream(segments + "/000000088888.rows") << "notes";
  std::ofstream(segments + "/notes.txt") << "notes";
  SsdStore store(config(folder / "s"));
  CHECK(holds(store, model, all_ids()));
  const auto aside = store.stats().set_aside;
  CHECK(aside.size() == 2);
  CHECK(bytes_of(aside[0]) == "notes");
  CHECK(bytes_of(aside[1]) == stranger);
  CHECK(bytes_of(segments + "/notes.txt") == "notes");
}

// Without a clean end only what was flushed is known to have been there.
void files_of_others_are_refused_after_a_crash_too() {
  const Folder folder;
  make_closed_store(folder / "other", 15);
  SsdStore store(config(folder / "s"));
  Model model;
  std::mt19937_64 random(16);
  for (int i = 0; i < 20; ++i) step(store, model, random);
  store.flush();
  const std::string copy = folder / "copy";
  const auto crash = [&] {
    fs::remove_all(copy);
    fs::copy(folder / "s", copy, fs::copy_options::recursive);
    return segments_of(copy);
  };
  auto mine = crash();
  CHECK(mine.size() >= 3);
  fs::copy_file(segments_of(folder / "other")[0], mine.back(),
                fs::copy_options::overwrite_existing);
  CHECK(refusal(copy).find("another store") != std::string::npos);
  mine = crash();
  fs::rename(mine[0], mine[1]);
  CHECK(!refusal(copy).empty());
  mine = crash();
  fs::remove(mine[1]);
  CHECK(!refusal(copy).empty());
  crash();
  CHECK(exported(SsdStore(config(copy))) == model);
}

// ---- format 1 ----

constexpr size_t kRecord = 24 + kPayload;

std::string text_of_format_1(const std::string& text) {
  std::string body;
  size_t begin = 0;
  for (size_t end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    std::string line = text.substr(begin, end - begin);
    const std::string word = line.substr(0, line.find(' '));
    if (word == "dynamicemb-ssd") line = "dynamicemb-ssd 1";
    if (word == "segment") line = line.substr(0, line.rfind(' '));
    if (word == "rows" || word == "next" || word == "note" || word == "segment" ||
        word == "dynamicemb-ssd")
      body += line + '\n';
  }
  char sum[32];
  std::snprintf(sum, sizeof sum, "xxh64 %016llx\n",
                static_cast<unsigned long long>(xxh64(body.data(), body.size())));
  return body + sum;
}

// What the version before wrote.
void to_format_1(const std::string& path) {
  for (const fs::path& file : segments_of(path)) {
    std::string bytes = bytes_of(file);
    const uint64_t number = std::stoull(file.filename().string());
    std::memcpy(bytes.data(), "DEMBSEG1", 8);
    const uint64_t sum = xxh64(bytes.data(), 40);
    std::memcpy(bytes.data() + 40, &sum, 8);
    std::memset(bytes.data() + 48, 0, 512 - 48);
    for (uint64_t place = 0; place < 100; ++place) {
      char* record = bytes.data() + 512 + place * kRecord;
      if (record + kRecord > bytes.data() + bytes.size() || record[16] == 0) break;  // kind
      const uint64_t checksum = xxh64(record + 8, kRecord - 8) ^ hash_id(number << 32 ^ place);
      std::memcpy(record, &checksum, 8);
    }
    std::ofstream(file, std::ios::binary) << bytes;
  }
  std::vector<fs::path> manifests = {path + "/MANIFEST"};
  for (const auto& entry : fs::directory_iterator(path + "/snapshots"))
    manifests.push_back(entry.path());
  for (const fs::path& manifest : manifests) {
    const std::string text = text_of_format_1(bytes_of(manifest));
    std::ofstream(manifest, std::ios::binary) << text;
  }
}

bool has_format_1(const std::string& path) {
  for (const auto& [file, bytes] : all_bytes(path))
    if (bytes.starts_with("DEMBSEG1") || bytes.starts_with("dynamicemb-ssd 1")) return true;
  return false;
}

void format_1_opens_and_the_next_flush_upgrades_it() {
  for (uint64_t fails = 0, seen = 1; fails < seen; ++fails) {
    const Folder folder;
    Model model = make_closed_store(folder / "s", 17);
    to_format_1(folder / "s");
    const auto before = all_bytes(folder / "s");
    auto reading = config(folder / "s");
    reading.snapshot = "second";
    const Model second = exported(SsdStore(reading));
    CHECK(!second.empty());
    auto files = std::make_shared<FailingFiles>(kChanges, fails, 1, EIO);
    {
      SsdStore store(config(folder / "s"), files);
      CHECK(exported(store) == model);
      CHECK(all_bytes(folder / "s") == before);  // opening changes nothing
      put(store, {1, 2, 3}, {4, 5, 6});
      model[1] = 4, model[2] = 5, model[3] = 6;
      try {
        store.flush();
      } catch (const StoreError&) {
        CHECK(exported(store) == model);
        CHECK(after_a_crash(folder).size() + 3 >= model.size());
        store.flush();
      }
      CHECK(!has_format_1(folder / "s"));
      CHECK(after_a_crash(folder) == model);
      CHECK(exported(SsdStore(reading)) == second);
    }
    seen = files->seen();
    SsdStore store(config(folder / "s"));
    CHECK(exported(store) == model);
    store.load_snapshot("second");
    CHECK(exported(store) == second);
  }
}

// ---- forks ----

// Runs `body` in a forked child; its result, or -1 if it does not end by itself.
template <class Body>
int in_a_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(body());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void a_forked_child_reads_and_changes_nothing() {
  for (const bool direct : {false, true}) {
    const Folder folder(direct);
    auto store = std::make_unique<SsdStore>(config(folder / "s", direct));
    Model model;
    for (const uint64_t id : all_ids()) model[id] = id;
    put(*store, all_ids(), all_ids());
    store->flush();
    put(*store, {5}, {6});  // in memory
    model[5] = 6;
    CHECK(holds(*store, model, all_ids()));  // with its threads
    const auto before = all_bytes(folder / "s");
    CHECK(in_a_child([&] {
            if (!holds(*store, model, all_ids()) || exported(*store) != model) return 1;
            bool removed = false;
            const uint64_t id = 5;
            const auto refused = [](auto&& call) { return throws<std::logic_error>(call); };
            if (!refused([&] { put(*store, {1}, {2}); })) return 2;
            if (!refused([&] { store->erase(&id, 1, &removed); })) return 3;
            if (!refused([&] { store->flush(); })) return 4;
            if (!refused([&] { store->clear(); })) return 5;
            if (!refused([&] { store->snapshot("x", ""); })) return 6;
            if (!throws<StoreError>([&] { SsdStore other(config(folder / "s")); })) return 7;
            store->close();
            if (!refused([&] { holds(*store, model, all_ids()); })) return 8;
            return 0;
          }) == 0);
    CHECK(in_a_child([&] {
            store = nullptr;
            return 0;
          }) == 0);
    CHECK(all_bytes(folder / "s") == before);
    put(*store, {7}, {8});
    model[7] = 8;
    store->flush();
    CHECK(after_a_crash(folder) == model);

    // The lock ends with the store, whatever children there are.
    int ends[2];
    CHECK(::pipe(ends) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
      char byte;
      ::close(ends[1]);
      ::_exit(::read(ends[0], &byte, 1) == 0 && holds(*store, model, all_ids()) ? 0 : 1);
    }
    ::close(ends[0]);
    store = nullptr;
    {
      SsdStore again(config(folder / "s", direct));
      again.clear();  // the child still has the files
    }
    ::close(ends[1]);
    int status = 0;
    ::waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

void a_file_that_was_cut_is_an_error() {
  const Folder folder;
  Model model;
  std::mt19937_64 random(6);
  SsdStore store(config(folder / "s"));
  for (int i = 0; i < 10; ++i) step(store, model, random);
  store.flush();
  for (const auto& entry : fs::directory_iterator(folder / "s/segments"))
    fs::resize_file(entry.path(), 0);
  CHECK(throws<StoreError>([&] { holds(store, model, all_ids()); }));
}

void one_store_per_folder() {
  const Folder folder;
  const SsdStore store(config(folder / "s"));
  CHECK(throws<StoreError>([&] { SsdStore other(config(folder / "s")); }));
  auto wider = config(folder / "t");
  {
    const SsdStore made(wider);
  }
  wider.payload = 48;
  CHECK(throws<std::invalid_argument>([&] { SsdStore other(wider); }));
}

void readers_and_a_writer_take_turns() {
  const Folder folder;
  SsdStore store(config(folder / "s"));
  Model model;
  for (const uint64_t id : all_ids()) model[id] = id;
  put(store, all_ids(), all_ids());
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 30; ++i) CHECK(holds(store, model, all_ids()));
    });
  for (int i = 0; i < 30; ++i) put(store, all_ids(), all_ids());
  for (auto& thread : threads) thread.join();
}

const Test kTests[] = {
    TEST(index_matches_a_map),
    TEST(index_needs_16_bytes_per_row),
    TEST(store_matches_a_map),
    TEST(every_operation_may_fail),
    TEST(any_two_operations_may_fail),
    TEST(a_crash_loses_nothing_that_was_flushed),
    TEST(damage_is_found),
    TEST(a_closed_store_whose_files_are_others_is_refused),
    TEST(files_that_nothing_needs_are_moved_aside),
    TEST(files_of_others_are_refused_after_a_crash_too),
    TEST(format_1_opens_and_the_next_flush_upgrades_it),
    TEST(a_forked_child_reads_and_changes_nothing),
    TEST(a_file_that_was_cut_is_an_error),
    TEST(one_store_per_folder),
    TEST(readers_and_a_writer_take_turns),
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
