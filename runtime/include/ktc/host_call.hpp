// A call of a kernel as a host function of a CUDA stream or graph: a C function, and the address of what it calls.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

#include "ktc/engine.hpp"
#include "ktc/moe_kernel.hpp"

namespace ktc {

// `kernel`, `engine` and every pointer in `arguments` must outlive the graphs that hold the call.
class HostCall {
 public:
  HostCall(const MoeKernel& kernel, Engine& engine, const ForwardArguments& arguments)
      : kernel_(kernel), engine_(engine), arguments_(arguments) {}

  // A `cudaHostFn_t`; `call` is a HostCall. Such a function may call nothing of CUDA and may not throw: the exception
  // waits for `rethrow`.
  static void run(void* call) noexcept {
    auto& self = *static_cast<HostCall*>(call);
    try {
      self.kernel_.forward(self.engine_, self.arguments_);
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
  const MoeKernel& kernel_;
  Engine& engine_;
  ForwardArguments arguments_;
  std::mutex busy_;
  std::exception_ptr thrown_;
};

}  // namespace ktc
