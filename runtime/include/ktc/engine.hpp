// The threads and the one workspace that all layers of a process share, for one call at a time.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "ktc/numa.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/workspace.hpp"

namespace ktc {

// The number of threads that a layer's calls use. Engines own nothing. The threads and the workspace belong to the
// process, so that layers with engines of different sizes do not hold the cores twice.
class Engine {
 public:
  // Throws std::runtime_error if that number of threads cannot be started. With several `nodes`, each gets a contiguous
  // run of the threads. Calls run on the threads of `openmp` where it has as many.
  explicit Engine(int threads, NodeCpus nodes = {}, const OpenMp& openmp = {})
      : threads_(threads), nodes_(std::move(nodes)), openmp_(openmp) {
    if (nodes_.size() <= 1 && openmp_.offers(threads)) return;
    Shared& shared = of_this_process();
    const std::lock_guard lock(shared.busy);
    shared.pool.require(threads);
  }

  int threads() const { return threads_; }

  // Current bytes of the workspace.
  std::size_t workspace_bytes() const {
    Shared& shared = of_this_process();
    const std::lock_guard lock(shared.busy);
    return shared.workspace.size();
  }

  // Call `body(const Team&, Workspace&)` while no other call runs.
  template <class Body>
  void exclusively(Body&& body) const {
    Shared& shared = of_this_process();
    const std::lock_guard lock(shared.busy);
    body(Team(shared.pool, threads_, nodes_, openmp_), shared.workspace);
  }

 private:
  struct Shared {
    std::mutex busy;
    ThreadPool pool;
    Workspace workspace;
    pid_t owner = getpid();
  };

  // A forked child has the parent's objects but none of its threads, and perhaps a mutex that stays locked. The child
  // cannot destroy these, so it leaves the parent's objects alone and makes its own. Several threads of the child may
  // make their first call together: one stores its object, the others drop theirs. A lock around this could itself have
  // been held during the fork. Nothing is destroyed when the process ends, because a thread may still be inside a call.
  static Shared& of_this_process() {
    static std::atomic<Shared*> current{nullptr};
    Shared* shared = current.load(std::memory_order_acquire);
    while (shared == nullptr || shared->owner != getpid()) {
      auto made = std::make_unique<Shared>();
      if (current.compare_exchange_strong(shared, made.get(), std::memory_order_acq_rel)) return *made.release();
    }
    return *shared;
  }

  int threads_;
  NodeCpus nodes_;
  OpenMp openmp_;
};

}  // namespace ktc
