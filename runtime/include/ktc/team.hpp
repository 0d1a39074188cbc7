// A call of a kernel on an engine's threads, by lambdas: what a unit compiles of `interface/engine.hpp` for itself.
#pragma once

#include <memory>
#include <type_traits>

#include "ktc/interface/engine.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// The threads of one call.
class Team {
 public:
  explicit Team(Crew& crew) : crew_(crew) {}

  int threads() const { return crew_.threads(); }

  // Calls `body(Worker)` once on each thread and returns when all are done. `body` must not throw.
  template <class Body>
  void run(Body&& body) const {
    using Plain = std::remove_reference_t<Body>;
    const auto task = [](void* context, Worker worker) { (*static_cast<Plain*>(context))(worker); };
    crew_.run(task, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

 private:
  Crew& crew_;
};

// Calls `body(const Team&, Workspace&)` while no other call of the process runs. Throws what `body` throws.
template <class Body>
void exclusively(const Engine& engine, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  const auto call = [](void* context, Crew& crew, ScratchMemory& memory) {
    Workspace workspace(memory);
    (*static_cast<Plain*>(context))(Team(crew), workspace);
  };
  engine.exclusively(call, const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace ktc::inline KTC_UNIT
