// Anonymous memory that costs what is touched, on huge pages where it is large.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <type_traits>
#include <utility>

namespace dynamicemb {

// Raised when the operating system refuses address space. Nothing has changed when it is raised.
class AllocationError : public std::bad_alloc {
 public:
  explicit AllocationError(std::size_t bytes);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

// A zero-filled private mapping. Pages come into being when they are first written.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(std::size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // Gives the pages of a range back to the system; they read as zero afterwards.
  void discard(std::size_t offset, std::size_t bytes);

 private:
  void swap(Mapping& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapped_, other.mapped_);
  }

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t mapped_ = 0;  // the size in whole pages
};

// Uninitialised memory for the length of a batch. Blocks are kept for reuse: taking fresh pages
// from the system for every batch costs more than the work on them.
class Scratch {
 public:
  Scratch() = default;
  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(size_, other.size_);
    std::swap(used_, other.used_);
    return *this;
  }

  // The next `count` elements of the block.
  template <class T>
  T* take(std::size_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    auto* at = reinterpret_cast<T*>(block_ + used_);
    used_ += bytes_for<T>(count);
    return at;
  }
  // What take<T>(count) uses up.
  template <class T>
  static std::size_t bytes_for(std::size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  std::byte* block_ = nullptr;
  std::size_t size_ = 0, used_ = 0;
};

// A zero-filled array of trivial elements in a Mapping.
template <class T>
class Array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Array() = default;
  explicit Array(std::size_t count) : mapping_(count * sizeof(T)), count_(count) {}

  T* data() const { return reinterpret_cast<T*>(mapping_.data()); }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }
  T& operator[](std::size_t i) const { return data()[i]; }

 private:
  Mapping mapping_;
  std::size_t count_ = 0;
};

}  // namespace dynamicemb
