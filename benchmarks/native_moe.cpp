// A kernel without Python: first checked against the scalar oracle in fp64, then timed on the given numbers of threads.
//
//     g++ -std=c++20 -pthread -O3 -Iruntime/include -c runtime/src/interface.cpp -o interface.o
//     g++ -std=c++20 -ffp-contract=off -O3 -pthread -Iruntime/include -DKTC_UNIT=native_moe
//         -include ktc/isa/amx.hpp -DKTC_ISA=amx
//         -mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mavx512vnni
//         -mamx-tile -mamx-bf16 -mamx-int8 benchmarks/native_moe.cpp interface.o -o native_moe
//     for int8 with -include ktc/isa/amx_int8.hpp -DKTC_PANEL=Int8Panel
//     native_moe check | native_moe THREADS,.. H I E K TOKENS,..
//
// Timed are calls on memory that earlier calls have touched. Each phase between two barriers is reported beside the
// most that the machine reaches in the same run.
//
// Without bf16 products the peak uses a separate multiply and add, so measure it with `ktc bench moe`.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "ktc/activation.hpp"
#include "ktc/fused_moe.hpp"
#include "ktc/huge_pages.hpp"
#include "ktc/isa/scalar.hpp"
#include "ktc/machine_peak.hpp"
#include "ktc/weight_format/dense.hpp"
#include "ktc/weight_format/int8.hpp"
#include "ktc/weight_format/packed.hpp"

#ifndef KTC_PANEL
#define KTC_PANEL Bf16Panel
#endif

namespace {

using namespace ktc;
using weight_format::Part;
using Isa = ktc::KTC_ISA::Isa;
using Clock = std::chrono::steady_clock;

struct Constants {
  static constexpr double kAlpha = 1;
  static constexpr double kLimit = std::numeric_limits<double>::infinity();
  static constexpr double kGateCap = kLimit;
  static constexpr double kUpCap = kLimit;
  static constexpr double kUpOffset = 0;
};
using Activation = Gated<Silu, Constants>;
using Shape = MoeShape<kDynamic, kDynamic, kDynamic, kDynamic>;
using Panel = weight_format::KTC_PANEL;
using Kernel = FusedMoe<Isa, weight_format::Packed<Panel>, Activation, false, Shape>;
using Oracle = FusedMoe<scalar::Isa<double>, weight_format::Packed<weight_format::Fp64Panel>, Activation, false, Shape>;
constexpr bool kIntegerProducts =
    MoeLayer<Isa, weight_format::Packed<Panel>, Activation, false, Shape>::kIntegerProducts;
template <class IsaType, bool kIntegers>
struct ProductsOf {
  using type = IsaType;
};
template <class IsaType>
struct ProductsOf<IsaType, true> {
  using type = IntegerIsaOf<IsaType>;
};
using Products = typename ProductsOf<Isa, kIntegerProducts>::type;  // what multiplies in forward

// Random hidden states, gradients and routing of some tokens, as bf16 and as the same values in fp64.
struct Batch {
  Batch(const MoeSizes& sizes, std::int64_t tokens, std::mt19937& random) : tokens(tokens) {
    std::uniform_real_distribution<float> values(-2, 2);
    for (auto* states : {&hidden, &grad}) {
      for (std::int64_t i = 0; i < tokens * sizes.hidden; ++i) states->emplace_back(values(random));
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
                                  bool recompute) {
  const auto hidden = converted<Element>(batch.hidden), grad = converted<Element>(batch.grad);
  const auto weight = converted<Accumulator>(batch.weight);
  Results<Element, Accumulator> results{std::vector<Element>(hidden.size()), std::vector<Element>(hidden.size()),
                                        std::vector<Accumulator>(weight.size())};
  const HugePages saved(kernel.saved_bytes(batch.tokens));
  kernel.forward(engine, {packed, hidden.data(), batch.index.data(), weight.data(), results.out.data(),
                          recompute ? nullptr : saved.data(), batch.tokens});
  kernel.backward(engine, {packed, batch.index.data(), weight.data(), recompute ? nullptr : saved.data(), hidden.data(),
                           grad.data(), results.grad_hidden.data(), results.grad_weight.data(), batch.tokens});
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

// Whether the kernel agrees with the oracle, and gives the same bits in every way of running.
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
      kernel.pack({packed.data(), expert, part, rows, columns}, matrix.data(), SourceType::kBf16);
      oracle.pack({exact.data(), expert, part, rows, columns}, matrix.data(), SourceType::kBf16);
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
  const bool near = out <= 3e-3 && grad <= 4e-3 && weight <= 5e-3;
  // Products of integers against the oracle of fp64 weights. Their error against their emulation matters more:
  // tests/experts/test_w8a8.py bounds it.
  const bool right = same && (near || (kIntegerProducts && std::max({out, grad, weight}) <= 3.5e-2));
  std::printf("H%ld I%ld E%ld k%ld T%ld: output %.1e, d hidden %.1e, d weights %.1e, %s bits: %s\n", sizes.hidden,
              sizes.intermediate, sizes.num_experts, sizes.top_k, tokens, out, grad, weight, same ? "same" : "OTHER",
              right ? "right" : "WRONG");
  return right;
}

// Runs `work(thread)` on every thread at once; returns the seconds from the first start to the last end.
template <class Work>
double on_all(int threads, const Work& work) {
  std::vector<std::thread> team;
  std::atomic<int> ready{0};
  std::vector<Clock::time_point> begin(static_cast<std::size_t>(threads)), end(begin);
  for (int thread = 0; thread < threads; ++thread) {
    team.emplace_back([&, thread] {
      for (++ready; ready.load() < threads;) relax();
      begin[thread] = Clock::now();
      work(thread);
      end[thread] = Clock::now();
    });
  }
  for (auto& member : team) member.join();
  const auto first = *std::min_element(begin.begin(), begin.end()), last = *std::max_element(end.begin(), end.end());
  return std::chrono::duration<double>(last - first).count();
}

// Since the start of the machine: ticks that its host gave to other guests while this one was ready to run, and all
// ticks.
struct Ticks {
  double stolen = 0, all = 0;

  static Ticks now() {
    Ticks ticks;
    std::ifstream file("/proc/stat");
    std::string cpu;
    file >> cpu;
    double value = 0;
    for (int column = 0; column < 8 && file >> value; ++column) {
      ticks.all += value;
      if (column == 7) ticks.stolen = value;
    }
    return ticks;
  }
};

void print_machine() {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof(allowed), &allowed);
  std::string limit = "none";
  std::getline(std::ifstream("/sys/fs/cgroup/cpu.max"), limit);
  std::printf("%d cores may be used; cpu.max: %s\n", CPU_COUNT(&allowed), limit.c_str());
}

// TFLOP/s of one thread's products from its caches: the micro-kernel repeated over `panels` x `groups`.
template <class MicroKernel>
double multiply_in_cache(std::int64_t panels, std::int64_t groups, std::int64_t contraction, std::int64_t rounds) {
  using Element = typename MicroKernel::Element;
  using Weight = std::conditional_t<kIntegerProducts, std::int8_t, Element>;
  constexpr std::int64_t kRows = MicroKernel::kMaxRows;
  constexpr std::int64_t kDepth = ElementTraits<Element>::kDepth;
  const std::int64_t operands =
      (panels * 32 + groups * kRows) * contraction * static_cast<std::int64_t>(sizeof(Element));
  const HugePages memory(static_cast<std::size_t>(operands + panels * groups * kRows * kPanelWidth * 4));
  std::memset(memory.data(), 0x3c, static_cast<std::size_t>(operands));
  const auto* rows = reinterpret_cast<const Element*>(memory.data());
  const auto* weights = reinterpret_cast<const Weight*>(rows + groups * kRows * contraction);
  auto* sums = reinterpret_cast<typename MicroKernel::Accumulator*>(memory.data() + operands);
  MicroKernel isa;
  FetchAhead<MicroKernel> nothing;
  const auto begin = Clock::now();
  for (std::int64_t i = 0; i < rounds * panels * groups; ++i) {
    const std::int64_t panel = i / groups % panels, group = i % groups;
    const auto* a = rows + group * kRows * contraction;
    auto* tile = sums + (panel * groups + group) * kRows * kPanelWidth;
    if constexpr (MicroKernel::kBlocked) {
      isa.multiply_add(kRows, contraction / kDepth, a, weights + panel * 32 * contraction, tile, nothing);
    } else {
      isa.multiply(kRows, contraction / kDepth, a, weights + panel * 32 * contraction, tile, nothing);
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return 2e-12 * static_cast<double>(rounds * panels * groups * kRows * kPanelWidth * contraction) / seconds;
}

// The most that `threads` reach together: products of registers, of L1, of L2, and one read of the packed weights.
void print_limits(int threads, const HugePages& packed) {
  std::vector<double> rate(static_cast<std::size_t>(threads));
  const auto total = [&](const auto& work) {
    on_all(threads, [&](int thread) { rate[thread] = work(); });
    return std::accumulate(rate.begin(), rate.end(), 0.0);
  };
  constexpr std::int64_t kPeakRounds = 500'000;
  std::vector<std::int64_t> flops(static_cast<std::size_t>(threads));
  const double peak_s = on_all(threads, [&](int thread) { flops[thread] = multiply_in_registers(kPeakRounds); });
  const double near = total([] { return multiply_in_cache<Products>(1, 1, 256, 8000); });
  const double far = total([] { return multiply_in_cache<Products>(8, 8, 512, 60); });
  const std::size_t share =
      std::min(packed.size(), std::size_t{8} << 30) / static_cast<std::size_t>(threads) / 512 * 512;
  std::vector<std::uint64_t> read(static_cast<std::size_t>(threads));
  const double read_s = on_all(threads, [&](int thread) {
    read[thread] = read_in_order(packed.data() + share * static_cast<std::size_t>(thread), share);
  });
  std::printf(
      "%d threads at most: registers %.1f TFLOP/s of bf16, micro-kernel in L1 %.1f, in L2 %.1f; read %.0f GB/s\n",
      threads, 1e-12 * static_cast<double>(std::accumulate(flops.begin(), flops.end(), std::int64_t{0})) / peak_s, near,
      far, 1e-9 * static_cast<double>(share * static_cast<std::size_t>(threads)) / read_s);
}

// When each worker started and finished each phase of one call.
class PhaseClock final : public PhaseObserver {
 public:
  void started() override { times().push_back(Clock::now()); }
  void finished() override { times().push_back(Clock::now()); }

  void clear() {
    for (auto& times : workers_) times->clear();
  }

  // For each phase: the mean and longest time of its work over the workers, and their average wait.
  std::string summary(std::initializer_list<const char*> names) const {
    std::string text;
    std::size_t at = 0;
    for (const char* name : names) {
      double sum = 0, longest = 0, count = 0;
      auto first = Clock::time_point::max(), last = Clock::time_point::min();
      for (const auto& times : workers_) {
        if (times->size() < at + 2) continue;
        const double ms = std::chrono::duration<double, std::milli>((*times)[at + 1] - (*times)[at]).count();
        sum += ms, longest = std::max(longest, ms), ++count;
        first = std::min(first, (*times)[at]), last = std::max(last, (*times)[at + 1]);
      }
      const double all = std::chrono::duration<double, std::milli>(last - first).count();
      char line[160];
      std::snprintf(line, sizeof(line), "  %s %.2f (work %.2f to %.2f)", name, all, sum / count, longest);
      text += line;
      at += 2;
    }
    return text;
  }

 private:
  using Times = std::vector<Clock::time_point>;

  Times& times() {
    thread_local Times* own = nullptr;
    if (own == nullptr) {
      const std::lock_guard lock(adding_);
      own = workers_.emplace_back(std::make_unique<Times>()).get();
    }
    return *own;
  }

  std::mutex adding_;
  std::vector<std::unique_ptr<Times>> workers_;
};

struct Timed {
  double ms;
  std::string phases;
};

template <class Call>
Timed timed(PhaseClock& phases, std::initializer_list<const char*> names, const Call& call) {
  phases.clear();
  const auto begin = Clock::now();
  call();
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  return {ms, phases.summary(names)};
}

void print_times(const char* name, std::vector<Timed> times, double tflop, double gbytes) {
  const double first = times.front().ms;  // touches memory that no call had before
  times.erase(times.begin());
  std::sort(times.begin(), times.end(), [](const Timed& a, const Timed& b) { return a.ms < b.ms; });
  const Timed& median = times[times.size() / 2];
  std::printf("  %s %.2f ms (best %.2f, first %.2f), %.2f TFLOP/s, %.0f GB/s\n   %s\n", name, median.ms,
              times.front().ms, first, 1e3 * tflop / median.ms, 1e3 * gbytes / median.ms, median.phases.c_str());
}

// Forward and backward of `tokens`, on the packed weights of a layer.
void measure(const MoeKernel& kernel, const MoeSizes& sizes, const HugePages& packed, PhaseClock& phases, int threads,
             std::int64_t tokens) {
  constexpr int kRounds = 7;
  std::mt19937 random(1);
  const std::int64_t slots = tokens * sizes.top_k;
  const int num_batches = slots < 2 * sizes.num_experts ? 8 : 1;  // otherwise the few experts would stay in L3
  std::vector<Batch> batches;
  double active = 0;
  for (int i = 0; i < num_batches; ++i) {
    batches.emplace_back(sizes, tokens, random);
    std::vector<std::int64_t> experts = batches.back().index;
    std::sort(experts.begin(), experts.end());
    active += static_cast<double>(std::unique(experts.begin(), experts.end()) - experts.begin()) / num_batches;
  }
  std::vector<bf16> out(batches[0].hidden.size()), grad_hidden(out.size());
  std::vector<float> grad_weight(static_cast<std::size_t>(slots));
  const HugePages saved(kernel.saved_bytes(tokens));
  Engine engine(threads);
  std::vector<Timed> forward, backward;
  const Ticks before = Ticks::now();
  for (int round = 0; round <= std::max(kRounds, num_batches); ++round) {
    const Batch& batch = batches[static_cast<std::size_t>(round % num_batches)];
    const auto call = [&] {
      kernel.forward(engine, {packed.data(), batch.hidden.data(), batch.index.data(), batch.weight.data(), out.data(),
                              saved.data(), tokens});
    };
    forward.push_back(kIntegerProducts
                          ? timed(phases, {"quantise", "gather", "gate/up", "quantise", "down", "write"}, call)
                          : timed(phases, {"gather", "gate/up", "down", "write"}, call));
    backward.push_back(timed(phases, {"gather", "down^T", "gate/up^T", "write"}, [&] {
      kernel.backward(engine, {packed.data(), batch.index.data(), batch.weight.data(), saved.data(),
                               batch.hidden.data(), batch.grad.data(), grad_hidden.data(), grad_weight.data(), tokens});
    }));
  }
  const Ticks after = Ticks::now();
  const double gbytes =
      1e-9 * active * static_cast<double>(kernel.packed_bytes()) / static_cast<double>(sizes.num_experts);
  const double tflop = 6e-12 * static_cast<double>(slots * sizes.hidden * sizes.intermediate);
  std::printf(" T%ld, %d threads, stolen %.1f %%\n", tokens, threads,
              100 * (after.stolen - before.stolen) / std::max(1.0, after.all - before.all));
  print_times("forward ", std::move(forward), tflop, gbytes);
  print_times("backward", std::move(backward), tflop, gbytes);
  std::fflush(stdout);
}

void measure_layer(const std::vector<std::int64_t>& threads, const MoeSizes& sizes,
                   const std::vector<std::int64_t>& tokens) {
  const Kernel kernel(sizes);
  const HugePages packed(kernel.packed_bytes());
  const auto most = static_cast<int>(*std::max_element(threads.begin(), threads.end()));
  const std::size_t share = kernel.packed_bytes() / static_cast<std::size_t>(most) / 512 * 512;
  on_all(most, [&](int thread) {  // any values of a usual size: only their place matters
    auto* weights = reinterpret_cast<std::uint16_t*>(packed.data() + share * static_cast<std::size_t>(thread));
    for (std::size_t i = 0; i < share / 2; ++i) weights[i] = static_cast<std::uint16_t>(0x3c00 | (i * 40503 & 0x80ff));
  });
  std::printf("H%ld I%ld E%ld k%ld\n", sizes.hidden, sizes.intermediate, sizes.num_experts, sizes.top_k);
  PhaseClock phases;
  phase_observer = &phases;
  for (const std::int64_t count : tokens) {
    for (const std::int64_t number : threads) {
      print_limits(static_cast<int>(number), packed);
      measure(kernel, sizes, packed, phases, static_cast<int>(number), count);
    }
  }
}

std::vector<std::int64_t> numbers(const std::string& list) {
  std::vector<std::int64_t> result;
  std::istringstream stream(list);
  for (std::string number; std::getline(stream, number, ',');) result.push_back(std::stoll(number));
  return result;
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
  if (count != 7) {
    std::fprintf(stderr, "usage: native_moe check | native_moe THREADS,.. H I E K TOKENS,..\n");
    return EXIT_FAILURE;
  }
  print_machine();
  const MoeSizes sizes{.num_experts = std::stoll(arguments[4]),
                       .hidden = std::stoll(arguments[2]),
                       .intermediate = std::stoll(arguments[3]),
                       .top_k = std::stoll(arguments[5])};
  measure_layer(numbers(arguments[1]), sizes, numbers(arguments[6]));
  return EXIT_SUCCESS;
}
