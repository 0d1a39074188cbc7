// Integer products with AVX2: bytes are widened to words, and VPMADDWD adds products of two words exactly. VPMADDUBSW,
// which adds products of bytes, saturates at 16 bits.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <utility>

#include "ktc/isa/avx2.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/shape.hpp"

namespace ktc::avx2 {

template <int kRows, class Ahead>
[[gnu::noinline]] void multiply_half_codes(std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                                           std::int32_t* tile, Ahead& next) {
  const __m256i lower_byte = _mm256_set1_epi16(0x00ff);
  Ahead ahead = next;
  __m256i low[kRows];
  __m256i high[kRows];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm256_setzero_si256();
  const auto* b = reinterpret_cast<const __m256i*>(panel);
  const auto* quads = reinterpret_cast<const Quad*>(a);
  for (std::int64_t step = 0; step < steps; ++step) {
    ahead.step();
    const __m256i b_low = _mm256_load_si256(b);
    const __m256i b_high = _mm256_load_si256(b + 1);
    const __m256i low_even = _mm256_srai_epi16(_mm256_slli_epi16(b_low, 8), 8);
    const __m256i low_odd = _mm256_srai_epi16(b_low, 8);
    const __m256i high_even = _mm256_srai_epi16(_mm256_slli_epi16(b_high, 8), 8);
    const __m256i high_odd = _mm256_srai_epi16(b_high, 8);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const __m256i x = _mm256_set1_epi32(quads[row]);
      const __m256i even = _mm256_and_si256(x, lower_byte);
      const __m256i odd = _mm256_srli_epi16(x, 8);
      low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(even, low_even));
      high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(even, high_even));
      low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(odd, low_odd));
      high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(odd, high_odd));
    }
    b += 4;
    quads += kRows;
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile + row * kPanelWidth), low[row]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(tile + row * kPanelWidth + 8), high[row]);
  }
  next = ahead;
}

class IntegerIsa {
 public:
  using Element = std::uint8_t;
  using Accumulator = std::int32_t;
  static constexpr int kMaxRows = avx2::kMaxRows;
  static constexpr int kStreamRows = 0;
  static constexpr bool kBlocked = false;

  Isa& elements() { return elements_; }

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` times four of k; tile and panel aligned.
  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                       std::int32_t* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const std::uint8_t*, const std::int8_t*, std::int32_t*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_half_codes<static_cast<int>(row) + 1, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    const Multiply multiply_16_lanes = kByRows[static_cast<std::size_t>(rows - 1)];
    multiply_16_lanes(steps, a, panel, tile, ahead);
    multiply_16_lanes(steps, a, panel + 4 * kHalfPanel, tile + kHalfPanel, ahead);
  }

  static constexpr std::int64_t steps_ahead(int, std::int64_t steps) { return 2 * steps; }

 private:
  Isa elements_;
};

}  // namespace ktc::avx2

namespace ktc {

template <>
struct IntegerIsa<avx2::Isa> {
  using type = avx2::IntegerIsa;
};

}  // namespace ktc
