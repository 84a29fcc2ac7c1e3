#include "parallel.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace dynamicemb::detail {

// Tasks for a team of n. Member i begins with tasks i, i + n, i + 2 n, .. and goes on with what
// others have left. So in two jobs over the same data a member meets what it worked on before,
// which matters where processors do not share a cache, and members do not wait for one counter.
class Job {
 public:
  Job(std::size_t tasks, std::size_t members, TaskFunction function, void* context)
      : tasks_(tasks), function_(function), context_(context), next_(members) {
    for (std::size_t i = 0; i < members; ++i) next_[i].task = i;
  }

  void work(std::size_t member) {
    const std::size_t members = next_.size();
    for (std::size_t i = 0; i < members; ++i) {
      std::atomic<std::size_t>& next = next_[(member + i) % members].task;
      for (;;) {
        const std::size_t task = next.fetch_add(members, std::memory_order_relaxed);
        if (task >= tasks_) break;
        try {
          function_(context_, task);
        } catch (...) {
          std::lock_guard lock(mutex_);
          if (!error_) error_ = std::current_exception();
        }
      }
    }
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct alignas(128) Next {
    std::atomic<std::size_t> task;
  };

  std::size_t tasks_;
  TaskFunction function_;
  void* context_;
  std::vector<Next> next_;  // of each member's tasks
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Threads of our own, for a process without an OpenMP runtime, and for work that waits.
class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  bool here() const { return ::getpid() == process_; }

  void run(std::size_t members, Job& job) {
    if (!here()) return job.work(0);
    std::lock_guard only_one(run_mutex_);
    {
      std::lock_guard lock(mutex_);
      const std::size_t helpers = members - 1;
      while (workers_.size() < helpers) {
        const std::size_t index = workers_.size();
        workers_.emplace_back([this, index] { loop(index); });
      }
      job_ = &job;
      wanted_ = helpers;
      running_ = helpers;
      ++round_;
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void loop(std::size_t index) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      if (index >= wanted_) continue;
      Job* job = job_;
      lock.unlock();
      job->work(index + 1);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  const pid_t process_ = ::getpid();
  std::mutex run_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  std::size_t wanted_ = 0, running_ = 0;
  std::uint64_t round_ = 0;
  bool stop_ = false;
};

void DeletePool::operator()(Pool* pool) const {
  static auto* const left_behind = new std::vector<Pool*>;
  if (pool->here())
    delete pool;
  else
    left_behind->push_back(pool);
}

namespace {

// The OpenMP runtime that the process has loaded, if any.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_number)() = nullptr;
};

const OpenMp& openmp() {
  static const OpenMp found = [] {
    OpenMp runtime;
    runtime.parallel =
        reinterpret_cast<decltype(runtime.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    runtime.thread_number = reinterpret_cast<decltype(runtime.thread_number)>(
        dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    if (runtime.thread_number == nullptr) runtime.parallel = nullptr;
    return runtime;
  }();
  return found;
}

std::size_t members_of(int threads, std::size_t tasks) {
  return std::min(static_cast<std::size_t>(std::max(threads, 1)), tasks);
}

}  // namespace

void run_tasks(int threads, std::size_t tasks, TaskFunction function, void* context) {
  const std::size_t members = members_of(threads, tasks);
  if (members <= 1) {
    for (std::size_t task = 0; task < tasks; ++task) function(context, task);
    return;
  }
  Job job(tasks, members, function, context);
  if (openmp().parallel != nullptr) {
    openmp().parallel(
        [](void* data) {
          static_cast<Job*>(data)->work(static_cast<std::size_t>(openmp().thread_number()));
        },
        &job, static_cast<unsigned>(members), 0);
  } else {
    static const PoolPointer pool(new Pool);
    pool->run(members, job);
  }
  job.rethrow();
}

}  // namespace dynamicemb::detail

namespace dynamicemb {

WaitingThreads::WaitingThreads() : pool_(new detail::Pool) {}

void WaitingThreads::run_tasks(int threads, std::size_t tasks, detail::TaskFunction function,
                               void* context) {
  const std::size_t members = detail::members_of(threads, tasks);
  if (members == 0) return;
  detail::Job job(tasks, members, function, context);
  if (members == 1)
    job.work(0);
  else
    pool_->run(members, job);
  job.rethrow();
}

}  // namespace dynamicemb
