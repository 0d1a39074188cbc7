// Threads that run one function at a time, with barriers inside it. The caller is worker 0.
#pragma once

#include <sched.h>

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
#include <utility>
#include <vector>

#include "ktc/interface/engine.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/numa.hpp"
#include "ktc/openmp.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

inline constexpr int kMostThreads = 4096;  // a larger number is a mistake, and none are started

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits for `value` to differ from `seen`: a brief spin, then sleep. A layer's next call comes within microseconds, a
// training step's next phase within milliseconds: the first is worth a spin, the second is not. The spin yields between
// its reads: a thread that was just woken may be on the same core, and the wait is often for its work.
// While `stays_awake` returns true it spins for ten times as long.
template <class StaysAwake>
void wait_while_equal(const std::atomic<std::uint32_t>& value, std::uint32_t seen, const StaysAwake& stays_awake) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kPatience = std::chrono::microseconds(200);
  constexpr auto kMorePatience = std::chrono::duration_cast<Clock::duration>(9 * kPatience);
  constexpr int kLooksPerClock = 64;
  const auto deadline = Clock::now() + kPatience;
  do {
    for (int look = 0; look < kLooksPerClock; ++look) {
      if (value.load(std::memory_order_acquire) != seen) return;
      relax();
    }
    sched_yield();
  } while (Clock::now() < deadline + (stays_awake() ? kMorePatience : Clock::duration::zero()));
  value.wait(seen, std::memory_order_acquire);
}

inline void wait_while_equal(const std::atomic<std::uint32_t>& value, std::uint32_t seen) {
  wait_while_equal(value, seen, [] { return false; });
}

class SpinningBarrier final : public Barrier {
 public:
  // Not while a thread waits.
  void reset(int count) { count_ = count; }

  void arrive_and_wait(Upcoming upcoming = {}) override {
    if (phase_observer != nullptr) phase_observer->finished();
    wait_for_all(upcoming);
    if (phase_observer != nullptr) phase_observer->started();
  }

  void wait_for_all(Upcoming upcoming = {}) {
    const int count = count_;  // once all have arrived it may be reset
    if (count == 1) return;
    const auto round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_acq_rel);
      round_.notify_all();
      return;
    }
    fetch(upcoming, round);
    wait_while_equal(round_, round);
  }

 private:
  // Until all have arrived.
  void fetch(Upcoming upcoming, std::uint32_t round) const {
    constexpr std::int64_t kLine = 64;
    for (std::int64_t at = 0; at < upcoming.bytes; at += kLine) {
      if (round_.load(std::memory_order_relaxed) != round) return;
      __builtin_prefetch(upcoming.begin + at, 0, 2);
    }
  }

  int count_ = 1;
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

// Threads that sleep until they are called. Their number is that of the largest call, and every call uses the first
// ones. So layers with different numbers of threads share them.
class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() { dismiss(0); }

  // Starts threads up to this number, the caller included. Throws std::invalid_argument for a number that no machine
  // has, and std::runtime_error if they cannot be started; the number of threads is then unchanged.
  void require(int threads) {
    if (threads < 1 || threads > kMostThreads) {
      throw std::invalid_argument("threads must be at least 1 and at most " + decimal(kMostThreads) + ", found " +
                                  decimal(threads));
    }
    const std::size_t before = workers_.size();
    try {
      while (static_cast<int>(workers_.size()) < threads - 1) add();
    } catch (const std::system_error& error) {
      const std::size_t started = workers_.size();
      dismiss(before);
      throw std::runtime_error("only " + decimal(static_cast<std::int64_t>(started) + 1) + " of " + decimal(threads) +
                               " kernel threads could be started: " + error.what());
    }
  }

  // While such a value lives, threads that were called spin longer before they sleep: a step of a GPU calls them again
  // and again, with pauses that are longer than the usual spin, and waking all of them takes as long as a short call.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool) : pool_(pool) { pool_.awake_.fetch_add(1, std::memory_order_relaxed); }
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;
    ~Awake() { pool_.awake_.fetch_sub(1, std::memory_order_relaxed); }

   private:
    ThreadPool& pool_;
  };

  // Calls `task` once on each of `threads` threads and returns when all are done. `task` must not throw. Where there
  // are several nodes, each thread stays on the CPUs of its node, the caller until this returns.
  void run(int threads, const NodeCpus& nodes, Crew::Task task, void* context) {
    require(threads);
    const auto stay = nodes.size() > 1 ? std::make_unique<OnCpus>(nodes.front()) : nullptr;
    nodes_ = &nodes;
    task_ = task;
    context_ = context;
    count_ = threads;
    barrier_.reset(threads);
    for (int index = 1; index < threads; ++index) workers_[static_cast<std::size_t>(index) - 1]->call();
    work(0);
  }

 private:
  // A thread and the number of its calls, on a cache line of its own.
  struct alignas(64) Member {
    void call() {
      calls.fetch_add(1, std::memory_order_release);
      calls.notify_one();
    }
    std::atomic<std::uint32_t> calls{0};
    std::thread thread;
    std::unique_ptr<OnCpus> stay{};  // the thread's own, like what it stays on
    std::vector<int> cpus{};
  };

  void add() {
    auto member = std::make_unique<Member>();
    Member& added = *member;
    const int index = static_cast<int>(workers_.size()) + 1;
    workers_.reserve(workers_.size() + 1);
    added.thread = std::thread([this, &added, index] { serve(added, index); });
    workers_.push_back(std::move(member));
  }

  void dismiss(std::size_t remaining) {
    task_ = nullptr;
    for (std::size_t index = remaining; index < workers_.size(); ++index) workers_[index]->call();
    for (std::size_t index = remaining; index < workers_.size(); ++index) workers_[index]->thread.join();
    workers_.resize(remaining);
  }

  void work(int index) {
    if (phase_observer != nullptr) phase_observer->started();
    task_(context_, {index, count_, barrier_});
    if (phase_observer != nullptr) phase_observer->finished();
    barrier_.wait_for_all();
  }

  void serve(Member& self, int index) {
    for (std::uint32_t seen = 0;; ++seen) {
      wait_while_equal(self.calls, seen, [this] { return awake_.load(std::memory_order_relaxed) > 0; });
      if (task_ == nullptr) return;
      move(self, index);
      work(index);
    }
  }

  // Moves to the node that the thread belongs to in this call; it is seldom another one than in the last.
  void move(Member& self, int index) const {
    static const std::vector<int> kAnywhere;
    const int nodes = static_cast<int>(nodes_->size());
    const auto node = static_cast<std::size_t>(nodes > 1 ? node_of(index, count_, nodes) : 0);
    const std::vector<int>& cpus = nodes > 1 ? (*nodes_)[node] : kAnywhere;
    if (cpus == self.cpus) return;
    self.stay.reset();
    if (!cpus.empty()) self.stay = std::make_unique<OnCpus>(cpus);
    self.cpus = cpus;
  }

  SpinningBarrier barrier_;
  Crew::Task task_ = nullptr;
  void* context_ = nullptr;
  const NodeCpus* nodes_ = nullptr;
  int count_ = 1;
  std::atomic<int> awake_{0};
  std::vector<std::unique_ptr<Member>> workers_;
};

// The threads of one call: those of an OpenMP runtime if it offers as many, otherwise the pool's own.
class SharedThreads final : public Crew {
 public:
  // `owner` is the process in which `openmp` has threads.
  SharedThreads(ThreadPool& pool, int threads, const NodeCpus& nodes, const OpenMp& openmp, pid_t owner)
      : pool_(pool), threads_(threads), nodes_(nodes), openmp_(openmp), owner_(owner) {}

  int threads() const override { return threads_; }

  void run(Task task, void* context) override {
    if (nodes_.size() <= 1 && offers(openmp_, owner_, threads_) && on_openmp(task, context)) return;
    pool_.run(threads_, nodes_, task, context);
  }

 private:
  bool on_openmp(Task task, void* context) const {
    SpinningBarrier barrier;
    barrier.reset(threads_);
    const auto work = [&](int index) {
      if (phase_observer != nullptr) phase_observer->started();
      task(context, Worker{index, threads_, barrier});
      if (phase_observer != nullptr) phase_observer->finished();
    };
    return run_on(openmp_, threads_, work);
  }

  ThreadPool& pool_;
  int threads_;
  const NodeCpus& nodes_;
  const OpenMp& openmp_;
  pid_t owner_;
};

}  // namespace ktc::inline KTC_UNIT
