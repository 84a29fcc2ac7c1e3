#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <map>
#include <mutex>
#include <new>

namespace dynamicemb {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
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

  void put(std::size_t size, std::byte* block) noexcept {
    std::lock_guard lock(mutex_);
    if (held_ + size > kMostHeld) return release(block);
    try {
      free_.emplace(size, block);
    } catch (const std::bad_alloc&) {
      return release(block);
    }
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
  const std::size_t used = round_up(bytes, page_size());
  const std::size_t asked = huge ? used + kHugePage : used;
  if (used < bytes || asked < used) throw AllocationError(bytes);
  void* base = mmap(nullptr, asked, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw AllocationError(bytes);
  data_ = static_cast<std::byte*>(base);
  mapped_ = used;
  if (!huge) return;
  // Begin at a huge page, and give back what is left before and after.
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  const std::size_t skipped = round_up(address, kHugePage) - address;
  if (skipped > 0) munmap(data_, skipped);
  data_ += skipped;
  if (skipped < kHugePage) munmap(data_ + used, kHugePage - skipped);
  // Whole huge pages only: the last one would take memory that the array does not need. Advice: a
  // kernel without transparent huge pages is slower, not wrong.
  (void)madvise(data_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, mapped_);
}

void Mapping::discard(std::size_t offset, std::size_t bytes) {
  const std::size_t page = page_size();
  const std::size_t begin = round_up(offset, page);
  const std::size_t end = (offset + bytes) / page * page;
  if (end > begin) (void)madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace dynamicemb
