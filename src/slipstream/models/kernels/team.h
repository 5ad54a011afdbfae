// The threads that run a forward pass together.
//
// One pass is one parallel region: the threads meet at barriers between its operations, which are far too short to
// be handed out one by one. Between passes the workers sleep.
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

// Hands out the parts of one operation to whoever comes first.
struct Counter {
  alignas(64) std::atomic<int> next{0};
};

// How long a worker waits awake for the next pass, some hundreds of microseconds: waking it up takes longer than the
// Python between two passes of a small draft.
constexpr int IDLE_SPINS = 16384;

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int rank = 1; rank < size; ++rank) workers_.emplace_back([this, rank] { serve(rank); });
  }

  int size() const { return size_; }

  // Run `job(rank)` on every thread; `num_operations` bounds the calls of `share` in it.
  void run(int num_operations, const std::function<void(int)>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (static_cast<int>(counters_.size()) < num_operations) counters_ = std::vector<Counter>(num_operations);
    for (int i = 0; i < num_operations; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
    job_ = &job;
    mode_ = floating_point_mode();
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1);
    generation_.notify_all();
    job(0);
    barrier();  // the others still use `job`
  }

  // Wait until every thread of the job is here.
  void barrier() {
    if (size_ == 1) return;
    int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1, std::memory_order_acq_rel);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < 4096) pause_briefly();
      else sched_yield();  // more threads than free cores: let the late one run
    }
  }

  // Call `part(i)` for i below `num_parts`, each on one thread. `operation` numbers the job's calls from 0.
  template <typename Part>
  void share(int operation, int num_parts, Part part) {
    auto& next = counters_[operation].next;
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_parts;) part(i);
  }

 private:
  void serve(int rank) {
    for (int seen = 0;;) {
      for (int spins = 0; spins < IDLE_SPINS && generation_.load(std::memory_order_acquire) == seen; ++spins) {
        pause_briefly();
        if (spins % 64 == 63) sched_yield();  // whoever else wants this core has it
      }
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      set_floating_point_mode(mode_);
      (*job_)(rank);
      barrier();
    }
  }

  const int size_;
  std::mutex mutex_;
  std::vector<std::thread> workers_;
  std::vector<Counter> counters_;
  const std::function<void(int)>* job_ = nullptr;
  unsigned mode_ = 0;
  std::atomic<int> generation_{0}, arrived_{0}, phase_{0};
};
