// A call of a kernel with its arguments: an operation of a decoding step, or a host function of a CUDA stream or graph.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <vector>

namespace ktc {

// The runs of a call that computed something, their time and their amounts; sums of squared amounts, and of amounts
// times their time, which separate the cost of a run from that of its amount. A run that took far longer than those
// before it counts with less: another process had its core.
struct HostWork {
  std::int64_t nanoseconds = 0;
  std::int64_t amount = 0;
  std::int64_t runs = 0;
  double squares = 0;
  double products = 0;
};

// The kernel, the engine and every pointer in the arguments must outlive the programs and graphs that hold the call.
class HostCall {
 public:
  // `amount` counts what a run has to compute, such as the experts that it reads, and throws nothing. Without it a run
  // has an amount of 1.
  explicit HostCall(std::function<void()> call, std::function<std::int64_t()> amount = nullptr);
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;
  ~HostCall();

  const std::function<void()>& call() const;

  // A `cudaHostFn_t`; `call` is a HostCall. Such a function may call nothing of CUDA and may not throw: the exception
  // waits for `rethrow`.
  static void run(void* call) noexcept;

  // Of all runs that have ended.
  HostWork work() const;

  // Throws what the first run since the last `rethrow` threw, if any did, of the first `runs` of the call. Errors of
  // later runs stay.
  void rethrow(std::int64_t runs = std::numeric_limits<std::int64_t>::max());

 private:
  struct Thrown {
    std::int64_t run;  // from 1
    std::exception_ptr error;
  };
  static constexpr std::size_t kMostThrown = 4;  // more than the runs that are under way at once

  std::function<void()> call_;
  std::function<std::int64_t()> amount_;
  mutable std::mutex busy_;
  std::vector<Thrown> thrown_;
  std::int64_t ended_ = 0;  // runs
  HostWork work_;
  std::int64_t usual_ = 0;  // nanoseconds of the last runs
};

}  // namespace ktc
