// Threads of one step: they share out work and wait for each other.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace {

// Waits of a few microseconds: spins, and yields if another process has the core.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void wait() {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // tile loads don't say that they read
    if (n_ == 1) return;
    const int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) {
      if (spins < 4000) _mm_pause(); else sched_yield();
    }
  }

 private:
  const int n_;
  std::atomic<int> arrived_{0}, turn_{0};
};

struct Share {
  int64_t begin, end;
  Share(int64_t n, int thread, int num_threads)
      : begin(n * thread / num_threads), end(n * (thread + 1) / num_threads) {}
};

}  // namespace
