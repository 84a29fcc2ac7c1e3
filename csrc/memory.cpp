#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <map>
#include <mutex>

namespace dynamicemb {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

// Freed blocks, by size. Sizes are powers of two, so a block fits later batches of about the size.
class BlockPool {
 public:
  std::byte* get(std::size_t size) {
    {
      std::lock_guard lock(mutex_);
      if (const auto found = free_.find(size); found != free_.end()) {
        std::byte* block = found->second;
        free_.erase(found);
        held_ -= size;
        return block;
      }
    }
    return static_cast<std::byte*>(::operator new(size, std::align_val_t{64}));
  }

  void put(std::size_t size, std::byte* block) {
    std::lock_guard lock(mutex_);
    if (held_ + size > kMostHeld) return release(block);
    free_.emplace(size, block);
    held_ += size;
  }

 private:
  static constexpr std::size_t kMostHeld = std::size_t{64} << 20;

  static void release(std::byte* block) { ::operator delete(block, std::align_val_t{64}); }

  std::mutex mutex_;
  std::multimap<std::size_t, std::byte*> free_;
  std::size_t held_ = 0;
};

BlockPool& block_pool() {
  static auto* pool = new BlockPool;  // never destroyed: batches may outlive static objects
  return *pool;
}

}  // namespace

Scratch::Scratch(std::size_t bytes) : size_(std::bit_ceil(bytes)) {
  block_ = block_pool().get(size_);
}

Scratch::~Scratch() {
  if (block_ != nullptr) block_pool().put(size_, block_);
}

AllocationError::AllocationError(std::size_t bytes)
    : message_("cannot allocate " + std::to_string(bytes) + " bytes of memory") {}

Mapping::Mapping(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  // A table smaller than a huge page would only waste the rest of it.
  const bool huge = bytes >= kHugePage;
  reserved_ = huge ? round_up(bytes, kHugePage) + kHugePage : bytes;
  if (reserved_ < bytes) throw AllocationError(bytes);
  base_ = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw AllocationError(bytes);
  }
  auto address = reinterpret_cast<std::uintptr_t>(base_);
  if (huge) {
    address = round_up(address, kHugePage);
    // Advice only: a kernel without transparent huge pages is slower, not wrong.
    (void)madvise(reinterpret_cast<void*>(address), round_up(bytes, kHugePage), MADV_HUGEPAGE);
  }
  data_ = reinterpret_cast<std::byte*>(address);
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, reserved_);
}

void Mapping::discard(std::size_t offset, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t begin = round_up(offset, page);
  const std::size_t end = (offset + bytes) / page * page;
  if (end > begin) (void)madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace dynamicemb
