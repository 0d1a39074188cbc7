// A kernel without Python: first against the scalar oracle in fp64, then timed on all the threads asked for, beside
// what the machine can do at most in the same run.
//
//     g++ -std=c++20 -O3 -pthread -Iruntime/include -include ktc/isa/amx.hpp -DKTC_ISA=amx
//         -mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mamx-tile -mamx-bf16
//         benchmarks/native_moe.cpp -o native_moe
//     native_moe check | native_moe THREADS H I E K TOKENS...
//
// Without bf16 products the peak takes a multiply and an add apart, unless built with -ffp-contract=fast.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ktc/activation.hpp"
#include "ktc/fused_moe.hpp"
#include "ktc/isa/scalar.hpp"
#include "ktc/machine_peak.hpp"
#include "ktc/weight_format/dense.hpp"

namespace {

using namespace ktc;
using weight_format::Part;
using Isa = ktc::KTC_ISA::Isa;
using Clock = std::chrono::steady_clock;

struct Constants {
  static constexpr double kAlpha = 1;
  static constexpr double kLimit = std::numeric_limits<double>::infinity();
  static constexpr double kUpOffset = 0;
};
using Activation = Gated<Silu, Constants>;
using Shape = MoeShape<kDynamic, kDynamic, kDynamic, kDynamic>;
using Kernel = FusedMoe<Isa, weight_format::Bf16, Activation, false, Shape>;
using Oracle = FusedMoe<scalar::Isa<double>, weight_format::Fp64, Activation, false, Shape>;

// Random hidden states, gradients and routing of some tokens, as bf16 and as the same values in fp64.
struct Batch {
  Batch(const MoeSizes& sizes, std::int64_t tokens, std::mt19937& random) : tokens(tokens) {
    std::normal_distribution<float> normal;
    for (auto* values : {&hidden, &grad}) {
      for (std::int64_t i = 0; i < tokens * sizes.hidden; ++i) values->emplace_back(normal(random));
    }
    std::vector<std::int64_t> experts(static_cast<std::size_t>(sizes.num_experts));
    for (std::size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<std::int64_t>(i);
    for (std::int64_t token = 0; token < tokens; ++token) {
      for (std::int64_t k = 0; k < sizes.top_k; ++k) {
        std::swap(experts[k], experts[k + random() % (experts.size() - k)]);
        index.push_back(experts[k]);
        weight.push_back(0.5F + static_cast<float>(random() % 100) / 200);
      }
    }
  }
  std::int64_t tokens;
  std::vector<bf16> hidden, grad;
  std::vector<std::int64_t> index;
  std::vector<float> weight;
};

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values) {
  std::vector<To> result;
  for (const From& value : values) result.push_back(static_cast<To>(value));
  return result;
}

// Output, and gradients of hidden states and routing weights.
template <class Element, class Accumulator>
struct Results {
  std::vector<Element> out, grad_hidden;
  std::vector<Accumulator> grad_weight;
};

template <class Element, class Accumulator>
Results<Element, Accumulator> run(const MoeKernel& kernel, Engine& engine, const std::byte* packed, const Batch& batch,
                                  bool recompute, double* forward_ms = nullptr, double* backward_ms = nullptr) {
  const auto hidden = converted<Element>(batch.hidden), grad = converted<Element>(batch.grad);
  const auto weight = converted<Accumulator>(batch.weight);
  Results<Element, Accumulator> results{std::vector<Element>(hidden.size()), std::vector<Element>(hidden.size()),
                                        std::vector<Accumulator>(weight.size())};
  const HugePages saved(kernel.saved_bytes(batch.tokens));
  const auto begin = Clock::now();
  kernel.forward(engine, {packed, hidden.data(), batch.index.data(), weight.data(), results.out.data(),
                          recompute ? nullptr : saved.data(), batch.tokens});
  const auto middle = Clock::now();
  kernel.backward(engine, {packed, batch.index.data(), weight.data(), recompute ? nullptr : saved.data(), hidden.data(),
                           grad.data(), results.grad_hidden.data(), results.grad_weight.data(), batch.tokens});
  const auto end = Clock::now();
  if (forward_ms) *forward_ms = std::chrono::duration<double, std::milli>(middle - begin).count();
  if (backward_ms) *backward_ms = std::chrono::duration<double, std::milli>(end - middle).count();
  return results;
}

template <class Found>
double error(const std::vector<Found>& found, const std::vector<double>& expected) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    difference += std::pow(static_cast<double>(found[i]) - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  return std::sqrt(difference / size);
}

template <class Value>
bool same_bits(const std::vector<Value>& a, const std::vector<Value>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0;
}

// Whether the kernel computes what the oracle does, and the same bits however it is run.
bool check(const MoeSizes& sizes, std::int64_t tokens) {
  std::mt19937 random(1);
  const Kernel kernel(sizes);
  const Oracle oracle(sizes);
  const HugePages packed(kernel.packed_bytes()), exact(oracle.packed_bytes());
  for (std::int64_t expert = 0; expert < sizes.num_experts; ++expert) {
    for (const Part part : {Part::kGate, Part::kUp, Part::kDown}) {
      const std::int64_t rows = part == Part::kDown ? sizes.hidden : sizes.intermediate;
      const std::int64_t columns = sizes.hidden + sizes.intermediate - rows;
      std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
      std::vector<bf16> matrix;
      for (std::int64_t i = 0; i < rows * columns; ++i) matrix.emplace_back(normal(random));
      kernel.pack(packed.data(), expert, part, matrix.data(), SourceType::kBf16, rows, columns);
      oracle.pack(exact.data(), expert, part, matrix.data(), SourceType::kBf16, rows, columns);
    }
  }
  const Batch batch(sizes, tokens, random);
  Engine one(1), three(3);
  const auto expected = run<double, double>(oracle, one, exact.data(), batch, false);
  const auto found = run<bf16, float>(kernel, one, packed.data(), batch, false);
  const auto other = run<bf16, float>(kernel, three, packed.data(), batch, true);
  const double out = error(found.out, expected.out), grad = error(found.grad_hidden, expected.grad_hidden);
  const double weight = error(found.grad_weight, expected.grad_weight);
  const bool same = same_bits(found.out, other.out) && same_bits(found.grad_hidden, other.grad_hidden) &&
                    same_bits(found.grad_weight, other.grad_weight);
  const bool right = out <= 3e-3 && grad <= 4e-3 && weight <= 5e-3 && same;
  std::printf("H%ld I%ld E%ld k%ld T%ld: output %.1e, d hidden %.1e, d weights %.1e, %s bits: %s\n", sizes.hidden,
              sizes.intermediate, sizes.num_experts, sizes.top_k, tokens, out, grad, weight, same ? "same" : "OTHER",
              right ? "right" : "WRONG");
  return right;
}

// `work(thread)` on every thread at once; the seconds it took.
template <class Work>
double on_all(int threads, const Work& work) {
  std::vector<std::thread> team;
  const auto begin = Clock::now();
  for (int thread = 0; thread < threads; ++thread) team.emplace_back(work, thread);
  for (auto& member : team) member.join();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void measure(int threads, const MoeSizes& sizes, const std::vector<std::int64_t>& tokens) {
  constexpr int kRounds = 7;
  const Kernel kernel(sizes);
  const HugePages packed(kernel.packed_bytes());
  const std::size_t share = kernel.packed_bytes() / static_cast<std::size_t>(threads) / 512 * 512;
  on_all(threads, [&](int thread) {  // any values of a usual size; where they lie matters, not what they are
    auto* weights = reinterpret_cast<std::uint16_t*>(packed.data() + share * static_cast<std::size_t>(thread));
    for (std::size_t i = 0; i < share / 2; ++i) weights[i] = static_cast<std::uint16_t>(0x3c00 | (i * 40503 & 0x80ff));
  });
  Engine engine(threads);
  std::mt19937 random(1);
  for (const std::int64_t count : tokens) {
    const Batch batch(sizes, count, random);
    std::vector<double> forward(kRounds), backward(kRounds);
    for (int round = 0; round < kRounds; ++round) {
      run<bf16, float>(kernel, engine, packed.data(), batch, false, &forward[round], &backward[round]);
    }
    constexpr std::int64_t kPeakRounds = 2'000'000;
    std::vector<std::int64_t> flops(static_cast<std::size_t>(threads));
    const double peak_s = on_all(threads, [&](int thread) { flops[thread] = multiply_in_registers(kPeakRounds); });
    std::vector<std::uint64_t> read(static_cast<std::size_t>(threads));
    const double read_s = on_all(threads, [&](int thread) {
      read[thread] = read_in_order(packed.data() + share * static_cast<std::size_t>(thread), share);
    });
    std::vector<std::int64_t> active = batch.index;
    std::sort(active.begin(), active.end());
    const auto num_active = std::unique(active.begin(), active.end()) - active.begin();
    const double gbytes = 6e-9 * static_cast<double>(num_active * sizes.hidden * sizes.intermediate);
    const double tflop = 6e-12 * static_cast<double>(count * sizes.top_k * sizes.hidden * sizes.intermediate);
    std::printf("T%ld, %d threads; peak %.1f TFLOP/s, read %.0f GB/s\n", count, threads,
                1e-12 * static_cast<double>(flops[0] * threads) / peak_s,
                1e-9 * static_cast<double>(share * static_cast<std::size_t>(threads)) / read_s);
    for (auto* times : {&forward, &backward}) {
      std::sort(times->begin(), times->end());
      const double ms = (*times)[kRounds / 2];
      std::printf("  %s: %.2f ms (best %.2f), %.2f TFLOP/s, %.0f GB/s\n", times == &forward ? "forward " : "backward",
                  ms, times->front(), 1e3 * tflop / ms, 1e3 * gbytes / ms);
    }
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::string(arguments[1]) == "check") {
    const MoeSizes odd{5, 70, 37, 2}, few{16, 130, 50, 4}, deep{3, 1100, 600, 2}, one{1, 700, 1210, 1};
    bool right = true;
    for (const std::int64_t tokens : {1, 29, 300}) {
      for (const MoeSizes& sizes : {odd, few, deep}) right = check(sizes, tokens) && right;
    }
    return check(one, 450) && right ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  if (count < 7) {
    std::fprintf(stderr, "usage: native_moe check | native_moe THREADS H I E K TOKENS...\n");
    return EXIT_FAILURE;
  }
  std::vector<std::int64_t> numbers;
  for (int i = 1; i < count; ++i) numbers.push_back(std::stoll(arguments[i]));
  const MoeSizes sizes{
      .num_experts = numbers[3], .hidden = numbers[1], .intermediate = numbers[2], .top_k = numbers[4]};
  measure(static_cast<int>(numbers[0]), sizes, {numbers.begin() + 5, numbers.end()});
  return EXIT_SUCCESS;
}
