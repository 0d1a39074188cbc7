// Calls on the threads of an OpenMP runtime that another library of the process has loaded, PyTorch's.
//
// Its threads spin for milliseconds after every region, on the cores that a call of ktc needs next. A call that runs on
// the same threads finds them awake instead.
#pragma once

#include <unistd.h>

#include "ktc/interface/engine.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Returns whether a region that the calling thread opens has that many threads, which are several. `owner` is the
// process in which the runtime has threads.
inline bool offers(const OpenMp& openmp, pid_t owner, int threads) {
  return threads > 1 && openmp.parallel != nullptr && owner == getpid() && threads <= openmp.max_threads();
}

// Calls `body(index)` on each of `threads` threads at the same time, and returns true when all are done; or calls
// nothing and returns false, where the region gets fewer threads, as inside another region. `body` must not throw. The
// region has the runtime's own number of threads: one of fewer would end those that PyTorch's next region needs.
template <class Body>
bool run_on(const OpenMp& openmp, int threads, Body& body) {
  struct Call {
    const OpenMp& runtime;
    int threads;
    Body& body;
    bool complete;
  };
  Call call{openmp, threads, body, false};
  const auto task = [](void* context) {
    Call& call = *static_cast<Call*>(context);
    if (call.runtime.num_threads() < call.threads) return;
    const int index = call.runtime.thread_num();
    if (index == 0) call.complete = true;
    if (index < call.threads) call.body(index);
  };
  openmp.parallel(task, &call, static_cast<unsigned>(openmp.max_threads()), 0);
  return call.complete;
}

}  // namespace ktc::inline KTC_UNIT
