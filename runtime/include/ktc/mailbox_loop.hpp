// The loop of a thread that answers the requests of a mailbox.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "ktc/interface/host_call.hpp"
#include "ktc/interface/host_thread.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

class MailboxLoop {
 public:
  explicit MailboxLoop(Mailbox& mailbox) : mailbox_(mailbox) {}

  // From any thread -------------------------------------------------------------------------------------------------
  void expect(std::uint32_t calls) {
    {
      const std::lock_guard lock(busy_);
      expected_.store(expected() + calls, std::memory_order_release);
    }
    needed_.notify_one();
  }
  void dismiss() {
    {
      const std::lock_guard lock(busy_);
      ++generation_;
      expected_.store(0, std::memory_order_release);
      call().store(0, std::memory_order_relaxed);
    }
    few_left_.notify_all();
  }
  // Waits until no more than `left` requests are expected.
  bool wait(std::chrono::nanoseconds most, std::uint32_t left = 0) {
    std::unique_lock lock(busy_);
    waits_for_ = std::max(waits_for_, left);
    ++waiting_;
    const bool are_few = few_left_.wait_for(lock, most, [this, left] { return expected() <= left; });
    if (--waiting_ == 0) waits_for_ = 0;
    return are_few;
  }
  // The thread ends when all expected requests are answered, or when none has come for `kLastPatience`.
  void end() {
    {
      const std::lock_guard lock(busy_);
      ended_.store(true, std::memory_order_release);
    }
    needed_.notify_one();
  }
  std::uint32_t expected() const { return expected_.load(std::memory_order_acquire); }

  // Of the thread ---------------------------------------------------------------------------------------------------
  // `Awake` is made when requests are expected, and destroyed when none are.
  template <class Awake>
  void run(const Awake& awake) {
    while (is_needed()) {
      const auto stays = awake();
      while (const Request request = next()) {
        HostCall::run(reinterpret_cast<void*>(request.address));
        answered(request);
      }
      if (ended()) return;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kPatience = std::chrono::milliseconds(5);
  static constexpr auto kLastPatience = std::chrono::seconds(2);
  static constexpr auto kPause = std::chrono::microseconds(50);
  static constexpr int kLooksPerClock = 64;

  struct Request {
    explicit operator bool() const { return address != 0; }
    std::uint64_t address = 0;
    std::uint64_t generation = 0;
  };

  std::atomic_ref<std::uint64_t> call() const { return std::atomic_ref<std::uint64_t>(mailbox_.call); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  // Sleeps until requests are expected. Returns false when the thread is to end and none are.
  bool is_needed() {
    std::unique_lock lock(busy_);
    needed_.wait(lock, [this] { return expected() > 0 || ended(); });
    return expected() > 0;
  }

  // Waits for a request. Returns none when none is expected, or none comes and the thread is to end.
  Request next() {
    const auto begin = Clock::now();
    while (expected() > 0) {
      for (int look = 0; look < kLooksPerClock; ++look) {
        if (call().load(std::memory_order_acquire) != 0) {
          if (const Request request = taken()) return request;
        }
        relax();
      }
      const auto waited = Clock::now() - begin;
      if (ended() && waited > kLastPatience) break;
      if (waited > kPatience) {
        std::this_thread::sleep_for(kPause);
      } else {
        sched_yield();
      }
    }
    return {};
  }

  // The request that is there, unless it was dismissed.
  Request taken() {
    const std::lock_guard lock(busy_);
    return {.address = call().exchange(0, std::memory_order_acquire), .generation = generation_};
  }

  // A call that was dismissed while it was made is none of those that are expected now, and no GPU waits for it.
  void answered(const Request& request) {
    {
      const std::lock_guard lock(busy_);
      if (request.generation != generation_) return;
      std::atomic_ref<std::uint32_t>(mailbox_.done).store(1, std::memory_order_release);
      const std::uint32_t left = expected();
      if (left > 0) expected_.store(left - 1, std::memory_order_release);
      if (waiting_ == 0 || expected() > waits_for_) return;
    }
    few_left_.notify_all();
  }

  Mailbox& mailbox_;
  std::atomic<std::uint32_t> expected_{0};  // written with `busy_`
  std::uint64_t generation_ = 0;            // how often requests were dismissed
  std::atomic<bool> ended_{false};
  std::mutex busy_;
  std::uint32_t waits_for_ = 0;  // the most that a waiting thread lets be left
  int waiting_ = 0;              // threads
  std::condition_variable needed_, few_left_;
};

}  // namespace ktc::inline KTC_UNIT
