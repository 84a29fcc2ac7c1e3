// Every call about files that the SSD store makes to the operating system goes through here, so
// that a test can make the N-th of them fail or be the last one before the process dies.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace dynamicemb {

// The operating system refused something; `error` is its errno, `path` what it was about.
class StoreError : public std::runtime_error {
 public:
  StoreError(int error, std::string path, const std::string& doing);
  int error() const { return error_; }
  const std::string& path() const { return path_; }

 private:
  int error_;
  std::string path_;
};

// The bytes of a file are not what was written.
class CorruptStore : public std::runtime_error {
 public:
  CorruptStore(const std::string& path, const std::string& problem)
      : std::runtime_error(path + ": " + problem) {}
};

enum class FileOperation { kOpen, kRead, kWrite, kSync, kRename, kRemove };

class Files {
 public:
  virtual ~Files() = default;

  // A descriptor; `direct` asks for O_DIRECT and falls back without it, saying so in `direct`.
  int open(const std::string& path, int flags, bool& direct);
  void close(int descriptor);
  // Whole or StoreError.
  void write(int descriptor, const std::byte* data, size_t size, uint64_t offset,
             const std::string& path);
  // The bytes read: less than `size` only at the end of the file.
  size_t read(int descriptor, std::byte* data, size_t size, uint64_t offset,
              const std::string& path);
  // A file's bytes as memory, to be read by read_mapped(); may be longer than the file is now.
  // nullptr if the system has no room for it.
  const std::byte* map(int descriptor, size_t size);
  void unmap(const std::byte* data, size_t size);
  // memcpy from a mapping. Where the disk cannot give a page (EIO, a file that was cut), the system
  // sends SIGBUS: here it is a StoreError.
  void read_mapped(std::byte* to, const std::byte* from, size_t size, const std::string& path);
  void sync(int descriptor, const std::string& path);
  void sync_folder(const std::string& path);
  void rename(const std::string& from, const std::string& to);
  void remove(const std::string& path);  // one that is not there is no error
  void make_folder(const std::string& path);
  uint64_t size(int descriptor, const std::string& path);
  uint64_t disk_bytes(int descriptor, const std::string& path);  // holes are not counted
  std::vector<std::string> list(const std::string& folder);
  // A small file, replaced as a whole: the old or the new content survives a crash.
  void replace(const std::string& folder, const std::string& name, const std::string& content);
  std::string read_text(const std::string& path, size_t limit);
  bool exists(const std::string& path);

 protected:
  // What a test wants the system to answer: an errno (0: none), fewer bytes, the end.
  struct Answer {
    int error = 0;
    size_t at_most = SIZE_MAX;
    bool die = false;
  };
  virtual Answer before(FileOperation) { return {}; }

 private:
  void check(FileOperation operation, const std::string& path, const std::string& doing);
};

// The lock of a folder, held by the process that made it alone: a forked child gives up its copy,
// so that the lock ends with its process.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path);  // StoreError (EWOULDBLOCK) if it is held
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_;
  pid_t process_;
};

// Operations number `first` to `first + count - 1` (from 0, among the kinds of `kinds`, a mask of
// 1 << FileOperation) fail with `error`. error 0: a write is cut in half and goes on; error -1: the
// process is killed, after half of a write. `then`: one more operation that fails.
class FailingFiles : public Files {
 public:
  FailingFiles(unsigned kinds, uint64_t first, uint64_t count, int error,
               uint64_t then = UINT64_MAX)
      : kinds_(kinds), first_(first), count_(count), then_(then), error_(error) {}
  uint64_t seen() const { return seen_; }

 protected:
  Answer before(FileOperation operation) override;

 private:
  unsigned kinds_;
  uint64_t first_, count_, then_;
  int error_;
  std::atomic<uint64_t> seen_{0};
};

}  // namespace dynamicemb
