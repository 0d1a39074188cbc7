// A few rows multiplied with codes as they are stored, for ISAs with VDPBF16PS: memory limits an expert with this few
// tokens, and bf16 weights would be written and read again. Codes are exact in bf16; each group's sum is multiplied
// with its scale in fp32, which is one rounding less per weight.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// For this many rows, sums of a group, sums of all groups, the table and a broadcast value fit 32 registers.
inline constexpr int kMaxCodeRows = 6;

// Vector `vector` of a line as bf16 numbers. VPERMW reads five bits of an index: the table is repeated.
[[gnu::always_inline]] inline __m512bh bf16_numbers(Int4, __m512i line, int vector) {
  constexpr auto kTable = [] {
    std::array<std::uint16_t, 32> table{};
    for (int code = 0; code < 32; ++code) {
      const auto value = static_cast<float>(code % 16 - 8);
      table[static_cast<std::size_t>(code)] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
    }
    return table;
  }();
  alignas(64) static constexpr auto kAligned = kTable;
  const __m512i nibbles = _mm512_srli_epi16(line, static_cast<unsigned>(4 * vector));
  return std::bit_cast<__m512bh>(_mm512_permutexvar_epi16(nibbles, _mm512_load_si512(kAligned.data())));
}

// Half a line of 8-bit codes.
[[gnu::always_inline]] inline __m256i half_line(__m512i line, int vector) {
  return vector == 0 ? _mm512_castsi512_si256(line) : _mm512_extracti64x4_epi64(line, 1);
}
// As fp16 the codes are 2^-8 of their values. `Decoding::halves` has the same steps.
[[gnu::always_inline]] inline __m512bh bf16_numbers(Fp8, __m512i line, int vector) {
  const __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(half_line(line, vector)), 7);
  const __m512i halves = _mm512_and_si512(words, _mm512_set1_epi16(static_cast<short>(0xbf80)));
  const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
  const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
  return _mm512_cvtne2ps_pbh(high, low);
}
// The factor by which `bf16_numbers` are too small.
template <class Code>
inline constexpr float kNumberScale = std::is_same_v<Code, Fp8> ? kFp8AsHalf : 1.0f;

[[gnu::always_inline]] inline __m512 sixteen(const bf16* scales) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
[[gnu::always_inline]] inline __m512 sixteen(const float* scales) {
  return _mm512_loadu_ps(scales);
}

template <class Panel, int kRows>
[[gnu::noinline]] void multiply_codes_of(std::int64_t padded_k, const bf16* a, const std::byte* panel, float* tile) {
  using Code = typename Panel::Code;
  constexpr int kVectors = 16 / Code::kBits;  // of a line; two of them have the same pair of k
  constexpr int kPairs = kVectors / 2;
  constexpr int kSplit = kRows <= 2 ? kPairs : 1;  // few rows: with only one sum, each product would wait for the last
  __m512 total[2][kRows];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) total[0][row] = total[1][row] = _mm512_setzero_ps();

  const auto* pairs = reinterpret_cast<const avx512_bf16::Pair*>(a);
  const std::byte* const end = panel + Panel::bytes(padded_k);
  while (panel < end) {
    const auto* scales = reinterpret_cast<const typename Panel::Scale*>(panel);
    const std::byte* line = panel + Panel::kScaleBytes;
    panel = std::min(end, line + Panel::kGroupBlocks * Panel::kBlockBytes);
    __m512 sum[kSplit][2][kRows];
#pragma GCC unroll 4
    for (int split = 0; split < kSplit; ++split) {
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) sum[split][0][row] = sum[split][1][row] = _mm512_setzero_ps();
    }
    for (; line < panel; line += kLine, pairs += kPairs * kRows) {
      __builtin_prefetch(line + kCodesAhead, 0, 0);
      const __m512i stored = _mm512_load_si512(line);
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) {
        const __m512bh numbers = bf16_numbers(Code{}, stored, vector);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          const auto x = std::bit_cast<__m512bh>(_mm512_set1_epi32(pairs[vector / 2 * kRows + row]));
          __m512& to = sum[vector / 2 % kSplit][vector % 2][row];
          to = _mm512_dpbf16_ps(to, x, numbers);
        }
      }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      __m512 scale = sixteen(scales + side * kHalfPanel);
      if constexpr (kNumberScale<Code> != 1) scale = _mm512_mul_ps(scale, _mm512_set1_ps(kNumberScale<Code>));
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        __m512 of_group = sum[0][side][row];
        if constexpr (kSplit == 2) of_group = _mm512_add_ps(of_group, sum[1][side][row]);
        total[side][row] = _mm512_fmadd_ps(of_group, scale, total[side][row]);
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(tile + row * kPanelWidth, total[0][row]);
    _mm512_store_ps(tile + row * kPanelWidth + kHalfPanel, total[1][row]);
  }
}

// tile[row][32] = sum over k of a[k][row] * panel[k][32], of up to `kMaxCodeRows` rows.
template <class Panel>
void multiply_codes(int rows, std::int64_t padded_k, const bf16* a, const std::byte* panel, float* tile) {
  using Multiply = void (*)(std::int64_t, const bf16*, const std::byte*, float*);
  static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
    return std::array<Multiply, sizeof...(row)>{&multiply_codes_of<Panel, static_cast<int>(row) + 1>...};
  }(std::make_index_sequence<kMaxCodeRows>{});
  kByRows[static_cast<std::size_t>(rows - 1)](padded_k, a, panel, tile);
}

}  // namespace ktc::weight_format::inline KTC_UNIT
