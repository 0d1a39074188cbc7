// One row times panels of each format that come from memory: GB/s of packed weights beside the sum of the same array.
//
//     g++ -std=c++20 -ffp-contract=off -fno-ipa-pure-const -O3 -Iruntime/include -DKTC_UNIT=few_rows
//         -include ktc/isa/avx2.hpp
//         -DKTC_ISA=avx2 -mavx2 -mfma -mf16c benchmarks/few_rows.cpp -o few_rows
//     with ktc/isa/avx512.hpp:      -mavx512f -mavx512bw -mavx512vl -mavx512dq too
//     with ktc/isa/avx512_bf16.hpp: -mavx512bf16 -mavx512vnni too
//     taskset -c 0 ./few_rows huge|small [ROUNDS] [FORMAT]...
//
// `huge`: the panels are on huge pages, or nothing is measured; `small`: on pages of 4 KB, as a system with little free
// memory in one piece gives them.
//
// CPU time of this thread; product and sum alternate, and the share is the median of the rounds' ratios. An L2 full of
// panels shows the speed where memory does not limit it.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ktc/code_products.hpp"
#include "ktc/huge_pages.hpp"
#include "ktc/machine_peak.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/weight_format/dense.hpp"
#include "ktc/weight_format/mxfp4.hpp"
#include "ktc/weight_format/q4_0.hpp"
#include "ktc/weight_format/q4_1.hpp"
#include "ktc/weight_format/q4_k.hpp"
#include "ktc/weight_format/q5_k.hpp"
#include "ktc/weight_format/q6_k.hpp"
#include "ktc/weight_format/q8_0.hpp"
#include "ktc/weight_format/quantised.hpp"
#include "ktc/workspace.hpp"

namespace {

using namespace ktc;
using namespace ktc::weight_format;
using Isa = ktc::KTC_ISA::Isa;
constexpr std::int64_t kContraction = 2048;
constexpr std::int64_t kBytes = 160 << 20;
constexpr std::int64_t kInCache = 4;  // panels

double seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// One row of normal values, and what its products need.
template <class Panel>
class Row {
 public:
  explicit Row(const HugePages& memory) : scratch_(reinterpret_cast<bf16*>(memory.data())) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (bf16& value : row_) value = bf16(normal(random));
  }

  // The time of a row with each of `panels` panels from `first` on.
  double multiply(const std::byte* first, std::int64_t panels) {
    const double begin = seconds();
    for (std::int64_t panel = 0; panel < panels; ++panel) one(first + panel * Panel::bytes(kContraction));
    return seconds() - begin;
  }

 private:
  void one(const std::byte* panel) {
    if constexpr (std::is_same_v<Panel, Bf16Panel>) {
      FetchAhead<Isa> ahead;
      Isa::multiply(1, kContraction / 2, row_, reinterpret_cast<const bf16*>(panel), tile_, ahead);
    } else {
      products_.multiply(1, kContraction, row_, panel, tile_, scratch_);
    }
  }

  alignas(64) bf16 row_[kContraction];
  alignas(64) float tile_[Isa::kMaxRows * kPanelWidth];
  bf16* scratch_;
  CodeProducts<Isa, Panel> products_;
};

template <class Panel>
void measure(const char* name, int rounds, const HugePages& panels, const HugePages& scratch) {
  const std::int64_t count = kBytes / Panel::bytes(kContraction),
                     bytes = count * Panel::bytes(kContraction) / 512 * 512;
  Row<Panel> row(scratch);
  std::vector<double> product, sum, share, cached;
  row.multiply(panels.data(), count);
  for (int round = 0; round < rounds; ++round) {
    const double size = 1e-9 * static_cast<double>(bytes);
    product.push_back(size / row.multiply(panels.data(), count));
    const double begin = seconds();
    volatile std::uint64_t total = read_in_order(panels.data(), static_cast<std::size_t>(bytes));
    static_cast<void>(total);
    sum.push_back(size / (seconds() - begin));
    share.push_back(product.back() / sum.back());
    double spent = 0;
    for (std::int64_t time = 0; time < count / kInCache; ++time) spent += row.multiply(panels.data(), kInCache);
    cached.push_back(size / spent);
  }
  std::printf("%-6s %5.1f GB/s of %5.1f, share %.2f; in L2 %5.1f\n", name, median(product), median(sum), median(share),
              median(cached));
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  const bool huge = count > 1 && std::string_view(words[1]) == "huge";
  const int rounds = count > 2 ? std::atoi(words[2]) : 9;
  const HugePages panels(kBytes), scratch(kContraction * kPanelWidth * sizeof(bf16));
  if (!huge) madvise(panels.data(), kBytes, MADV_NOHUGEPAGE);
  std::mt19937 random(1);
  auto* const words_of_panels = reinterpret_cast<std::uint32_t*>(panels.data());
  // Scales of every format are finite, and products with them no denormals, which processors compute slowly.
  for (std::int64_t i = 0; i < kBytes / 4; ++i) words_of_panels[i] = (random() & 0xbf7fbf7fu) | 0x20402040u;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1
  if (huge && madvise(panels.data(), kBytes, kCollapse) != 0) {
    std::perror("the system gives no huge pages");
    return 1;
  }
  const auto wanted = [&](std::string_view name) {
    return count < 4 || std::find(words + 3, words + count, name) != words + count;
  };
#define KTC_MEASURE(name, panel) \
  if (wanted(name)) measure<panel>(name, rounds, panels, scratch)
  using Int4Panel = QuantisedPanel<Int4, 32>;
  KTC_MEASURE("bf16", Bf16Panel);
  KTC_MEASURE("int4", Int4Panel);
  KTC_MEASURE("q4_0", Q4_0Panel);
  KTC_MEASURE("q4_k", Q4_KPanel);
  KTC_MEASURE("q5_k", Q5_KPanel);
  KTC_MEASURE("q6_k", Q6_KPanel);
  KTC_MEASURE("q8_0", Q8_0Panel);
  KTC_MEASURE("mxfp4", MXFP4Panel);
}
