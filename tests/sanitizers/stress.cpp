// Layers of odd sizes in several formats, run in every way at once, for a build with a sanitizer: any number of
// threads, kept and recomputed activations, LoRA or none, several callers, and a forked child. All must agree to the
// last bit. `tests/test_sanitizers.py` builds it, with KTC_ISA as the instruction set and its header included before.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ktc/activation.hpp"
#include "ktc/fused_moe.hpp"
#include "ktc/weight_format/dense.hpp"
#include "ktc/weight_format/int8.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace {

using namespace ktc;
using weight_format::Part;
using Isa = ktc::KTC_ISA::Isa;

struct Constants {
  static constexpr double kAlpha = 1;
  static constexpr double kLimit = std::numeric_limits<double>::infinity();
  static constexpr double kUpOffset = 0;
};
using Shape = MoeShape<kDynamic, kDynamic, kDynamic, kDynamic>;
using Dense = FusedMoe<Isa, weight_format::Bf16, Gated<Silu, Constants>, false, Shape>;
using Biased = FusedMoe<Isa, weight_format::Bf16, Ungated<Relu, Constants>, true, Shape>;
using Coded = FusedMoe<Isa, weight_format::Packed<weight_format::Int4Panel<32>>, Gated<Silu, Constants>, false, Shape>;
using Integer = FusedMoe<Isa, weight_format::Packed<weight_format::Int8Panel>, Gated<Silu, Constants>, false, Shape>;

enum class Form { kDense, kBiased, kCoded, kInteger };

struct Case {
  Form form;
  MoeSizes sizes;
  std::int64_t tokens;
  std::int64_t experts_used;  // the others get no token
  std::int64_t rank;          // of LoRA on both products, 0 without
  int nodes = 1;              // that the weights are cut for, and the threads of some engines spread over
};

std::unique_ptr<MoeKernel> make(const Case& which) {
  MoeSizes sizes = which.sizes;
  sizes.nodes = which.nodes;
  switch (which.form) {
    case Form::kDense:
      return std::make_unique<Dense>(sizes);
    case Form::kBiased:
      return std::make_unique<Biased>(sizes);
    case Form::kCoded:
      return std::make_unique<Coded>(sizes);
    case Form::kInteger:
      return std::make_unique<Integer>(sizes);
  }
  std::abort();
}

// Memory of exactly so many bytes, so that a sanitizer sees a read beyond them.
struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<std::byte, Free>;

Bytes aligned(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) std::abort();
  std::memset(memory, 0, bytes);
  return Bytes(static_cast<std::byte*>(memory));
}

template <class Value>
std::vector<Value> random_values(std::mt19937& random, std::int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<Value> values;
  for (std::int64_t i = 0; i < count; ++i) values.emplace_back(normal(random));
  return values;
}

struct Factors {
  std::vector<float> a, b;
};

// A layer with its weights, and one batch. Nothing of it changes after it was made.
class Layer {
 public:
  explicit Layer(const Case& which) : which_(which), kernel_(make(which)), packed_(aligned(kernel_->packed_bytes())) {
    const MoeSizes& sizes = which.sizes;
    std::mt19937 random(1);
    for (std::int64_t expert = 0; expert < sizes.num_experts; ++expert) pack(expert, random);
    hidden_ = random_values<bf16>(random, which.tokens * sizes.hidden, 1);
    grad_ = random_values<bf16>(random, which.tokens * sizes.hidden, 1);
    weight_ = random_values<float>(random, which.tokens * sizes.top_k, 1);
    for (std::int64_t token = 0; token < which.tokens; ++token) {
      const auto first = static_cast<std::int64_t>(random() % which.experts_used);
      for (std::int64_t k = 0; k < sizes.top_k; ++k) index_.push_back((first + k) % which.experts_used);
    }
    const std::int64_t outputs = sizes.intermediate * (which.form == Form::kBiased ? 1 : 2);
    first_ = factors(random, sizes.hidden, outputs);
    down_ = factors(random, sizes.intermediate, sizes.hidden);
  }

  // Bytes of everything that forward and backward write.
  std::vector<std::byte> run(Engine& engine, bool recompute) const {
    const std::size_t rows = static_cast<std::size_t>(which_.tokens * which_.sizes.hidden);
    std::vector<bf16> out(rows), grad_hidden(rows);
    std::vector<float> grad_weight(weight_.size());
    Factors grad_first{std::vector<float>(first_.a.size()), std::vector<float>(first_.b.size())};
    Factors grad_down{std::vector<float>(down_.a.size()), std::vector<float>(down_.b.size())};
    const LoraFactors first = native(first_, grad_first, true), down = native(down_, grad_down, false);
    const Bytes saved = recompute ? nullptr : aligned(kernel_->saved_bytes(which_.tokens, which_.rank, which_.rank));
    kernel_->forward(engine, {.packed = packed_.get(),
                              .hidden_states = hidden_.data(),
                              .top_k_index = index_.data(),
                              .top_k_weights = weight_.data(),
                              .out = out.data(),
                              .saved = saved.get(),
                              .tokens = which_.tokens,
                              .lora_first = first,
                              .lora_down = down});
    kernel_->backward(engine, {.packed = packed_.get(),
                               .top_k_index = index_.data(),
                               .top_k_weights = weight_.data(),
                               .saved = saved.get(),
                               .hidden_states = hidden_.data(),
                               .grad_out = grad_.data(),
                               .grad_hidden_states = grad_hidden.data(),
                               .grad_top_k_weights = grad_weight.data(),
                               .tokens = which_.tokens,
                               .lora_first = first,
                               .lora_down = down});
    std::vector<std::byte> written;
    const auto append = [&](const auto& values) {
      const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
      written.insert(written.end(), bytes, bytes + values.size() * sizeof(values[0]));
    };
    append(out), append(grad_hidden), append(grad_weight);
    for (const Factors* each : {&grad_first, &grad_down}) append(each->a), append(each->b);
    return written;
  }

 private:
  void pack(std::int64_t expert, std::mt19937& random) {
    for (const Part part : {Part::kGate, Part::kUp, Part::kDown, Part::kUpBias, Part::kDownBias}) {
      const bool biased = which_.form == Form::kBiased;
      if ((biased && part == Part::kGate) || (!biased && is_bias(part))) continue;
      const std::int64_t outputs = is_down(part) ? which_.sizes.hidden : which_.sizes.intermediate;
      const std::int64_t inputs = which_.sizes.hidden + which_.sizes.intermediate - outputs;
      const std::int64_t rows = is_bias(part) ? 1 : outputs, columns = is_bias(part) ? outputs : inputs;
      const auto values = random_values<bf16>(random, rows * columns, 0.1F);
      kernel_->pack(packed_.get(), expert, part, values.data(), SourceType::kBf16, rows, columns);
      std::vector<float> back(values.size());  // room for bf16 too
      kernel_->unpack(packed_.get(), expert, part, back.data(), rows, columns);
    }
  }

  Factors factors(std::mt19937& random, std::int64_t inputs, std::int64_t outputs) const {
    const std::int64_t ranks = which_.sizes.num_experts * which_.rank;
    return {random_values<float>(random, ranks * inputs, 0.1F), random_values<float>(random, ranks * outputs, 0.1F)};
  }
  LoraFactors native(const Factors& factors, Factors& gradients, bool interleaved) const {
    if (which_.rank == 0) return {};
    return {factors.a.data(), factors.b.data(), gradients.a.data(), gradients.b.data(), which_.rank, 0.5, interleaved};
  }

  Case which_;
  std::unique_ptr<MoeKernel> kernel_;
  Bytes packed_;
  std::vector<bf16> hidden_, grad_;
  std::vector<std::int64_t> index_;
  std::vector<float> weight_;
  Factors first_, down_;
};

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

bool child_agrees(const Layer& layer, const std::vector<std::byte>& expected) {
  const pid_t child = fork();
  if (child == 0) _exit(agrees_in_every_way(layer, expected) ? 0 : 1);
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

constexpr Case kCases[] = {
    {Form::kDense, {5, 70, 37, 2}, 29, 5, 0},      {Form::kDense, {5, 70, 37, 2}, 29, 5, 5},
    {Form::kDense, {1, 33, 1, 1}, 1, 1, 0},        {Form::kDense, {1, 1, 33, 1}, 3, 1, 1},
    {Form::kDense, {3, 17, 9, 3}, 5, 3, 2},        {Form::kDense, {6, 200, 150, 3}, 45, 4, 8},
    {Form::kDense, {8, 64, 64, 1}, 130, 1, 0},     {Form::kDense, {5, 70, 37, 2}, 0, 5, 3},
    {Form::kBiased, {5, 70, 37, 2}, 29, 3, 0},     {Form::kBiased, {4, 64, 96, 4}, 2, 4, 9},
    {Form::kCoded, {4, 64, 96, 2}, 1, 4, 0},       {Form::kCoded, {4, 64, 96, 2}, 40, 3, 4},
    {Form::kCoded, {3, 160, 224, 1}, 100, 2, 128}, {Form::kInteger, {5, 70, 37, 2}, 1, 5, 0},
    {Form::kInteger, {4, 130, 98, 2}, 40, 3, 4},   {Form::kInteger, {2, 70, 230, 1}, 29, 2, 0, 2},
};

bool is_right(const Case& which) {
  Engine one(1);
  const Layer layer(which);
  const auto expected = layer.run(one, false);
  if (!child_agrees(layer, expected) || !agrees_in_every_way(layer, expected)) return false;
  if (!callers_agree(layer, expected) || !child_agrees(layer, expected)) return false;
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
