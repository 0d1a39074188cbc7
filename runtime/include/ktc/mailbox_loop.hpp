// The loop of a thread that answers the requests of a mailbox.
#pragma once

#include <sched.h>

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
    expected_.fetch_add(calls, std::memory_order_release);
    expected_.notify_one();
  }
  void dismiss() {
    expected_.store(0, std::memory_order_release);
    call().store(0, std::memory_order_relaxed);
    tell();
  }
  bool wait(std::chrono::nanoseconds most) {
    std::unique_lock lock(busy_);
    return none_left_.wait_for(lock, most, [this] { return expected() == 0; });
  }
  void end() {
    ended_.store(true, std::memory_order_release);
    expect(1);
  }
  std::uint32_t expected() const { return expected_.load(std::memory_order_acquire); }

  // Of the thread ---------------------------------------------------------------------------------------------------
  // `Awake` is made when requests are expected, and destroyed when none are.
  template <class Awake>
  void run(const Awake& awake) {
    while (!ended()) {
      expected_.wait(0, std::memory_order_acquire);
      const auto stays = awake();
      while (const std::uint64_t address = next()) {
        HostCall::run(reinterpret_cast<void*>(address));
        std::atomic_ref<std::uint32_t>(mailbox_.done).store(1, std::memory_order_release);
        answered();
      }
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kPatience = std::chrono::milliseconds(5);
  static constexpr auto kPause = std::chrono::microseconds(50);
  static constexpr int kLooksPerClock = 64;

  std::atomic_ref<std::uint64_t> call() const { return std::atomic_ref<std::uint64_t>(mailbox_.call); }
  bool ended() const { return ended_.load(std::memory_order_acquire); }

  // Waits for a request. Returns 0 when none is expected.
  std::uint64_t next() const {
    const auto deadline = Clock::now() + kPatience;
    while (expected() > 0 && !ended()) {
      for (int look = 0; look < kLooksPerClock; ++look) {
        if (const std::uint64_t address = call().load(std::memory_order_acquire)) {
          call().store(0, std::memory_order_relaxed);
          return address;
        }
        relax();
      }
      if (Clock::now() > deadline) {
        std::this_thread::sleep_for(kPause);
      } else {
        sched_yield();
      }
    }
    return 0;
  }

  // One request less is expected, unless all were dismissed meanwhile.
  void answered() {
    std::uint32_t left = expected();
    while (left > 0 && !expected_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
    if (left <= 1) tell();
  }

  // Wakes those that wait until no request is expected.
  void tell() {
    {
      const std::lock_guard lock(busy_);
    }  // a thread that has read the number before this waits now
    none_left_.notify_all();
  }

  Mailbox& mailbox_;
  std::atomic<std::uint32_t> expected_{0};
  std::atomic<bool> ended_{false};
  std::mutex busy_;
  std::condition_variable none_left_;
};

}  // namespace ktc::inline KTC_UNIT
