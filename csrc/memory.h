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
    std::swap(base_, other.base_);
    std::swap(reserved_, other.reserved_);
  }

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  void* base_ = nullptr;
  std::size_t reserved_ = 0;
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
