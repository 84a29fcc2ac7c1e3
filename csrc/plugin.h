// Native plug-ins that store rows: shared libraries behind the C interface of tde_io.h.
//
// Calls block until the plug-in has called back. A call that is given up keeps its memory until the
// plug-in is done with it; callbacks that come late or twice find nothing and do nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "dynamicemb/tde_io.h"

namespace dynamicemb {

// What is wrong with a plug-in, or with a file that should be one.
class PluginError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A loaded library. It stays loaded until the process ends.
class Plugin {
 public:
  explicit Plugin(const std::string& path);

  const std::string& type() const { return type_; }
  const std::string& path() const { return path_; }

 private:
  friend class PluginStore;

  void* symbol(void* library, const char* name) const;  // null if it is missing

  std::string path_;
  std::string type_;
  void* (*initialize_)(const char*) = nullptr;
  void (*finalize_)(void*) = nullptr;
  void (*pull_)(void*, IOPullParameter) = nullptr;
  void (*push_)(void*, IOPushParameter) = nullptr;
};

// A store that a plug-in made, for one table. Rows are parts of `sizes` bytes, one after the other.
class PluginStore {
 public:
  PluginStore(std::shared_ptr<Plugin> plugin, const std::string& config);
  ~PluginStore();
  PluginStore(const PluginStore&) = delete;
  PluginStore& operator=(const PluginStore&) = delete;

  // found[i]: whether the plug-in has a row of ids[i], which is then in rows.
  void pull(const std::string& table, const int64_t* ids, size_t n,
            const std::vector<uint32_t>& sizes, std::chrono::milliseconds timeout, bool* found,
            uint8_t* rows);
  void push(const std::string& table, const int64_t* ids, size_t n,
            const std::vector<uint32_t>& sizes, std::chrono::milliseconds timeout,
            const uint8_t* rows);

 private:
  [[noreturn]] void fail(const char* name, const std::string& what) const;
  [[noreturn]] void give_up(const char* name, std::chrono::milliseconds timeout);
  // Calls into the plug-in; what it throws becomes a PluginError, and call `number` is forgotten.
  template <typename Work>
  void call(const char* name, void* number, Work work);

  std::shared_ptr<Plugin> plugin_;
  void* store_ = nullptr;
  std::mutex entry_;  // plug-ins need not expect two threads in IO_Pull and IO_Push
  std::atomic<bool> given_up_ = false;  // a call may still be at work: the store is not finalized
};

}  // namespace dynamicemb
