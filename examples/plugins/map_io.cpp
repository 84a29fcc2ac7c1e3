// A plug-in for torchrec_dynamic_embedding that keeps rows in a map, as the smallest example.
//
//     c++ -std=c++17 -shared -fPIC -I include examples/plugins/map_io.cpp -o map_io.so
//
//     torch.ops.tde.register_io("map_io.so")
//     tde.wrap("map://", ...)
//
// A real one would send the rows to a server, from threads of its own, and call back from there.
#include <dynamicemb/tde_io.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace {

// What IO_Initialize makes: a store, one per table.
struct Store {
  std::mutex mutex;
  std::map<std::tuple<std::string, int64_t, uint32_t>, std::string> parts;  // table, id, part
};

}  // namespace

extern "C" {

const char* IO_type = "map";

// The text after "map://" is the plug-in's own matter; this one has no use for it.
void* IO_Initialize(const char* /*text*/) { return new Store; }

void IO_Finalize(void* store) { delete static_cast<Store*>(store); }

void IO_Pull(void* instance, IOPullParameter pull) {
  auto* store = static_cast<Store*>(instance);
  for (uint32_t i = 0; i < pull.num_global_ids_; i++) {
    for (uint32_t part = 0; part < pull.num_optimizer_stats_; part++) {
      std::string data;
      {
        const std::lock_guard lock(store->mutex);
        const auto found = store->parts.find({pull.table_name_, pull.global_ids_[i], part});
        if (found != store->parts.end()) data = found->second;
      }
      void* address = data.empty() ? nullptr : data.data();
      pull.on_global_id_fetched_(pull.on_complete_context_, i * pull.num_cols_, part, address,
                                 static_cast<uint32_t>(data.size()));
    }
  }
  pull.on_all_fetched_(pull.on_complete_context_);
}

void IO_Push(void* instance, IOPushParameter push) {
  auto* store = static_cast<Store*>(instance);
  const char* data = static_cast<const char*>(push.data_);
  uint32_t x = 0;
  for (uint32_t i = 0; i < push.num_global_ids_; i++) {
    for (uint32_t s = 0; s < push.num_optimizer_stats_; s++, x++) {
      const uint32_t part = push.optimizer_stats_ids_[s];
      std::string bytes(data + push.offsets_[x], data + push.offsets_[x + 1]);
      const std::lock_guard lock(store->mutex);
      store->parts[{push.table_name_, push.global_ids_[i], part}] = std::move(bytes);
    }
  }
  push.on_push_complete(push.on_complete_context_);
}

}  // extern "C"
