// One way to run tasks on several threads.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

namespace dynamicemb {

namespace detail {
using TaskFunction = void (*)(void* context, std::size_t task);
void run_tasks(int threads, std::size_t tasks, TaskFunction function, void* context);
class Pool;

// A forked child has a copy of the pool and none of its threads: it leaves the pool behind, since
// to join the threads, or to destroy what they wait for, would never end.
struct DeletePool {
  void operator()(Pool* pool) const;
};
using PoolPointer = std::unique_ptr<Pool, DeletePool>;
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

// Threads of their own, for work that waits (for a disk) rather than computes. They start with the
// first run() that needs them. Several callers take turns. In a forked child the caller works
// alone.
class WaitingThreads {
 public:
  WaitingThreads();

  // As parallel_for.
  template <class Body>
  void run(int threads, std::size_t tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_tasks(
        threads, tasks,
        [](void* context, std::size_t task) { (*static_cast<Plain*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  void run_tasks(int threads, std::size_t tasks, detail::TaskFunction function, void* context);

  detail::PoolPointer pool_;
};

}  // namespace dynamicemb
