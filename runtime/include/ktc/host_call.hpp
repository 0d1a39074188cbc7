// A call of a kernel with its arguments: an operation of a decoding step, or a host function of a CUDA stream or graph.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace ktc {

// The kernel, the engine and every pointer in the arguments must outlive the programs and graphs that hold the call.
class HostCall {
 public:
  explicit HostCall(std::function<void()> call) : call_(std::move(call)) {}

  const std::function<void()>& call() const { return call_; }

  // A `cudaHostFn_t`; `call` is a HostCall. Such a function may call nothing of CUDA and may not throw: the exception
  // waits for `rethrow`.
  static void run(void* call) noexcept {
    auto& self = *static_cast<HostCall*>(call);
    try {
      self.call_();
    } catch (...) {
      const std::lock_guard lock(self.busy_);
      if (!self.thrown_) self.thrown_ = std::current_exception();
    }
  }

  // Throws what the first run since the last `rethrow` threw, if any did.
  void rethrow() {
    std::exception_ptr thrown;
    {
      const std::lock_guard lock(busy_);
      thrown = std::exchange(thrown_, nullptr);
    }
    if (thrown) std::rethrow_exception(thrown);
  }

 private:
  std::function<void()> call_;
  std::mutex busy_;
  std::exception_ptr thrown_;
};

}  // namespace ktc
