// Shares the tasks of a kernel among XLA's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "weight.h"
#include "xla/ffi/api/ffi.h"

namespace minfer {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The tasks of one kernel. It outlives the call: a thread may come when all is done.
struct Job {
  std::atomic<int64_t> next{0}, done{0};
  int64_t tasks;
  Threads::Task task;
  const void* f;

  void work() {
    for (int64_t i; (i = next.fetch_add(1)) < tasks;) {
      task(f, i);
      done.fetch_add(1);
    }
  }
};

// Threads of XLA's pool that wait a little, wide awake, for the next kernel. To wake one that sleeps
// costs 5 to 10 microseconds, about as long as a small product takes.
class Crew {
 public:
  static Crew& get() {
    static Crew* crew = new Crew;  // never destroyed: a thread may still be waiting at exit
    return *crew;
  }

  // Hands a job out. Returns how many threads were waiting for one; they may still miss it.
  int post(std::shared_ptr<Job> job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = std::move(job);
    }
    posted_.fetch_add(1);
    return waiting_.load();
  }

  // Works on a job, then on those posted until none comes for a while.
  void work(std::shared_ptr<Job> job) {
    while (job) {
      const int64_t seen = posted_.load();
      job->work();
      job = next(seen);
    }
  }

 private:
  // A job posted after `seen`, or null.
  std::shared_ptr<Job> next(int64_t seen) {
    using Clock = std::chrono::steady_clock;
    waiting_.fetch_add(1);
    for (const auto begin = Clock::now(); posted_.load() == seen && Clock::now() - begin < kPatience;)
      for (int i = 0; i < 16 && posted_.load() == seen; i++) pause();
    waiting_.fetch_sub(1);
    if (posted_.load() == seen) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    return job_;
  }

  static constexpr std::chrono::microseconds kPatience{20};
  std::mutex mutex_;
  std::shared_ptr<Job> job_;
  std::atomic<int64_t> posted_{0};
  std::atomic<int> waiting_{0};
};

// Threads::start on XLA's pool. With `Eager` the threads that helped stay awake for the next kernel,
// as fits the short ones of a decode step; XLA's own operations would wait for them.
template <bool Eager>
void start(void* pool, int64_t tasks, Threads::Task task, const void* f) {
  auto* threads = static_cast<xla::ffi::ThreadPool*>(pool);
  const int64_t helpers = std::min<int64_t>(threads->num_threads(), tasks) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < tasks; i++) task(f, i);
    return;
  }
  auto job = std::make_shared<Job>();
  job->tasks = tasks;
  job->task = task;
  job->f = f;
  const int64_t awake = Eager ? Crew::get().post(job) : 0;
  for (int64_t i = awake; i < helpers; i++)
    threads->Schedule([job] {
      if constexpr (Eager) Crew::get().work(job);
      else job->work();
    });
  job->work();
  for (int64_t i = 1; job->done.load() < tasks; i++) {
    pause();
    if (i % 4096 == 0) std::this_thread::yield();  // the last helper may wait for this very core
  }
}

template <bool Eager>
Threads on(xla::ffi::ThreadPool& pool) {
  return {std::max((int)pool.num_threads(), 1), &pool, start<Eager>};
}

}  // namespace minfer
