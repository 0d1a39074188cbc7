// A thread that makes the host calls which a GPU requests in page-locked memory. A host function of CUDA does the same
// through the driver, which takes tens of microseconds for each.
#pragma once

#include <cstdint>
#include <memory>

namespace ktc {

// What a GPU and a thread write for each other, on a cache line each: `call` the address of a HostCall, which the
// thread replaces by 0 when it has read it, and `done` is 1 from the end of the call on. The GPU writes 0 to it before
// `call`.
struct Mailbox {
  alignas(128) std::uint64_t call;
  alignas(128) std::uint32_t done;
};

// The thread looks for requests while it expects some, and sleeps otherwise. It looks without a pause at first, and
// twenty thousand times a second when none has come for milliseconds. Kernel threads spin longer meanwhile.
class HostThread {
 public:
  // `mailbox` must outlive the thread. Throws std::runtime_error if the thread cannot be started.
  explicit HostThread(Mailbox* mailbox);
  HostThread(const HostThread&) = delete;
  HostThread& operator=(const HostThread&) = delete;
  // Waits until the expected requests are answered, or for two seconds in which none has come. Later ones are not
  // answered.
  ~HostThread();

  // That number of requests will come, beside those that are expected already.
  void expect(std::uint32_t calls);
  // None of those that are expected will come, since the GPU has failed.
  void dismiss();
  std::uint32_t expected() const;
  // Waits until no more than `left` requests are expected, and returns false after `seconds`.
  bool wait(double seconds, std::uint32_t left = 0);

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace ktc
