#include "plugin.h"

#include <dlfcn.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace dynamicemb {

namespace {

// What a call waits for. Callbacks know it by a number, so that one that comes too late, or once
// too often, does no harm.
struct Waiting {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::string problem;

  // Everything the plug-in was given.
  std::vector<int64_t> ids;
  std::vector<uint32_t> sizes;
  std::vector<uint32_t> parts;
  std::vector<uint64_t> offsets;
  std::vector<uint8_t> rows;
  std::vector<uint8_t> got;  // by id and part
  size_t stride = 0;

  void finish() {
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_all();
  }
  // False: the time is over.
  bool wait(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, timeout, [this] { return done; });
  }
};

class Registry {
 public:
  static Registry& instance() {
    static auto* registry = new Registry;  // callbacks may come while the process ends
    return *registry;
  }
  void* add(std::shared_ptr<Waiting> waiting) {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(++last_, std::move(waiting));
    return reinterpret_cast<void*>(last_);
  }
  std::shared_ptr<Waiting> find(void* number) {
    const std::lock_guard lock(mutex_);
    const auto at = waiting_.find(reinterpret_cast<uintptr_t>(number));
    return at == waiting_.end() ? nullptr : at->second;
  }
  void remove(void* number) {
    const std::lock_guard lock(mutex_);
    waiting_.erase(reinterpret_cast<uintptr_t>(number));
  }

 private:
  std::mutex mutex_;
  uintptr_t last_ = 0;
  std::unordered_map<uintptr_t, std::shared_ptr<Waiting>> waiting_;
};

void on_fetched(void* context, uint32_t offset, uint32_t part, void* data, uint32_t length) {
  const auto waiting = Registry::instance().find(context);
  if (waiting == nullptr) return;
  std::string problem;
  if (offset >= waiting->ids.size() || part >= waiting->sizes.size()) {
    problem = "it called back for row " + std::to_string(offset) + ", part " +
              std::to_string(part) + " of " + std::to_string(waiting->ids.size()) + " rows with " +
              std::to_string(waiting->sizes.size()) + " parts";
  } else if (data == nullptr || length == 0) {
    return;
  } else if (length != waiting->sizes[part]) {
    problem = "it has " + std::to_string(length) + " bytes for part " + std::to_string(part) +
              " of id " + std::to_string(waiting->ids[offset]) +
              "; allowed: " + std::to_string(waiting->sizes[part]);
  } else {
    size_t begin = waiting->stride * offset;
    for (uint32_t before = 0; before < part; before++) begin += waiting->sizes[before];
    std::memcpy(waiting->rows.data() + begin, data, length);
    waiting->got[size_t{offset} * waiting->sizes.size() + part] = 1;
    return;
  }
  const std::lock_guard lock(waiting->mutex);
  if (waiting->problem.empty()) waiting->problem = problem;
}

void on_done(void* context) {
  const auto waiting = Registry::instance().find(context);
  if (waiting == nullptr) return;
  Registry::instance().remove(context);
  waiting->finish();
}

std::shared_ptr<Waiting> make_waiting(const int64_t* ids, size_t n,
                                      const std::vector<uint32_t>& sizes) {
  auto waiting = std::make_shared<Waiting>();
  waiting->ids.assign(ids, ids + n);
  waiting->sizes = sizes;
  for (const uint32_t size : sizes) waiting->stride += size;
  waiting->rows.resize(n * waiting->stride);
  return waiting;
}

const int64_t kColumn = 0;

}  // namespace

void* Plugin::symbol(void* library, const char* name) const {
  dlerror();
  void* found = dlsym(library, name);
  return dlerror() == nullptr ? found : nullptr;
}

Plugin::Plugin(const std::string& path) : path_(path) {
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    throw PluginError("it cannot be loaded: " + std::string(why == nullptr ? path : why));
  }
  const auto* type = static_cast<const char* const*>(symbol(library, "IO_type"));
  initialize_ = reinterpret_cast<void* (*)(const char*)>(symbol(library, "IO_Initialize"));
  finalize_ = reinterpret_cast<void (*)(void*)>(symbol(library, "IO_Finalize"));
  void* pull = symbol(library, "IO_Pull");
  if (pull == nullptr) pull = symbol(library, "IO_Fetch");
  pull_ = reinterpret_cast<void (*)(void*, IOPullParameter)>(pull);
  push_ = reinterpret_cast<void (*)(void*, IOPushParameter)>(symbol(library, "IO_Push"));
  const char* missing = type == nullptr          ? "IO_type"
                        : initialize_ == nullptr ? "IO_Initialize"
                        : finalize_ == nullptr   ? "IO_Finalize"
                        : pull_ == nullptr       ? "IO_Pull (nor IO_Fetch)"
                        : push_ == nullptr       ? "IO_Push"
                                                 : nullptr;
  if (missing != nullptr) {
    dlclose(library);
    throw PluginError(std::string("it has no symbol ") + missing);
  }
  if (*type == nullptr) throw PluginError("its IO_type is NULL");
  type_ = *type;
}

void PluginStore::fail(const char* name, const std::string& what) const {
  throw PluginError(std::string(name) + " " + what);
}

void PluginStore::give_up(const char* name, std::chrono::milliseconds timeout) {
  given_up_ = true;
  fail(name, "did not call back in " + std::to_string(timeout.count()) + " ms");
}

template <typename Work>
void PluginStore::call(const char* name, void* number, Work work) {
  const std::lock_guard lock(entry_);
  try {
    work();
  } catch (const std::exception& error) {
    Registry::instance().remove(number);
    fail(name, std::string("threw: ") + error.what());
  } catch (...) {
    Registry::instance().remove(number);
    fail(name, "threw something");
  }
}

PluginStore::PluginStore(std::shared_ptr<Plugin> plugin, const std::string& config)
    : plugin_(std::move(plugin)) {
  call("IO_Initialize", nullptr, [&] { store_ = plugin_->initialize_(config.c_str()); });
  if (store_ == nullptr) fail("IO_Initialize", "returned NULL");
}

PluginStore::~PluginStore() {
  if (given_up_) return;
  try {
    plugin_->finalize_(store_);
  } catch (...) {  // NOLINT: nobody is left to tell
  }
}

void PluginStore::pull(const std::string& table, const int64_t* ids, size_t n,
                       const std::vector<uint32_t>& sizes, std::chrono::milliseconds timeout,
                       bool* found, uint8_t* rows) {
  if (n == 0) return;
  const auto waiting = make_waiting(ids, n, sizes);
  waiting->got.resize(n * sizes.size());
  void* number = Registry::instance().add(waiting);
  IOPullParameter parameter{};
  parameter.table_name_ = table.c_str();
  parameter.num_cols_ = 1;
  parameter.num_global_ids_ = static_cast<uint32_t>(n);
  parameter.col_ids_ = &kColumn;
  parameter.global_ids_ = waiting->ids.data();
  parameter.num_optimizer_stats_ = static_cast<uint32_t>(sizes.size());
  parameter.on_complete_context_ = number;
  parameter.on_global_id_fetched_ = on_fetched;
  parameter.on_all_fetched_ = on_done;
  call("IO_Pull", number, [&] { plugin_->pull_(store_, parameter); });
  if (!waiting->wait(timeout)) give_up("IO_Pull", timeout);
  if (!waiting->problem.empty()) fail("IO_Pull", "failed: " + waiting->problem);
  for (size_t i = 0; i < n; i++) {
    const uint8_t* got = waiting->got.data() + i * sizes.size();
    for (size_t part = 1; part < sizes.size(); part++) {
      if (got[part] != got[0]) {
        fail("IO_Pull", "failed: it has the weight or a state of id " +
                            std::to_string(waiting->ids[i]) + ", and not all of them");
      }
    }
    found[i] = got[0] != 0;
  }
  std::memcpy(rows, waiting->rows.data(), waiting->rows.size());
}

void PluginStore::push(const std::string& table, const int64_t* ids, size_t n,
                       const std::vector<uint32_t>& sizes, std::chrono::milliseconds timeout,
                       const uint8_t* rows) {
  if (n == 0) return;
  const auto waiting = make_waiting(ids, n, sizes);
  std::memcpy(waiting->rows.data(), rows, waiting->rows.size());
  uint64_t offset = 0;
  waiting->offsets.push_back(0);
  for (size_t i = 0; i < n; i++) {
    for (const uint32_t size : sizes) waiting->offsets.push_back(offset += size);
  }
  for (uint32_t part = 0; part < sizes.size(); part++) waiting->parts.push_back(part);
  void* number = Registry::instance().add(waiting);
  IOPushParameter parameter{};
  parameter.table_name_ = table.c_str();
  parameter.num_cols_ = 1;
  parameter.num_global_ids_ = static_cast<uint32_t>(n);
  parameter.col_ids_ = &kColumn;
  parameter.global_ids_ = waiting->ids.data();
  parameter.num_optimizer_stats_ = static_cast<uint32_t>(sizes.size());
  parameter.optimizer_stats_ids_ = waiting->parts.data();
  parameter.num_offsets_ = static_cast<uint32_t>(waiting->offsets.size());
  parameter.offsets_ = waiting->offsets.data();
  parameter.data_ = waiting->rows.data();
  parameter.on_complete_context_ = number;
  parameter.on_push_complete = on_done;
  call("IO_Push", number, [&] { plugin_->push_(store_, parameter); });
  if (!waiting->wait(timeout)) give_up("IO_Push", timeout);
}

}  // namespace dynamicemb
