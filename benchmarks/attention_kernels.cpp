// Kernels of decode attention alone, as a native step calls them: one layer, one new token, keys and values from
// memory, after calls over 16 positions. Wall time, GB/s, and the share of what the same threads read in the same
// rounds.
//
//     g++ -std=c++20 -pthread -O3 -Iruntime/include -c runtime/src/interface.cpp -o interface.o
//     g++ -std=c++20 -pthread -ffp-contract=off -fno-ipa-pure-const -O3 -Iruntime/include -DKTC_UNIT=attention_kernels
//         -include ktc/isa/avx2.hpp
//         -include ktc/isa/avx2_cache_codes.hpp -DKTC_ISA=avx2 -mavx2 -mfma -mf16c
//         benchmarks/attention_kernels.cpp interface.o -o attention_kernels
//     with avx512.hpp and avx512_cache_codes.hpp:            -mavx512f -mavx512bw -mavx512vl -mavx512dq too
//     with avx512_bf16.hpp and avx512_bf16_cache_codes.hpp:  -mavx512bf16 -mavx512vnni too
//     with amx_attention.hpp after them (-DKTC_ISA=avx512_bf16): -mamx-tile -mamx-bf16 too
//     ./attention_kernels [POSITIONS] [THREADS] [ROUNDS]
//
// Grouped-query attention has 32 query and 8 key heads of 128, over bf16, over int8 codes, and in pages in a random
// order; latent attention has V2-Lite's 16 heads and V3's 128. The headers of another checkout (-I) give its kernels:
// run both programs in turn.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ktc/decode_attention.hpp"
#include "ktc/huge_pages.hpp"
#include "ktc/int8_attention.hpp"
#include "ktc/team.hpp"
#include "ktc/workspace.hpp"

namespace {

using namespace ktc;
using Isa = ktc::KTC_ISA::Isa;
#ifdef __AMX_TILE__
using Dense = ktc::amx::Attention;
#else
using Dense = DecodeAttention<Isa, bf16>;
#endif

constexpr std::int64_t kKeyHeads = 8, kGroup = 4, kWidth = 128, kLatentHeads = 16, kManyHeads = 128, kLatent = 512,
                       kRope = 64;
constexpr std::int64_t kCold = std::int64_t{2} << 30;

double seconds(const std::function<void()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> numbers) {
  std::sort(numbers.begin(), numbers.end());
  return numbers[numbers.size() / 2];
}

template <class Element, class Make>
Element* filled(const HugePages& memory, std::int64_t count, const Make& make) {
  auto* numbers = reinterpret_cast<Element*>(memory.data());
  std::mt19937 random(1);
  const std::int64_t drawn = std::min<std::int64_t>(count, 1 << 20);
  for (std::int64_t i = 0; i < drawn; ++i) numbers[i] = make(random);
  for (std::int64_t i = drawn; i < count; ++i) numbers[i] = numbers[i - drawn];
  return numbers;
}

// Reads with all threads, each a contiguous part.
class ColdMemory {
 public:
  ColdMemory() : memory_(kCold) { std::fill_n(memory_.data(), kCold, std::byte{1}); }

  void read(Engine& engine) {
    exclusively(engine, [&](const Team& team, Workspace&) {
      team.run([&](const Worker& worker) {
        using Lanes = std::uint64_t __attribute__((vector_size(64)));
        const auto* from = reinterpret_cast<const Lanes*>(memory_.data());
        const std::int64_t count = kCold / 64, begin = count * worker.index / worker.count;
        const std::int64_t end = count * (worker.index + 1) / worker.count;
        Lanes sums[4] = {};
        for (std::int64_t i = begin; i + 4 <= end; i += 4) {
          for (int each = 0; each < 4; ++each) sums[each] += from[i + each];
        }
        const Lanes all = sums[0] + sums[1] + sums[2] + sums[3];
        sink_.fetch_add(all[0], std::memory_order_relaxed);
      });
    });
  }

 private:
  HugePages memory_;
  std::atomic<std::uint64_t> sink_{0};
};

struct Candidate {
  std::string name;
  const AttentionKernel& kernel;
  AttentionArguments arguments;
  std::int64_t bytes;
  AttentionArguments first{};
  std::vector<double> times{};
};

}  // namespace

int main(int count, char** words) {
  const std::int64_t positions = count > 1 ? std::atoll(words[1]) : 4096;
  const int threads = count > 2 ? std::atoi(words[2]) : 1, rounds = count > 3 ? std::atoi(words[3]) : 11;
  if (positions < 1 || threads < 1 || rounds < 1) {
    std::fputs("POSITIONS, THREADS and ROUNDS are at least 1\n", stderr);
    return 2;
  }
  std::normal_distribution<float> normal;
  const auto number = [&](std::mt19937& random) { return bf16(normal(random)); };
  const auto code = [](std::mt19937& random) { return static_cast<std::int8_t>(random() % 255 - 127); };

  const std::int64_t whole = (positions + kPagePositions - 1) / kPagePositions * kPagePositions;
  const std::int64_t numbers = kKeyHeads * whole * kWidth;
  const HugePages of_keys(numbers * 2), of_values(numbers * 2), of_key_codes(numbers), of_value_codes(numbers);
  const HugePages of_latents(whole * kLatent * 2), of_ropes(whole * kRope * 2);
  const bf16* const keys = filled<bf16>(of_keys, numbers, number);
  const bf16* const values = filled<bf16>(of_values, numbers, number);
  const std::int8_t* const key_codes = filled<std::int8_t>(of_key_codes, numbers, code);
  const std::int8_t* const value_codes = filled<std::int8_t>(of_value_codes, numbers, code);
  const bf16* const latents = filled<bf16>(of_latents, whole * kLatent, number);
  const bf16* const ropes = filled<bf16>(of_ropes, whole * kRope, number);
  const std::vector<float> scales(static_cast<std::size_t>(kKeyHeads * whole), 0.02f);

  std::mt19937 random(2);
  std::vector<bf16> query(kManyHeads * (kLatent + kRope)), out(kManyHeads * kLatent);
  for (bf16& each : query) each = number(random);
  std::vector<std::int32_t> pages(static_cast<std::size_t>(whole / kPagePositions));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  const std::int64_t length = positions, few = 16;

  const auto view = [&](const void* data, const float* factors) {
    return CacheView{.data = data,
                     .batch = kKeyHeads * whole * kWidth,
                     .head = whole * kWidth,
                     .position = kWidth,
                     .width = kWidth,
                     .scales = factors,
                     .scale_batch = kKeyHeads * whole,
                     .scale_head = whole,
                     .scale_position = 1};
  };
  AttentionArguments grouped{.query = query.data(), .keys = view(keys, nullptr), .values = view(values, nullptr)};
  grouped.out = out.data();
  grouped.batch = 1;
  grouped.key_heads = kKeyHeads;
  grouped.group = kGroup;
  grouped.tokens = 1;
  grouped.positions = positions;
  grouped.scale = 0.08f;

  AttentionArguments coded = grouped;
  coded.keys = view(key_codes, scales.data());
  coded.values = view(value_codes, scales.data());

  const auto in_pages = [&](AttentionArguments arguments) {
    for (CacheView* each : {&arguments.keys, &arguments.values}) {
      each->batch = kKeyHeads * kPagePositions * kWidth;
      each->head = kPagePositions * kWidth;
      each->scale_batch = kKeyHeads * kPagePositions;
      each->scale_head = kPagePositions;
    }
    arguments.lengths = &length;
    arguments.pages = pages.data();
    arguments.pages_of_sequence = static_cast<std::int64_t>(pages.size());
    return arguments;
  };

  AttentionArguments latent = grouped;
  latent.keys = {.data = latents, .batch = whole * kLatent, .position = kLatent, .width = kLatent};
  latent.rope_keys = {.data = ropes, .batch = whole * kRope, .position = kRope, .width = kRope};
  latent.values = latent.keys;
  latent.key_heads = 1;
  latent.group = kLatentHeads;
  AttentionArguments many_heads = latent;
  many_heads.group = kManyHeads;

  const Dense dense;
  const Int8Attention<Isa, bf16> int8;
  const std::int64_t of_numbers = kKeyHeads * positions * kWidth * 4,
                     of_codes = kKeyHeads * positions * (kWidth * 2 + 8);
  std::vector<Candidate> candidates{
      {"GQA", dense, grouped, of_numbers},
      {"GQA in pages", dense, in_pages(grouped), of_numbers},
      {"GQA int8", int8, coded, of_codes},
      {"GQA int8 in pages", int8, in_pages(coded), of_codes},
      {"MLA", dense, latent, positions * (kLatent + kRope) * 2},
      {"MLA, 128 heads", dense, many_heads, positions * (kLatent + kRope) * 2},
  };
  for (Candidate& each : candidates) {
    each.first = each.arguments;
    each.first.positions = 16;
    if (each.first.lengths != nullptr) each.first.lengths = &few;
  }
  Engine engine(threads);
  ColdMemory cold;
  std::vector<double> reads;
  for (int round = 0; round <= rounds; ++round) {
    for (Candidate& each : candidates) {
      const double read = seconds([&] { cold.read(engine); });
      for (int call = 0; call < 20; ++call) each.kernel.forward(engine, each.first);  // wakes the threads
      const double time = seconds([&] { each.kernel.forward(engine, each.arguments); });
      if (round == 0) continue;
      reads.push_back(read);
      each.times.push_back(time);
    }
  }
  const double read = static_cast<double>(kCold) / median(reads);
  std::printf("%lld positions, %d threads, read %.1f GB/s\n", static_cast<long long>(positions), threads, read * 1e-9);
  for (const Candidate& each : candidates) {
    const double time = median(each.times), speed = static_cast<double>(each.bytes) / time;
    std::printf("%-18s %7.3f ms %6.1f GB/s %5.2f of read\n", each.name.c_str(), time * 1e3, speed * 1e-9, speed / read);
  }
}
