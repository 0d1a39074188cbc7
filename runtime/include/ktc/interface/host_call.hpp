// A call of a kernel with its arguments: an operation of a decoding step, or a host function of a CUDA stream or graph.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace ktc {

// The kernel, the engine and every pointer in the arguments must outlive the programs and graphs that hold the call.
class HostCall {
 public:
  explicit HostCall(std::function<void()> call);
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;
  ~HostCall();

  const std::function<void()>& call() const;

  // A `cudaHostFn_t`; `call` is a HostCall. Such a function may call nothing of CUDA and may not throw: the exception
  // waits for `rethrow`.
  static void run(void* call) noexcept;

  // The time of all runs.
  std::int64_t nanoseconds() const;

  // Throws what the first run since the last `rethrow` threw, if any did.
  void rethrow();

 private:
  std::function<void()> call_;
  std::mutex busy_;
  std::exception_ptr thrown_;
  std::atomic<std::int64_t> nanoseconds_{0};
};

}  // namespace ktc
