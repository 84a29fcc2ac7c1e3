// What the Python faces of the engine's parts share: addresses and sizes in, numbers out. Checks
// are in Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace dynamicemb {

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Each adds the classes and functions of one part, in bindings_<part>.cpp.
void bind_group(nanobind::module_& m);
void bind_plugin(nanobind::module_& m);
void bind_redis(nanobind::module_& m);
void bind_serving(nanobind::module_& m);
void bind_slot_map(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_table(nanobind::module_& m);

}  // namespace dynamicemb
