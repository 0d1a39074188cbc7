// Every kernel of an instruction set, as the product generates it, run in every way at once, for a build with a
// sanitizer: any number of threads, several callers, and children forked while nothing or while another thread's call
// runs. All must agree to the last bit, and hostile arguments must be refused. `tests/codegen/test_sanitizers.py`
// builds it. `stress SHARE OF` takes every OF-th kernel, and prints each with the number of its calls.
#define KTC_UNIT stress

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <thread>
#include <vector>

#include "calls.hpp"
#include "ktc/team.hpp"
#include "ktc/workspace.hpp"

namespace {

using namespace stress;
using ktc::Engine;

constexpr int kThreads[] = {1, 2, 3, 5};

// As if this machine had so many nodes: threads of any two may run on the same CPUs.
ktc::NodeCpus invented(int nodes) {
  cpu_set_t own;
  std::vector<int> cpus;
  sched_getaffinity(0, sizeof(own), &own);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &own)) cpus.push_back(cpu);
  }
  return ktc::NodeCpus(static_cast<std::size_t>(nodes), cpus);
}

bool agrees_in_every_way(const Call& call, const Written& expected) {
  for (const int threads : kThreads) {
    Engine engine(threads, invented(threads % 3 + 1));
    for (int way = 0; way < call.ways; ++way) {
      if (call.run(engine, way) != expected) return false;
    }
  }
  return true;
}

// Callers that know nothing of each other, each with an engine of another size.
bool callers_agree(const Call& call, const Written& expected) {
  int right[std::size(kThreads)] = {};
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < std::size(kThreads); ++caller) {
    callers.emplace_back([&, caller] {
      Engine engine(kThreads[caller]);
      for (int round = 0; round < 3; ++round) right[caller] += call.run(engine, round % call.ways) == expected;
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int count : right) {
    if (count != 3) return false;
  }
  return true;
}

constexpr unsigned kPatience = 120;  // seconds that a child may take; one that waits for a thread takes for ever

bool child_agrees(const Call& call, const Written& expected) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kPatience);
    _exit(agrees_in_every_way(call, expected) ? 0 : 1);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// The child has of the call a lock that nobody will open, and none of its threads.
bool child_of_a_busy_process_agrees(const Call& call, const Written& expected) {
  std::atomic<int> inside{0}, forked{0};
  std::thread caller([&] {
    exclusively(Engine(2), [&](const ktc::Team& team, ktc::Workspace&) {
      team.run([&](ktc::Worker) {
        inside.fetch_add(1), inside.notify_one();
        forked.wait(0);
      });
    });
  });
  for (int seen = 0; seen < 2; seen = inside) inside.wait(seen);
  const bool agrees = child_agrees(call, expected);
  forked = 1, forked.notify_all();
  caller.join();
  return agrees;
}

bool is_right(const Call& call, bool forks) {
  Engine one(1);
  const Written expected = call.run(one, 0);
  if (forks && !child_agrees(call, expected)) return false;  // before this process has threads
  if (!agrees_in_every_way(call, expected) || !callers_agree(call, expected)) return false;
  if (forks && !child_of_a_busy_process_agrees(call, expected)) return false;
  Engine two(2);
  return call.refuses == nullptr || (call.refuses(one) && call.refuses(two));
}

}  // namespace

int main(int count, char** arguments) {
  const std::size_t share = count > 2 ? std::strtoul(arguments[1], nullptr, 10) : 0;
  const std::size_t shares = count > 2 ? std::strtoul(arguments[2], nullptr, 10) : 1;
  const std::vector<Kernel> all = kernels();
  for (std::size_t number = share; number < all.size(); number += shares) {
    const std::vector<Call> calls = all[number].calls();
    for (std::size_t each = 0; each < calls.size(); ++each) {
      if (is_right(calls[each], each == 0)) continue;
      std::printf("WRONG: %s, %s\n", all[number].name.c_str(), calls[each].name.c_str());
      return 1;
    }
    std::printf("%s: %zu calls\n", all[number].name.c_str(), calls.size());
  }
}
