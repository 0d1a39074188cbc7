// The nodes of a machine whose memory is not equally near to all its cores: the placement of memory and of threads.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <iterator>
#include <vector>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The node that a worker belongs to: as with panels, each has a contiguous run of them.
inline int node_of(int worker, int workers, int nodes) {
  int node = 0;
  while (worker >= workers * (node + 1) / nodes) ++node;
  return node;
}

// Requests memory on a node before the first write to it. It is advice: if it is refused or the node is full, the
// memory comes from another node.
inline void bind_to_node(void* begin, std::size_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  constexpr unsigned kBits = 8 * sizeof(unsigned long);
  unsigned long mask[16] = {};
  const auto bit = static_cast<unsigned>(node);
  if (node < 0 || bit >= kBits * std::size(mask) || bytes == 0) return;
  mask[bit / kBits] = 1UL << bit % kBits;
  syscall(SYS_mbind, begin, bytes, kPreferred, mask, kBits * std::size(mask) + 1, 0);
}

inline cpu_set_t cpu_set(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(cpu), &set);
  }
  return set;
}

// Keeps the calling thread on some CPUs, until it is destroyed.
class OnCpus {
 public:
  explicit OnCpus(const std::vector<int>& cpus) {
    moved_ = sched_getaffinity(0, sizeof(before_), &before_) == 0;
    const cpu_set_t set = cpu_set(cpus);
    moved_ = moved_ && sched_setaffinity(0, sizeof(set), &set) == 0;
  }
  OnCpus(const OnCpus&) = delete;
  OnCpus& operator=(const OnCpus&) = delete;
  ~OnCpus() {
    if (moved_) sched_setaffinity(0, sizeof(before_), &before_);
  }

 private:
  cpu_set_t before_;
  bool moved_;
};

}  // namespace ktc::inline KTC_UNIT
