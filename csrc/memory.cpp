#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

namespace dynamicemb {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

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
