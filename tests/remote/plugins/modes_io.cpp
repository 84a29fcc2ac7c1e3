// A plug-in that behaves as the text of its URL says. Compiled by the tests, with the symbols of
// the older or the newer spelling, or without one of them.
#include <dynamicemb/tde_io.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#ifndef TYPE
#define TYPE "modes"
#endif

namespace {

struct Store {
  std::string mode;
  std::mutex mutex;
  std::map<std::tuple<std::string, int64_t, uint32_t>, std::string> parts;
  std::vector<std::thread> threads;

  ~Store() {
    for (std::thread& thread : threads) thread.join();
  }
};

void answer(Store* store, const std::string& table, IOPullParameter pull,
            const std::vector<int64_t>& ids, uint32_t begin, uint32_t step) {
  for (uint32_t i = begin; i < ids.size(); i += step) {
    for (uint32_t part = 0; part < pull.num_optimizer_stats_; part++) {
      std::string data;
      {
        const std::lock_guard lock(store->mutex);
        const auto found = store->parts.find({table, ids[i], part});
        if (found != store->parts.end()) data = found->second;
      }
      if (store->mode == "short" && !data.empty()) data.pop_back();
      if (store->mode == "partly" && part == 1) data.clear();
      const uint32_t offset = store->mode == "outside" ? i + 1000 : i;
      pull.on_global_id_fetched_(pull.on_complete_context_, offset, part,
                                 data.empty() ? nullptr : data.data(),
                                 static_cast<uint32_t>(data.size()));
    }
  }
}

}  // namespace

extern "C" {

#ifndef NO_TYPE
const char* IO_type = TYPE;
#endif

void* IO_Initialize(const char* text) {
  const std::string mode = text;
  if (mode == "null") return nullptr;
  if (mode == "throw on start") throw std::runtime_error("no such cluster");
  auto* store = new Store;
  store->mode = mode;
  return store;
}

#ifndef NO_FINALIZE
void IO_Finalize(void* store) { delete static_cast<Store*>(store); }
#endif

#ifdef OLDER
void IO_Pull(void* instance, IOPullParameter pull) {
#else
void IO_Fetch(void* instance, IOFetchParameter pull) {
#endif
  auto* store = static_cast<Store*>(instance);
  if (store->mode == "throw") throw std::runtime_error("the cluster is gone");
  if (store->mode == "throw odd") throw 7;
  if (store->mode == "silent") return;
  std::vector<int64_t> ids(pull.global_ids_, pull.global_ids_ + pull.num_global_ids_);
  const std::string table = pull.table_name_;
  if (store->mode != "threads") {  // re-entrant: all callbacks before this returns
    answer(store, table, pull, ids, 0, 1);
    pull.on_all_fetched_(pull.on_complete_context_);
    if (store->mode == "twice") pull.on_all_fetched_(pull.on_complete_context_);
    return;
  }
  store->threads.emplace_back([=] {
    std::vector<std::thread> workers;
    for (uint32_t worker = 0; worker < 3; worker++) {
      workers.emplace_back([=] { answer(store, table, pull, ids, worker, 3); });
    }
    for (std::thread& worker : workers) worker.join();
    pull.on_all_fetched_(pull.on_complete_context_);
  });
}

void IO_Push(void* instance, IOPushParameter push) {
  auto* store = static_cast<Store*>(instance);
  if (store->mode == "throw") throw std::runtime_error("the cluster is full");
  if (store->mode == "silent") return;
  const auto work = [store, push, table = std::string(push.table_name_)] {
    const char* data = static_cast<const char*>(push.data_);
    for (uint32_t x = 0; x + 1 < push.num_offsets_; x++) {
      const uint32_t part = push.optimizer_stats_ids_[x % push.num_optimizer_stats_];
      const int64_t id = push.global_ids_[x / push.num_optimizer_stats_];
      const std::lock_guard lock(store->mutex);
      store->parts[{table, id, part}].assign(data + push.offsets_[x], data + push.offsets_[x + 1]);
    }
    push.on_push_complete(push.on_complete_context_);
  };
  if (store->mode == "threads") {
    store->threads.emplace_back(work);
  } else {
    work();
  }
}

}  // extern "C"
