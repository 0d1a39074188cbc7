// What all layers of a process share: the workers, and one workspace, for one call at a time.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>

#include "ktc/thread_pool.hpp"
#include "ktc/workspace.hpp"

namespace ktc {

class Engine {
 public:
  explicit Engine(int threads) : threads_(threads), team_(std::make_unique<Team>(threads)) {}

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
  // be destroyed there, so the child leaves the parent's team alone and makes its own.
  Team& own_team() {
    if (team_->owner != getpid()) {
      static_cast<void>(team_.release());
      team_ = std::make_unique<Team>(threads_);
    }
    return *team_;
  }

  int threads_;
  std::unique_ptr<Team> team_;
};

}  // namespace ktc
