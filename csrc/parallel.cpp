#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace dynamicemb::detail {

struct Job {
  std::size_t tasks;
  TaskFunction function;
  void* context;
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;

  void work() {
    for (;;) {
      const std::size_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks) return;
      try {
        function(context, task);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    }
  }
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

  void run(int threads, Job& job) {
    std::lock_guard only_one(run_mutex_);
    {
      std::lock_guard lock(mutex_);
      const auto helpers = static_cast<std::size_t>(threads - 1);
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
    job.work();
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
      job->work();
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex run_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Job* job_ = nullptr;
  std::size_t wanted_ = 0, running_ = 0;
  std::uint64_t round_ = 0;
  bool stop_ = false;
};

namespace {

using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

OpenMpParallel openmp() {
  static const auto entry = reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return entry;
}

}  // namespace

void run_tasks(int threads, std::size_t tasks, TaskFunction function, void* context) {
  const int team = static_cast<int>(std::min<std::size_t>(std::max(threads, 1), tasks));
  if (team <= 1) {
    for (std::size_t task = 0; task < tasks; ++task) function(context, task);
    return;
  }
  Job job{.tasks = tasks, .function = function, .context = context, .mutex = {}, .error = {}};
  if (auto parallel = openmp()) {
    parallel([](void* data) { static_cast<Job*>(data)->work(); }, &job, static_cast<unsigned>(team),
             0);
  } else {
    static Pool pool;
    pool.run(team, job);
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace dynamicemb::detail

namespace dynamicemb {

WaitingThreads::WaitingThreads() : pool_(std::make_unique<detail::Pool>()) {}
WaitingThreads::~WaitingThreads() = default;

void WaitingThreads::run_tasks(int threads, std::size_t tasks, detail::TaskFunction function,
                               void* context) {
  const int team = static_cast<int>(std::min<std::size_t>(std::max(threads, 1), tasks));
  detail::Job job{
      .tasks = tasks, .function = function, .context = context, .mutex = {}, .error = {}};
  if (team <= 1)
    job.work();
  else
    pool_->run(team, job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace dynamicemb
