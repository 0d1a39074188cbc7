// The threads of an OpenMP runtime that another library of the process has loaded, PyTorch's: its functions, by
// address.
//
// Its threads spin for milliseconds after every region, on the cores that a call of ktc needs next. A call that runs on
// the same threads finds them awake instead.
#pragma once

#include <unistd.h>

namespace ktc {

// The functions of a runtime; without a runtime all are null.
struct OpenMp {
  void (*parallel)(void (*task)(void*), void* context, unsigned threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;
  pid_t owner = getpid();  // a forked child has the runtime's memory and none of its threads

  // Whether a region that the calling thread opens has that many threads, which are several.
  bool offers(int threads) const {
    return threads > 1 && parallel != nullptr && owner == getpid() && threads <= max_threads();
  }

  // Calls `body(index)` on each of `threads` threads at the same time, and returns true when all are done; or calls
  // nothing and returns false, where the region gets fewer threads, as inside another region. `body` must not throw.
  // The region has the runtime's own number of threads: one of fewer would end those that PyTorch's next region needs.
  template <class Body>
  bool run(int threads, Body& body) const {
    struct Call {
      const OpenMp& runtime;
      int threads;
      Body& body;
      bool complete;
    };
    Call call{*this, threads, body, false};
    const auto task = [](void* context) {
      Call& call = *static_cast<Call*>(context);
      if (call.runtime.num_threads() < call.threads) return;
      const int index = call.runtime.thread_num();
      if (index == 0) call.complete = true;
      if (index < call.threads) call.body(index);
    };
    parallel(task, &call, static_cast<unsigned>(max_threads()), 0);
    return call.complete;
  }
};

}  // namespace ktc
