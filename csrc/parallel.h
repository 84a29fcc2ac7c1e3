// One way to run tasks on several threads.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace dynamicemb {

namespace detail {
using TaskFunction = void (*)(void* context, std::size_t task);
void run_tasks(int threads, std::size_t tasks, TaskFunction function, void* context);
}  // namespace detail

// Calls body(task) once for every task in [0, tasks), on at most `threads` threads, in no fixed
// order, and returns when all are done. The first exception of a body is rethrown here.
//
// In a process that has an OpenMP runtime loaded (torch brings one), its team does the work: a
// second pool would fight the first one's spinning threads for the cores.
template <class Body>
void parallel_for(int threads, std::size_t tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  detail::run_tasks(
      threads, tasks,
      [](void* context, std::size_t task) { (*static_cast<Plain*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace dynamicemb
