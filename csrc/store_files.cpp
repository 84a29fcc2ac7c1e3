#include "store_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

namespace dynamicemb {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& doing) {
  throw StoreError(errno, path, doing);
}

// Where to go on if the copy that this thread is in gets a SIGBUS.
thread_local sigjmp_buf* volatile resume = nullptr;
struct sigaction previous_handler;

void on_bus_error(int signal, siginfo_t* info, void* context) {
  if (resume != nullptr) siglongjmp(*resume, 1);
  // Not ours: as if we were not here.
  if ((previous_handler.sa_flags & SA_SIGINFO) != 0) {
    previous_handler.sa_sigaction(signal, info, context);
  } else if (previous_handler.sa_handler == SIG_DFL || previous_handler.sa_handler == SIG_IGN) {
    ::sigaction(signal, &previous_handler, nullptr);  // the access is repeated and ends the process
  } else {
    previous_handler.sa_handler(signal);
  }
}

void catch_bus_errors() {
  static const bool installed = [] {
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    return ::sigaction(SIGBUS, &action, &previous_handler) == 0;
  }();
  (void)installed;
}

// False if a page could not be had. Holds nothing that a jump would leave behind.
bool copy_guarded(std::byte* to, const std::byte* from, size_t size) {
  sigjmp_buf here;
  if (sigsetjmp(here, 0) != 0) {
    resume = nullptr;
    return false;
  }
  resume = &here;
  std::memcpy(to, from, size);
  resume = nullptr;
  return true;
}

struct Closed {
  int descriptor;
  ~Closed() { ::close(descriptor); }
};

}  // namespace

StoreError::StoreError(int error, std::string path, const std::string& doing)
    : std::runtime_error(doing + " " + path + ": " + std::strerror(error)),
      error_(error),
      path_(std::move(path)) {}

void Files::check(FileOperation operation, const std::string& path, const std::string& doing) {
  const Answer answer = before(operation);
  if (answer.die) ::kill(::getpid(), SIGKILL);
  if (answer.error != 0) throw StoreError(answer.error, path, doing);
}

int Files::open(const std::string& path, int flags, bool& direct) {
  check(FileOperation::kOpen, path, "opening");
  flags |= O_CLOEXEC;
  int descriptor = -1;
  if (direct) descriptor = ::open(path.c_str(), flags | O_DIRECT, 0644);
  if (descriptor < 0) {
    // Some file systems (tmpfs of older kernels, overlays) have no direct access.
    if (direct && errno != EINVAL) fail(path, "opening");
    direct = false;
    descriptor = ::open(path.c_str(), flags, 0644);
  }
  if (descriptor < 0) fail(path, "opening");
  return descriptor;
}

void Files::close(int descriptor) { ::close(descriptor); }

void Files::write(int descriptor, const std::byte* data, size_t size, uint64_t offset,
                  const std::string& path) {
  while (size > 0) {
    const Answer answer = before(FileOperation::kWrite);
    if (answer.error != 0) throw StoreError(answer.error, path, "writing");
    // Half of it, in whole blocks: direct access allows nothing else.
    const size_t part = answer.at_most < size && size > 8192 ? size / 2 / 4096 * 4096 : size;
    const ssize_t written = ::pwrite(descriptor, data, part, static_cast<off_t>(offset));
    if (answer.die) ::kill(::getpid(), SIGKILL);
    if (written < 0) {
      if (errno == EINTR) continue;
      fail(path, "writing");
    }
    if (written == 0) throw StoreError(ENOSPC, path, "writing");
    data += written;
    offset += static_cast<uint64_t>(written);
    size -= static_cast<size_t>(written);
  }
}

size_t Files::read(int descriptor, std::byte* data, size_t size, uint64_t offset,
                   const std::string& path) {
  size_t done = 0;
  while (done < size) {
    check(FileOperation::kRead, path, "reading");
    const ssize_t got =
        ::pread(descriptor, data + done, size - done, static_cast<off_t>(offset + done));
    if (got < 0) {
      if (errno == EINTR) continue;
      fail(path, "reading");
    }
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

const std::byte* Files::map(int descriptor, size_t size) {
  catch_bus_errors();
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) return nullptr;
  ::madvise(data, size, MADV_RANDOM);  // rows are far apart: no reading ahead
  return static_cast<const std::byte*>(data);
}

void Files::unmap(const std::byte* data, size_t size) {
  ::munmap(const_cast<std::byte*>(data), size);
}

void Files::read_mapped(std::byte* to, const std::byte* from, size_t size,
                        const std::string& path) {
  check(FileOperation::kRead, path, "reading");
  if (!copy_guarded(to, from, size)) throw StoreError(EIO, path, "reading");
}

void Files::sync(int descriptor, const std::string& path) {
  check(FileOperation::kSync, path, "syncing");
  if (::fdatasync(descriptor) != 0) fail(path, "syncing");
}

void Files::sync_folder(const std::string& path) {
  check(FileOperation::kSync, path, "syncing");
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail(path, "opening");
  const Closed closed{descriptor};
  if (::fsync(descriptor) != 0) fail(path, "syncing");
}

void Files::rename(const std::string& from, const std::string& to) {
  check(FileOperation::kRename, to, "renaming to");
  if (::rename(from.c_str(), to.c_str()) != 0) fail(to, "renaming to");
}

void Files::remove(const std::string& path) {
  check(FileOperation::kRemove, path, "removing");
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail(path, "removing");
}

void Files::make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) fail(path, "making the folder");
}

uint64_t Files::size(int descriptor, const std::string& path) {
  struct stat info;
  if (::fstat(descriptor, &info) != 0) fail(path, "asking the size of");
  return static_cast<uint64_t>(info.st_size);
}

uint64_t Files::disk_bytes(int descriptor, const std::string& path) {
  struct stat info;
  if (::fstat(descriptor, &info) != 0) fail(path, "asking the size of");
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

std::vector<std::string> Files::list(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open_folder(::opendir(folder.c_str()), ::closedir);
  if (!open_folder) fail(folder, "listing");
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(open_folder.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void Files::replace(const std::string& folder, const std::string& name,
                    const std::string& content) {
  const std::string path = folder + "/" + name;
  const std::string temporary = folder + "/." + name + ".new";
  bool direct = false;
  const int descriptor = open(temporary, O_WRONLY | O_CREAT | O_TRUNC, direct);
  {
    const Closed closed{descriptor};
    write(descriptor, reinterpret_cast<const std::byte*>(content.data()), content.size(), 0,
          temporary);
    sync(descriptor, temporary);
  }
  rename(temporary, path);
  sync_folder(folder);
}

std::string Files::read_text(const std::string& path, size_t limit) {
  bool direct = false;
  const int descriptor = open(path, O_RDONLY, direct);
  const Closed closed{descriptor};
  const uint64_t bytes = size(descriptor, path);
  if (bytes > limit) throw CorruptStore(path, "longer than such a file can be");
  std::string text(bytes, '\0');
  text.resize(read(descriptor, reinterpret_cast<std::byte*>(text.data()), bytes, 0, path));
  return text;
}

bool Files::exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

namespace {

// The descriptors of all locks of this process. Never destroyed: locks may outlive static objects.
struct HeldLocks {
  std::mutex mutex;
  std::set<int> descriptors;

  HeldLocks() {
    ::pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                     [] {
                       for (const int descriptor : all().descriptors) ::close(descriptor);
                       all().descriptors.clear();
                       all().mutex.unlock();
                     });
  }
  static HeldLocks& all() {
    static auto* const locks = new HeldLocks;
    return *locks;
  }
};

}  // namespace

FolderLock::FolderLock(const std::string& path) : process_(::getpid()) {
  HeldLocks& held = HeldLocks::all();
  const std::lock_guard guard(held.mutex);  // no fork meanwhile
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(path, "opening");
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(descriptor_);
    throw StoreError(error, path, "another process or store has it open; locking");
  }
  held.descriptors.insert(descriptor_);
}

FolderLock::~FolderLock() {
  if (::getpid() != process_) return;  // closed by the fork
  HeldLocks& held = HeldLocks::all();
  const std::lock_guard guard(held.mutex);
  held.descriptors.erase(descriptor_);
  ::flock(descriptor_, LOCK_UN);  // a child that is being forked may still have its copy
  ::close(descriptor_);
}

Files::Answer FailingFiles::before(FileOperation operation) {
  if ((kinds_ >> static_cast<unsigned>(operation) & 1) == 0) return {};
  const uint64_t number = seen_++;
  if ((number < first_ || number - first_ >= count_) && number != then_) return {};
  if (error_ > 0) return {.error = error_};
  return {.error = 0, .at_most = 0, .die = error_ < 0};
}

}  // namespace dynamicemb
