// The threads that run a forward pass together.
//
// One pass is one parallel region; its operations are far too short to be handed to threads one by one. Each operation
// is cut into parts that whoever comes first takes, and is over when its *parts* are done, not when every thread has
// come by: a thread that the system has put aside holds nobody up unless it has a part in hand. Between passes the
// workers sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
inline void pause_briefly() { _mm_pause(); }
// Rounding and denormals: every thread must compute as the caller does.
inline unsigned floating_point_mode() { return _mm_getcsr(); }
inline void set_floating_point_mode(unsigned mode) { _mm_setcsr(mode); }
#else
inline void pause_briefly() {}
inline unsigned floating_point_mode() { return 0; }
inline void set_floating_point_mode(unsigned) {}
#endif

// How far one operation has come.
struct Progress {
  alignas(64) std::atomic<int> taken{0};
  alignas(64) std::atomic<int> done{0};
};

// How long a worker waits awake for the next pass, some hundreds of microseconds: waking it up takes longer than the
// Python between two passes of a small draft.
constexpr int IDLE_SPINS = 65536;

class Team {
 public:
  explicit Team(int size) : size_(size) { start_missing(); }

  // The most threads that run a job: fewer do while the system gives no more.
  int size() const { return size_; }

  // Run `job(rank)` on every thread that is free; `num_operations` bounds the calls of `share` in it. All threads must
  // make the same calls in the same order. A job must not fail: the others would wait for its parts forever.
  void run(int num_operations, const std::function<void(int)>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    start_missing();
    if (static_cast<int>(progress_.size()) < num_operations) progress_ = std::vector<Progress>(num_operations);
    for (int i = 0; i < num_operations; ++i) {
      progress_[i].taken.store(0, std::memory_order_relaxed);
      progress_[i].done.store(0, std::memory_order_relaxed);
    }
    job_ = &job;
    mode_ = floating_point_mode();
    open_ = generation_.load() + 1;
    generation_.fetch_add(1);
    generation_.notify_all();
    [&]() noexcept { job(0); }();
    open_ = 0;  // who has not come in by now stays out
    wait_until([&] { return inside_.load() == 0; });
  }

  // Call `part(i)` for i below `num_parts`, each on one thread; returns when all are done. `operation` numbers the job's
  // calls from 0.
  template <typename Part>
  void share(int operation, int num_parts, Part part) {
    work(operation, num_parts, part);
    wait(operation, num_parts);
  }

  // The two halves of `share`.
  template <typename Part>
  void work(int operation, int num_parts, Part part) {
    Progress& progress = progress_[operation];
    for (int i; (i = progress.taken.fetch_add(1, std::memory_order_relaxed)) < num_parts;) {
      part(i);
      progress.done.fetch_add(1, std::memory_order_release);
    }
  }

  void wait(int operation, int num_parts) {
    const Progress& progress = progress_[operation];
    wait_until([&] { return progress.done.load(std::memory_order_acquire) == num_parts; });
  }

 private:
  void start_missing() {
    try {
      for (; started_ < size_; ++started_) std::thread([this, rank = started_] { serve(rank); }).detach();
    } catch (const std::exception&) {  // std::system_error, std::bad_alloc; the next run tries again
    }
  }

  template <typename Condition>
  static void wait_until(Condition holds) {
    for (int spins = 0; !holds(); ++spins) {
      if (spins < 4096) pause_briefly();
      else sched_yield();  // more threads than free cores: let the late one run
    }
  }

  void serve(int rank) {
    for (unsigned seen = 0;;) {
      for (int spins = 0; spins < IDLE_SPINS && generation_.load(std::memory_order_acquire) == seen; ++spins) {
        pause_briefly();
        if (spins % 64 == 63) sched_yield();  // whoever else wants this core has it
      }
      generation_.wait(seen);
      seen = generation_.load();
      // First in, then a look whether the job is still open: `run` closes it first and then looks who is in.
      inside_.fetch_add(1);
      if (open_.load() == seen) {
        set_floating_point_mode(mode_);
        (*job_)(rank);
      }
      inside_.fetch_sub(1);
    }
  }

  const int size_;
  int started_ = 1;  // with the caller
  std::mutex mutex_;
  std::vector<Progress> progress_;
  const std::function<void(int)>* job_ = nullptr;
  unsigned mode_ = 0;
  std::atomic<unsigned> generation_{0}, open_{0};
  std::atomic<int> inside_{0};
};
