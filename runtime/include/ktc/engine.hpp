// What all layers of a process share: the workers, and one workspace, for one call at a time.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "ktc/thread_pool.hpp"
#include "ktc/workspace.hpp"

namespace ktc {

class Engine {
 public:
  explicit Engine(int threads) : threads_(threads), team_(std::make_unique<Team>(threads).release()) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() {
    const Team* team = team_.load(std::memory_order_acquire);
    if (team->owner == getpid()) delete team;
  }

  int threads() const { return threads_; }

  // Call `body(ThreadPool&, Workspace&)` while no other call runs.
  template <class Body>
  void exclusively(Body&& body) {
    Team& team = own_team();
    const std::lock_guard lock(team.busy);
    body(team.pool, team.workspace);
  }

 private:
  struct Team {
    explicit Team(int threads) : pool(threads), owner(getpid()) {}
    std::mutex busy;
    ThreadPool pool;
    Workspace workspace;
    pid_t owner;
  };

  // A forked child has the parent's objects but none of its threads, and a mutex perhaps locked for ever. Neither can
  // be destroyed there, so the child leaves the parent's team alone and makes its own. Several threads of the child may
  // make their first call together: one puts its team in place, the others drop theirs. A lock around this could itself
  // have been held while the process forked.
  Team& own_team() {
    Team* team = team_.load(std::memory_order_acquire);
    while (team->owner != getpid()) {
      auto made = std::make_unique<Team>(threads_);
      if (team_.compare_exchange_strong(team, made.get(), std::memory_order_acq_rel)) return *made.release();
    }
    return *team;
  }

  const int threads_;
  std::atomic<Team*> team_;
};

}  // namespace ktc
