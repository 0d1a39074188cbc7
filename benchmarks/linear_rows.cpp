// Linear layers of few rows whose weights come from memory, in bf16: GB/s of weights for 1 to 8 rows, one thread.
//
//     g++ -std=c++20 -pthread -O3 -Iruntime/include -c runtime/src/interface.cpp -o interface.o
//     g++ -std=c++20 -pthread -ffp-contract=off -fno-ipa-pure-const -O3 -Iruntime/include -DKTC_UNIT=linear_rows
//         -include ktc/isa/avx2.hpp
//         -DKTC_ISA=avx2 -mavx2 -mfma -mf16c benchmarks/linear_rows.cpp interface.o -o linear_rows
//     with ktc/isa/avx512.hpp:      -mavx512f -mavx512bw -mavx512vl -mavx512dq too
//     with ktc/isa/avx512_bf16.hpp: -mavx512bf16 -mavx512vnni too
//     taskset -c 0 ./linear_rows huge|small [ROUNDS] [INPUTS]
//
// `huge`: the weights are on huge pages, or nothing is measured; `small`: on pages of 4 KB. Medians of CPU time. The
// headers of another checkout (-I) give its kernel: run both programs in turn.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>
#include <vector>

#include "ktc/huge_pages.hpp"
#include "ktc/linear.hpp"
#include "ktc/workspace.hpp"

namespace {

using namespace ktc;
constexpr std::int64_t kOutputs = 2048;
constexpr std::int64_t kBytes = 512 << 20;
constexpr std::int64_t kMostRows = 8;

double seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main(int count, char** words) {
  const bool huge = count > 1 && std::string_view(words[1]) == "huge";
  const int rounds = count > 2 ? std::atoi(words[2]) : 9;
  const std::int64_t inputs = count > 3 ? std::atoll(words[3]) : 2048;
  const std::int64_t size = kOutputs * inputs, matrices = kBytes / (size * 2);
  const HugePages memory(kBytes);
  if (!huge) madvise(memory.data(), kBytes, MADV_NOHUGEPAGE);
  auto* const weights = reinterpret_cast<bf16*>(memory.data());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < size; ++i) weights[i] = bf16(normal(random));
  for (std::int64_t i = 1; i < matrices; ++i) std::copy(weights, weights + size, weights + i * size);
  constexpr int kCollapse = 25;  // MADV_COLLAPSE of Linux 6.1
  if (huge && madvise(memory.data(), kBytes, kCollapse) != 0) {
    std::perror("the system gives no huge pages");
    return 1;
  }
  std::vector<bf16> x(kMostRows * inputs), out(kMostRows * kOutputs);
  for (bf16& value : x) value = bf16(normal(random));
  const Linear<ktc::KTC_ISA::Isa, bf16> kernel;
  Engine engine(1);
  for (std::int64_t rows = 1; rows <= kMostRows; ++rows) {
    std::vector<double> speeds;
    for (int round = 0; round <= rounds; ++round) {
      const double begin = seconds();
      for (std::int64_t i = 0; i < matrices; ++i) {
        kernel.forward(engine, {x.data(), weights + i * size, nullptr, out.data(), rows, inputs, kOutputs});
      }
      if (round > 0) speeds.push_back(1e-9 * static_cast<double>(matrices * size * 2) / (seconds() - begin));
    }
    std::sort(speeds.begin(), speeds.end());
    std::printf("%d rows %5.1f GB/s\n", static_cast<int>(rows), speeds[speeds.size() / 2]);
  }
}
