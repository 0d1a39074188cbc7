// Prefetches: what the next product reads, a few lines at each step of the current one, and what this one reads later.
#pragma once

#include <cpuid.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

inline constexpr std::int64_t kCacheLine = 64;

// How far ahead of their use codes are fetched by lines where few rows are multiplied with them. At 4 KB, as for bf16,
// q4_k read 28 GB/s of 37 on Zen 5: its scales, 512 bytes at a time, came too late.
inline constexpr std::int64_t kCodesAhead = 8192;

// Where a stream read in order enters a page of 4 KB, touch the last line of the next page, so that its address is
// known before it is read: the processor fetches lines ahead only within a page. `bytes` are read from `at` on before
// the next call. Without huge pages a Zen 4 read one row of bf16 weights at 25 GB/s so, and at 21 without. The line
// goes into L2. L1 is better without huge pages (29), but worse with them (28 instead of 31): the processor then takes
// it for another stream.
[[gnu::always_inline]] inline void translate_next_page(const std::byte* at, std::int64_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  if (address % kPage >= static_cast<std::uintptr_t>(bytes)) return;
  __builtin_prefetch(at + (2 * kPage - kCacheLine - address % kPage), 0, 1);
}

// How a product of few rows has its panel fetched, of which it reads `kBytes` at `at`: by the processor itself.
// `OfRows` is how one of kRows rows does.
struct FetchedPages {
  template <int kRows>
  using OfRows = FetchedPages;

  template <std::int64_t kBytes>
  [[gnu::always_inline]] static void fetch(const void* at) {
    translate_next_page(static_cast<const std::byte*>(at), kBytes);
  }
};

// The same line by line, `kAhead` bytes ahead, into the cache of `kLocality`.
template <int kLocality, std::int64_t kAhead = 4096>
struct FetchedLines {
  template <int kRows>
  using OfRows = FetchedLines;

  template <std::int64_t kBytes>
  [[gnu::always_inline]] static void fetch(const void* at) {
    const auto* ahead = static_cast<const std::byte*>(at) + kAhead;
#pragma GCC unroll 8
    for (std::int64_t line = 0; line < kBytes; line += kCacheLine) __builtin_prefetch(ahead + line, 0, kLocality);
  }
};

// Whether what is read in order is best fetched by lines into L2. Cores with AMX have 16 lines in flight to L1, and 48
// to L2. One row of a linear layer: 16 threads of a Xeon with AMX read 115 to 129 GB/s of weights by lines into L2, 110
// to 122 into L1, and 87 by the processor itself; a Zen 4 read 15 by lines from pages of 4 KB, and 25 without. Kernels
// of other instruction sets run on such a core too, so the processor is asked.
inline bool fetches_into_l2() {
  static const bool has_amx = [] {
    constexpr unsigned kAmxTile = 1u << 24;  // of EDX in leaf 7
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kAmxTile) != 0;
  }();
  return has_amx;
}

// Whether codes of few rows, and their scales, are best fetched by lines, kCodesAhead before their use. With a prefetch
// of each line one row of q8_0 on a Zen 4 reads 0.70 of what a sum reads, and 0.96 without. On a Zen 5 the scales
// between the codes disturb what the processor fetches: q4_k reads 0.50 without prefetches, and 0.99 with them.
inline bool fetches_codes_by_lines() {
  static const bool is_zen_5 = [] {
    constexpr unsigned kAmd = 0x68747541;  // "Auth" of AuthenticAMD
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != kAmd) return false;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
    const unsigned family = eax >> 8 & 0xfu, extended = eax >> 20 & 0xffu;
    return family + extended >= 0x1a;
  }();
  return is_zen_5 || fetches_into_l2();
}

// Fetches lines of codes, or of their scales, kCodesAhead before their use: the `kBytes` after `at`, into L2
// (`fetches_into_l2`) or into L1 alone. One row of q8_0 read 0.84 of what a sum reads on a Xeon with AMX by lines into
// L2, 0.53 into L1 alone, and 0.64 by the processor itself; of q4_k 0.80, 0.61 and 0.50.
template <std::int64_t kBytes>
[[gnu::always_inline]] inline void fetch_codes(const std::byte* at, bool into_l2) {
  if (into_l2) {
    FetchedLines<2, kCodesAhead>::fetch<kBytes>(at);
  } else {
    FetchedLines<0, kCodesAhead>::fetch<kBytes>(at);
  }
}

// A panel of codes, and the one that is read after it. Near the end of the panel the beginning of the other is fetched
// ahead: another worker may have the panel that follows in memory.
struct CodedPanel {
  const std::byte* begin;
  const std::byte* next;

  // From `at`, of `bytes` of the panel, how far `fetch_codes` should count from to fetch what is read kCodesAhead
  // later.
  std::ptrdiff_t jump(const std::byte* at, std::int64_t bytes) const {
    return at + kCodesAhead < begin + bytes ? 0 : next - begin - bytes;
  }
};

// Prefetches the rows that an epilogue will read or add to, while the product before it is computed. Rows of different
// tokens are far apart, so no hardware prefetcher predicts them.
template <class T>
void prefetch_row(const T* row, std::int64_t size) {
  asm volatile("");  // GCC treats a function that only prefetches as one without effects and drops its calls
  const auto* begin = reinterpret_cast<const char*>(row);
  for (const char* line = begin; line < reinterpret_cast<const char*>(row + size); line += kCacheLine) {
    __builtin_prefetch(line, 0, 3);
  }
}

// The target of a fetched panel: L1 and L2, which was faster than L2 alone (0.87 to 0.90 of peak at 32 rows per
// expert). Tiles are read from L1 many times, and other data there would evict them.
template <class Kernel>
inline constexpr int kPanelLocality = Kernel::kBlocked ? 2 : 3;

// Fetches a stored panel, evenly over `calls` of `step`.
template <class Kernel>
class FetchAhead {
 public:
  FetchAhead() = default;
  FetchAhead(const void* panel, std::int64_t bytes, std::int64_t calls)
      : line_(static_cast<const char*>(panel)),
        lines_left_(bytes / kCacheLine),
        lines_per_step_((lines_left_ + calls - 1) / calls) {}

  [[gnu::always_inline]] void step() {
    const std::int64_t lines = std::min(lines_per_step_, lines_left_);
    lines_left_ -= lines;
    for (std::int64_t line = 0; line < lines; ++line, line_ += kCacheLine) {
      __builtin_prefetch(line_, 0, kPanelLocality<Kernel>);
    }
  }
  void finish() const {}  // a panel that was not fetched whole is only slower to read

 private:
  const char* line_ = nullptr;
  std::int64_t lines_left_ = 0;
  std::int64_t lines_per_step_ = 0;
};

}  // namespace ktc::inline KTC_UNIT
