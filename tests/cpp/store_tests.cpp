// The SSD store without Python: against a model in memory, under failures and crashes at every
// operation, and under the sanitizers.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "store.h"

namespace {

using namespace dynamicemb;
namespace fs = std::filesystem;

using Model = std::map<uint64_t, uint64_t>;  // id -> the number that fills its row
constexpr size_t kPayload = 40;

class Folder {
 public:
  Folder() {
    std::string pattern = fs::temp_directory_path() / "store_tests_XXXXXX";
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
    const Folder folder;
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
      const unsigned kinds = 1 << static_cast<int>(FileOperation::kWrite) |
                             1 << static_cast<int>(FileOperation::kSync) |
                             1 << static_cast<int>(FileOperation::kRename) |
                             1 << static_cast<int>(FileOperation::kRemove);
      auto files = std::make_shared<FailingFiles>(kinds, first, 2, error);
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

// In a process of its own that is killed inside operation number `at`: the state after every flush
// is known, and one of those at or after the last completed one must be found.
void a_crash_loses_nothing_that_was_flushed() {
  const unsigned kinds =
      1 << static_cast<int>(FileOperation::kWrite) | 1 << static_cast<int>(FileOperation::kSync) |
      1 << static_cast<int>(FileOperation::kRename) | 1 << static_cast<int>(FileOperation::kRemove);
  for (uint64_t at = 3;; at += 5) {
    const Folder folder;
    const pid_t child = ::fork();
    if (child == 0) {
      const auto files = std::make_shared<FailingFiles>(kinds, at, 1, -1);
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
    TEST(a_crash_loses_nothing_that_was_flushed),
    TEST(damage_is_found),
    TEST(a_file_that_was_cut_is_an_error),
    TEST(one_store_per_folder),
    TEST(readers_and_a_writer_take_turns),
};

}  // namespace

int main(int argc, char** argv) { return run_tests(argc, argv, kTests); }
