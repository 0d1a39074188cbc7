// Integer products with AVX2: bytes are widened to words, and VPMADDWD adds products of two words exactly. VPMADDUBSW,
// which adds products of bytes, saturates at 16 bits.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <utility>

#include "ktc/concepts.hpp"
#include "ktc/isa/avx2.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx2::inline KTC_UNIT {

// Up to this many rows the panel is streamed ahead of use, and all of its outputs are multiplied in one pass.
inline constexpr int kCodeStreamRows = 1;

// Of each step, the first `kVectors` vectors of 8 outputs.
template <int kRows, int kVectors, class Ahead>
[[gnu::noinline]] void multiply_code_columns(std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                                             std::int32_t* tile, Ahead& next) {
  constexpr std::int64_t kStreamAhead = 4096;
  const __m256i lower_byte = _mm256_set1_epi16(0x00ff);
  Ahead ahead = next;
  __m256i sum[kVectors][kRows];
#pragma GCC unroll 4
  for (auto& of_vector : sum) {
#pragma GCC unroll 4
    for (__m256i& of_row : of_vector) of_row = _mm256_setzero_si256();
  }
  const auto* quads = reinterpret_cast<const Neighbours*>(a);
  for (std::int64_t step = 0; step < steps; ++step, quads += kRows, panel += 4 * kPanelWidth) {
    if constexpr (kRows <= kCodeStreamRows) {
#pragma GCC unroll 2
      for (int line = 0; line < 2; ++line) __builtin_prefetch(panel + kStreamAhead + line * kCacheLine, 0, 0);
    }
    ahead.step();
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(panel) + vector);
      const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
      const __m256i b_odd = _mm256_srai_epi16(b, 8);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = _mm256_set1_epi32(quads[row]);
        const __m256i even = _mm256_and_si256(x, lower_byte);
        const __m256i odd = _mm256_srli_epi16(x, 8);
        __m256i& to = sum[vector][row];
        to = _mm256_add_epi32(to, _mm256_madd_epi16(even, b_even));
        to = _mm256_add_epi32(to, _mm256_madd_epi16(odd, b_odd));
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int vector = 0; vector < kVectors; ++vector) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(tile + row * kPanelWidth) + vector, sum[vector][row]);
    }
  }
  next = ahead;
}

struct ByteKernel {
  using Element = std::uint8_t;
  using Weight = std::int8_t;
  using Accumulator = std::int32_t;
  static constexpr int kMaxRows = avx2::kMaxRows;
  static constexpr int kStreamRows = kCodeStreamRows;
  static constexpr bool kBlocked = false;

  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                       std::int32_t* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const std::uint8_t*, const std::int8_t*, std::int32_t*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_code_columns < static_cast<int>(row) + 1,
                                                  row < kCodeStreamRows ? 4 : 2, Ahead > ...};
    }(std::make_index_sequence<kMaxRows>{});
    const Multiply multiply_columns = kByRows[static_cast<std::size_t>(rows - 1)];
    multiply_columns(steps, a, panel, tile, ahead);
    if (rows > kStreamRows) multiply_columns(steps, a, panel + 4 * kHalfPanel, tile + kHalfPanel, ahead);
  }

  static constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
    return rows > kStreamRows ? 2 * steps : steps;
  }
};

using IntegerIsa = BesideElements<ByteKernel, Isa>;
static_assert(IntegerKernel<IntegerIsa>);

}  // namespace ktc::avx2::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct IntegerIsa<avx2::Isa> {
  using type = avx2::IntegerIsa;
};

}  // namespace ktc::inline KTC_UNIT
