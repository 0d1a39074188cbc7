// A few rows times panels of each format that come from memory: GB/s of packed weights beside a read of the same array.
//
//     g++ -std=c++20 -pthread -O3 -Iruntime/include -c runtime/src/interface.cpp -o interface.o
//     g++ -std=c++20 -pthread -ffp-contract=off -fno-ipa-pure-const -O3 -Iruntime/include -DKTC_UNIT=few_rows
//         -include ktc/isa/avx2.hpp -include ktc/isa/avx2_int8.hpp
//         -DKTC_ISA=avx2 -mavx2 -mfma -mf16c benchmarks/few_rows.cpp interface.o -o few_rows
//     with ktc/isa/avx512.hpp, avx512_int8.hpp:           -mavx512f -mavx512bw -mavx512vl -mavx512dq too
//     with ktc/isa/avx512_bf16.hpp, avx512_bf16_int8.hpp: -mavx512bf16 -mavx512vnni too
//     with ktc/isa/amx.hpp, amx_int8.hpp:                 -mamx-tile -mamx-bf16 -mamx-int8 too
//     ./few_rows huge|small [ROUNDS] [THREADS] [ROWS: 1 to 4] [FORMAT]...
//
// `huge`: the panels are on huge pages, or nothing is measured; `small`: on pages of 4 KB, as a system with little free
// memory in one piece gives them.
//
// CPU time of one thread, wall time of several, which take panels of 1 MB together. Products and two reads of as many
// bytes take turns: a plain sum, and one that fetches lines into L2. The share is the median of the rounds' ratios to
// the faster one. Panels that stay in L2 show the speed where memory does not limit it.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ktc/code_products.hpp"
#include "ktc/huge_pages.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/machine_peak.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/team.hpp"
#include "ktc/weight_format/dense.hpp"
#include "ktc/weight_format/int8.hpp"
#include "ktc/weight_format/mxfp4.hpp"
#include "ktc/weight_format/q4_0.hpp"
#include "ktc/weight_format/q4_k.hpp"
#include "ktc/weight_format/q5_k.hpp"
#include "ktc/weight_format/q6_k.hpp"
#include "ktc/weight_format/q8_0.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace {

using namespace ktc;
using namespace ktc::weight_format;
using Isa = ktc::KTC_ISA::Isa;
constexpr std::int64_t kContraction = 2048;
constexpr std::int64_t kBytes = 1 << 30;
constexpr std::int64_t kBytesOfThread = 32 << 20;  // of a measurement; the next one reads those that follow
constexpr std::int64_t kTaken = 1 << 20;
constexpr std::int64_t kInCache = 256 << 10;
constexpr int kMostRows = 4;

double now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Rows of normal values, and what a thread multiplies them with.
template <class Panel>
class Rows {
 public:
  explicit Rows(int rows) : rows_(rows), scratch_(kContraction * kPanelWidth * sizeof(bf16)) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (bf16& value : values_) value = bf16(normal(random));
    for (std::uint8_t& code : codes_) code = static_cast<std::uint8_t>(random());
    if constexpr (Products::kConverts) Products::convert(rows_, kContraction, values_, scratch_.data());
  }

  void multiply(const std::byte* panel) {
    if constexpr (std::is_same_v<Panel, Bf16Panel>) {
      FetchAhead<Isa> ahead;
      isa_.multiply(rows_, kContraction / 2, values_, reinterpret_cast<const bf16*>(panel), tile_, ahead);
    } else if constexpr (std::is_same_v<Panel, Int8Panel>) {
      FetchAhead<IntegerIsaOf<Isa>> ahead;
      const auto* codes = reinterpret_cast<const std::int8_t*>(panel + Panel::codes_at(0));
      integers_.multiply(rows_, kContraction / 4, codes_, codes, sums_, ahead);
    } else {
      Products::multiply(rows_, kContraction, values_, scratch_.data(), {panel, panel + Panel::bytes(kContraction)},
                         tile_);
    }
  }

 private:
  using Products = CodeProducts<Isa, Panel>;

  int rows_;
  alignas(64) bf16 values_[kMostRows * kContraction];
  alignas(64) std::uint8_t codes_[kMostRows * kContraction];
  alignas(64) float tile_[Isa::kMaxRows * kPanelWidth];
  alignas(64) std::int32_t sums_[IntegerIsaOf<Isa>::kMaxRows * kPanelWidth];
  HugePages scratch_;
  Isa isa_;
  IntegerIsaOf<Isa> integers_;
};

std::uint64_t read_by_lines(const std::byte* data, std::size_t bytes) {
  constexpr std::size_t kPiece = 512;
  std::uint64_t total = 0;
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    FetchedLines<2>::fetch<kPiece>(data + at);
    total += read_in_order(data + at, kPiece);
  }
  return total;
}

// The memory of all panels, and threads that go through it.
class Machine {
 public:
  Machine(int threads, bool huge) : memory_(kBytes + kTaken), engine_(threads) {
    if (!huge) madvise(memory_.data(), memory_.size(), MADV_NOHUGEPAGE);
    std::mt19937 random(1);
    auto* const words = reinterpret_cast<std::uint32_t*>(memory_.data());
    // Scales of every format are finite, and products with them no denormals, which processors compute slowly.
    for (std::int64_t i = 0; i < (kBytes + kTaken) / 4; ++i) words[i] = (random() & 0xbf7fbf7fu) | 0x20402040u;
  }

  std::byte* data() const { return memory_.data(); }
  int threads() const { return engine_.threads(); }

  // GB/s where `take(thread, bytes)` reads whole items of `size` bytes.
  template <class Take>
  double speed(std::int64_t size, const Take& take) {
    const std::int64_t of_take = std::max<std::int64_t>(kTaken / size, 1);
    const std::int64_t takes = std::min(kBytesOfThread * threads(), kBytes / 2) / (of_take * size);
    const std::int64_t bytes = takes * of_take * size;
    if (at_ + bytes > kBytes) at_ = 0;
    const std::byte* from = memory_.data() + at_;
    at_ += bytes;
    std::atomic<std::int64_t> next{0};
    return 1e-9 * static_cast<double>(bytes) / seconds([&](const Worker& worker) {
             for (std::int64_t i = next.fetch_add(1); i < takes; i = next.fetch_add(1)) {
               take(worker.index, from + i * of_take * size, of_take);
             }
           });
  }

  template <class Body>
  double seconds(const Body& body) {
    double spent = 0;
    exclusively(engine_, [&](const Team& team, Workspace&) {
      const clockid_t clock = threads() == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
      const double begin = now(clock);
      team.run(body);
      spent = now(clock) - begin;
    });
    return spent;
  }

 private:
  HugePages memory_;
  Engine engine_;
  std::int64_t at_ = 0;
};

template <class Panel>
void measure(const char* name, int rounds, int rows, Machine& machine) {
  const std::int64_t size = Panel::bytes(kContraction);
  std::vector<std::unique_ptr<Rows<Panel>>> of_threads;
  for (int thread = 0; thread < machine.threads(); ++thread) of_threads.push_back(std::make_unique<Rows<Panel>>(rows));
  std::atomic<std::uint64_t> totals{0};  // what is read must be computed
  const auto read = [&](const auto& reader) {
    return machine.speed(kTaken, [&](int, const std::byte* from, std::int64_t) { totals += reader(from, kTaken); });
  };
  std::vector<double> product, plain, by_lines, share, cached;
  for (int round = -1; round < rounds; ++round) {
    const double of_sum = read(read_in_order), of_lines = read(read_by_lines);
    const double of_product = machine.speed(size, [&](int thread, const std::byte* from, std::int64_t panels) {
      for (std::int64_t panel = 0; panel < panels; ++panel) of_threads[thread]->multiply(from + panel * size);
    });
    const std::int64_t in_cache = std::max<std::int64_t>(kInCache / size, 1);
    const std::int64_t again = kBytesOfThread / size;
    const double spent = machine.seconds([&](const Worker& worker) {
      const std::byte* from = machine.data() + worker.index * kTaken;
      for (std::int64_t i = 0; i < again; ++i) of_threads[worker.index]->multiply(from + i % in_cache * size);
    });
    if (round < 0) continue;  // threads that start
    product.push_back(of_product);
    plain.push_back(of_sum);
    by_lines.push_back(of_lines);
    share.push_back(of_product / std::max(of_sum, of_lines));
    cached.push_back(1e-9 * static_cast<double>(again * size * machine.threads()) / spent);
  }
  std::printf("%-6s %5.1f GB/s of %5.1f, by lines %5.1f, share %.2f; in L2 %5.1f\n", name, median(product),
              median(plain), median(by_lines), median(share), median(cached));
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  const auto number = [&](int word, int otherwise) { return count > word ? std::atoi(words[word]) : otherwise; };
  const bool huge = count > 1 && std::string_view(words[1]) == "huge";
  const int rounds = number(2, 9), threads = number(3, 1), rows = std::clamp(number(4, 1), 1, kMostRows);
  Isa::require();
  Machine machine(threads, huge);
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1
  if (huge && madvise(machine.data(), kBytes, kCollapse) != 0) {
    std::perror("the system gives no huge pages");
    return 1;
  }
  const auto wanted = [&](std::string_view name) {
    return count < 6 || std::find(words + 5, words + count, name) != words + count;
  };
#define KTC_MEASURE(name, panel) \
  if (wanted(name)) measure<panel>(name, rounds, rows, machine)
  using Int4Panel = QuantisedPanel<Int4, 32>;
  KTC_MEASURE("bf16", Bf16Panel);
  KTC_MEASURE("int8", Int8Panel);
  KTC_MEASURE("int4", Int4Panel);
  KTC_MEASURE("q4_0", Q4_0Panel);
  KTC_MEASURE("q4_k", Q4_KPanel);
  KTC_MEASURE("q5_k", Q5_KPanel);
  KTC_MEASURE("q6_k", Q6_KPanel);
  KTC_MEASURE("q8_0", Q8_0Panel);
  KTC_MEASURE("mxfp4", MXFP4Panel);
}
