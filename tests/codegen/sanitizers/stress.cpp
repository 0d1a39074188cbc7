// Layers of odd sizes in all kinds of formats, run in every way at once, for a build with a sanitizer: any number of
// threads, kept and recomputed activations, LoRA or none, several callers, and children forked while nothing or while
// another thread's call runs. All must agree to the last bit. `tests/codegen/test_sanitizers.py` builds it, with
// KTC_ISA as the instruction set and its header included before.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <iterator>
#include <thread>
#include <vector>

#include "layer.hpp"

namespace {

using namespace stress;

constexpr int kThreads[] = {1, 2, 3, 5};

// As if this machine had so many nodes: threads of any two may run on the same CPUs.
NodeCpus invented(int nodes) {
  cpu_set_t own;
  std::vector<int> cpus;
  sched_getaffinity(0, sizeof(own), &own);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &own)) cpus.push_back(cpu);
  }
  return NodeCpus(static_cast<std::size_t>(nodes), cpus);
}

bool agrees_in_every_way(const Layer& layer, const std::vector<std::byte>& expected) {
  for (const int threads : kThreads) {
    Engine engine(threads, invented(threads % 3 + 1));
    for (const bool recompute : {false, true}) {
      if (layer.run(engine, recompute) != expected) return false;
    }
  }
  return true;
}

// Callers that know nothing of each other, each with an engine of another size.
bool callers_agree(const Layer& layer, const std::vector<std::byte>& expected) {
  int right[std::size(kThreads)] = {};
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < std::size(kThreads); ++caller) {
    callers.emplace_back([&, caller] {
      Engine engine(kThreads[caller]);
      for (int round = 0; round < 3; ++round) right[caller] += layer.run(engine, round == 1) == expected;
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int count : right) {
    if (count != 3) return false;
  }
  return true;
}

constexpr unsigned kPatience = 120;  // seconds that a child may take; one that waits for a thread takes for ever

bool child_agrees(const Layer& layer, const std::vector<std::byte>& expected) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kPatience);
    _exit(agrees_in_every_way(layer, expected) ? 0 : 1);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

// The child has of the call a lock that nobody will open, and none of its threads.
bool child_of_a_busy_process_agrees(const Layer& layer, const std::vector<std::byte>& expected) {
  std::atomic<int> inside{0}, forked{0};
  std::thread caller([&] {
    Engine(2).exclusively([&](const Team& team, Workspace&) {
      team.run([&](Worker) {
        inside.fetch_add(1), inside.notify_one();
        forked.wait(0);
      });
    });
  });
  for (int seen = 0; seen < 2; seen = inside) inside.wait(seen);
  const bool agrees = child_agrees(layer, expected);
  forked = 1, forked.notify_all();
  caller.join();
  return agrees;
}

constexpr Case kCases[] = {
    {Form::kDense, {5, 70, 37, 2}, 29, 5, 0},        {Form::kDense, {5, 70, 37, 2}, 29, 5, 5},
    {Form::kDense, {1, 33, 1, 1}, 1, 1, 0},          {Form::kDense, {1, 1, 33, 1}, 3, 1, 1},
    {Form::kDense, {3, 17, 9, 3}, 5, 3, 2},          {Form::kDense, {6, 200, 150, 3}, 45, 4, 8},
    {Form::kDense, {8, 64, 64, 1}, 130, 1, 0},       {Form::kDense, {5, 70, 37, 2}, 0, 5, 3},
    {Form::kBiased, {5, 70, 37, 2}, 29, 3, 0},       {Form::kBiased, {4, 64, 96, 4}, 2, 4, 9},
    {Form::kInt4, {4, 64, 96, 2}, 1, 4, 0},          {Form::kInt4, {4, 64, 96, 2}, 40, 3, 4},
    {Form::kInt4, {3, 160, 224, 1}, 100, 2, 128},    {Form::kInt8, {5, 70, 37, 2}, 1, 5, 0},
    {Form::kInt8, {4, 130, 98, 2}, 40, 3, 4},        {Form::kInt8, {2, 70, 230, 1}, 29, 2, 0, false, 2},
    {Form::kFp8, {3, 160, 224, 2}, 1, 3, 0},         {Form::kFp8, {3, 160, 224, 2}, 6, 2, 0},
    {Form::kFp8, {3, 160, 224, 2}, 7, 2, 5},         {Form::kFp8, {3, 160, 224, 2}, 40, 3, 0, true},
    {Form::kMXFP4, {3, 96, 160, 2}, 1, 3, 0},        {Form::kMXFP4, {3, 96, 160, 2}, 6, 2, 0},
    {Form::kMXFP4, {3, 96, 160, 2}, 6, 2, 0, true},  {Form::kMXFP4, {3, 96, 160, 2}, 7, 2, 5},
    {Form::kMXFP4, {3, 96, 160, 2}, 40, 3, 0, true}, {Form::kKQuants, {2, 256, 256, 1}, 1, 2, 0},
    {Form::kKQuants, {2, 256, 256, 1}, 6, 1, 0},     {Form::kKQuants, {2, 256, 256, 1}, 6, 1, 3, true},
    {Form::kKQuants, {2, 256, 256, 1}, 7, 1, 0},     {Form::kKQuants, {2, 256, 256, 1}, 40, 2, 4, true},
};

bool is_right(const Case& which) {
  Engine one(1);
  const Layer layer(which);
  const auto expected = layer.run(one, false);
  if (!child_agrees(layer, expected) || !agrees_in_every_way(layer, expected)) return false;
  if (!callers_agree(layer, expected) || !child_of_a_busy_process_agrees(layer, expected)) return false;
  for (const int nodes : {2, 3}) {
    Case cut = which;
    cut.nodes = nodes;
    const Layer shards(cut);
    if (!agrees_in_every_way(shards, expected)) return false;
  }
  return true;
}

}  // namespace

int main() {
  for (const Case& which : kCases) {
    if (is_right(which)) continue;
    const MoeSizes& sizes = which.sizes;
    std::printf("WRONG: form %d, H%ld I%ld E%ld k%ld T%ld r%ld\n", static_cast<int>(which.form), sizes.hidden,
                sizes.intermediate, sizes.num_experts, sizes.top_k, which.tokens, which.rank);
    return 1;
  }
  std::puts("all the same");
}
