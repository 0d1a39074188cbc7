// The threads and the scratch memory that all layers of a process share, for one call at a time.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktc {

// The CPUs of each node of NUMA that a process uses; empty, or those of one node only, if threads may run anywhere.
using NodeCpus = std::vector<std::vector<int>>;

// The functions of an OpenMP runtime that another library of the process has loaded, PyTorch's; all null without one.
struct OpenMp {
  void (*parallel)(void (*task)(void*), void* context, unsigned threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;
};

// Memory that a thread reads next.
struct Upcoming {
  const std::byte* begin = nullptr;
  std::int64_t bytes = 0;
};

// Where the threads of a call wait for each other. A thread that waits fetches `upcoming` into its L2 meanwhile.
class Barrier {
 public:
  virtual void arrive_and_wait(Upcoming upcoming = {}) = 0;

 protected:
  ~Barrier() = default;
};

struct Worker {
  int index;
  int count;
  Barrier& barrier;
};

// The threads of one call.
class Crew {
 public:
  using Task = void (*)(void* context, Worker worker);

  virtual int threads() const = 0;
  // Calls `task` once on each thread and returns when all are done. `task` must not throw.
  virtual void run(Task task, void* context) = 0;

 protected:
  ~Crew() = default;
};

// The block of memory of one call.
class ScratchMemory {
 public:
  // Returns the block, of at least that many bytes; its contents are undefined. Throws std::bad_alloc.
  virtual std::byte* reserve(std::size_t bytes) = 0;

 protected:
  ~ScratchMemory() = default;
};

// The number of threads that a layer's calls use. Engines own nothing. The threads and the memory belong to the
// process, so that layers with engines of different sizes do not hold the cores twice.
class Engine {
 public:
  using Call = void (*)(void* context, Crew& crew, ScratchMemory& memory);

  // Throws std::runtime_error if that number of threads cannot be started. With several `nodes`, each gets a contiguous
  // run of the threads. Calls run on the threads of `openmp` where it has as many.
  explicit Engine(int threads, NodeCpus nodes = {}, const OpenMp& openmp = {});
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  int threads() const;
  // Current bytes of the scratch memory.
  std::size_t workspace_bytes() const;
  // Calls `call` while no other call runs. `exclusively` of `ktc/team.hpp` takes a lambda.
  void exclusively(Call call, void* context) const;

 private:
  int threads_;
  NodeCpus nodes_;
  OpenMp openmp_;
  pid_t owner_;  // a forked child has the runtime's memory and none of its threads
};

// Called by each worker when it starts a phase and when it is done and waits for the others. From this a benchmark
// computes the time of every phase of a call, and the waits between workers.
class PhaseObserver {
 public:
  virtual void started() = 0;
  virtual void finished() = 0;

 protected:
  ~PhaseObserver() = default;
};
extern PhaseObserver* phase_observer;  // set while nothing runs

}  // namespace ktc
