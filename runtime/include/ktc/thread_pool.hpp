// A team of workers that runs one function at a time, with barriers inside it. The caller is worker 0.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace ktc {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Wait for `value` to leave `seen`: briefly by looking, then asleep. A layer's next call comes within microseconds,
// a training step's next phase within milliseconds: the first is worth a spin, the second is not.
inline void wait_while_equal(const std::atomic<std::uint32_t>& value, std::uint32_t seen) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::microseconds(200);
  constexpr int kLooksPerClock = 64;
  const auto deadline = Clock::now() + kPatience;
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (value.load(std::memory_order_acquire) != seen) return;
      relax();
    }
  } while (Clock::now() < deadline);
  value.wait(seen, std::memory_order_acquire);
}

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}

  void arrive_and_wait() {
    if (count_ == 1) return;
    const auto round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_acq_rel);
      round_.notify_all();
      return;
    }
    wait_while_equal(round_, round);
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

struct Worker {
  int index;
  int count;
  Barrier& barrier;
};

class ThreadPool {
 public:
  explicit ThreadPool(int threads) : threads_(threads), barrier_(threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1, found " + std::to_string(threads));
    workers_.reserve(static_cast<std::size_t>(threads) - 1);
    try {
      for (int index = 1; index < threads; ++index) workers_.emplace_back([this, index] { serve(index); });
    } catch (const std::system_error& error) {
      dismiss();
      throw std::runtime_error("only " + std::to_string(workers_.size() + 1) + " of " + std::to_string(threads) +
                               " kernel threads could be started: " + error.what());
    }
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() { dismiss(); }

  int threads() const { return threads_; }

  // Call `body(Worker)` once on every worker and return when all are done. `body` must not throw.
  template <class Body>
  void run(Body&& body) {
    task_ = [](void* context, Worker worker) { (*static_cast<std::remove_reference_t<Body>*>(context))(worker); };
    context_ = &body;
    start();
    task_(context_, {0, threads_, barrier_});
    barrier_.arrive_and_wait();
  }

 private:
  using Task = void (*)(void*, Worker);

  void start() {
    if (threads_ == 1) return;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }

  void dismiss() {
    task_ = nullptr;
    start();
    for (auto& worker : workers_) worker.join();
  }

  void serve(int index) {
    for (std::uint32_t seen = 0;; ++seen) {
      wait_while_equal(generation_, seen);
      if (task_ == nullptr) return;
      task_(context_, {index, threads_, barrier_});
      barrier_.arrive_and_wait();
    }
  }

  const int threads_;
  Barrier barrier_;
  std::atomic<std::uint32_t> generation_{0};
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace ktc
