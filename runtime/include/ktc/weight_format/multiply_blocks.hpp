// A few rows multiplied with the codes of blocks as they are stored, for ISAs with VDPBF16PS: see `multiply_codes.hpp`.
// For its minimum, a group's sum is reduced by the minimum times the sum of the row's values there.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/decode_blocks.hpp"
#include "ktc/weight_format/multiply_codes.hpp"

namespace ktc::weight_format {

// Writes the sums of each 32 values of packed rows, [k / 2][rows][2] to [k / 32][rows]. Returns whether all are finite.
inline bool sum_blocks(int rows, std::int64_t padded_k, const bf16* a, float* sums) {
  bool finite = true;
  for (std::int64_t k = 0; k < padded_k; k += kPanelWidth, sums += rows) {
    for (int row = 0; row < rows; ++row) {
      float sum = 0;
      for (std::int64_t pair = k / 2; pair < (k + kPanelWidth) / 2; ++pair) {
        const bf16* values = a + (pair * rows + row) * 2;
        sum += static_cast<float>(values[0]) + static_cast<float>(values[1]);
      }
      sums[row] = sum;
      finite = finite && std::isfinite(sum);
    }
  }
  return finite;
}

// Whether numbers are multiplied as the sum of two: a signed byte is, between 0 and 127, a number of 128 to 255 whose
// upper bits are always the same, less 128; and less 256 where it is negative. That takes fewer steps than a
// conversion.
template <class Format>
inline constexpr bool kInTwo = Format::kBits == 8;

// For an infinite value these two, and a minimum, would give NaN where the weight itself gives an infinity.
template <class Format>
inline constexpr bool kWantsFinite = Format::kMins || kInTwo<Format>;

struct Numbers {
  __m512i first;
  __m512i second;
};

template <class Panel>
[[gnu::always_inline]] inline Numbers bf16_numbers(const CodeLines<Panel>& lines, int vector) {
  if constexpr (CodeLines<Panel>::kLookedUp) {
    return {lines.words(vector), __m512i()};
  } else if constexpr (kInTwo<typename Panel::Format>) {
    constexpr int kOnesOr = 0xea;  // (first and second) or third
    const __m512i codes = lines.widened_bytes(vector);
    const __m512i from_128 =
        _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(0x7f), _mm512_set1_epi16(0x4300), kOnesOr);
    const __m512i less = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi16(0x80),
                                                   _mm512_set1_epi16(static_cast<short>(0xc300)), kOnesOr);
    return {from_128, less};
  } else {
    const Halves halves = lines.halves(vector);
    return {std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(halves.second, halves.first)), __m512i()};
  }
}

template <class Panel, int kRows>
[[gnu::noinline]] void multiply_blocks_of(std::int64_t padded_k, const bf16* a, const float* a_sums,
                                          const std::byte* panel, float* tile) {
  using Format = typename Panel::Format;
  using Lines = CodeLines<Panel>;
  constexpr int kVectors = Lines::kVectors;
  constexpr int kGroups = std::max(Format::kScales, 1);
  constexpr std::int64_t kSteps = kBlock / kPanelWidth / kVectors / kGroups;  // of a group
  constexpr int kStepLines = static_cast<int>(Panel::kBlockBytes / 64 / (kSteps * kGroups));
  constexpr int kSplit = kRows <= 2 ? 2 : 1;  // few rows: with only one sum, each product would wait for the last
  __m512 total[2][kRows];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) total[0][row] = total[1][row] = _mm512_setzero_ps();

  const auto* pairs = reinterpret_cast<const avx512_bf16::Pair*>(a);
  const std::int64_t blocks = padded_k / kPanelWidth;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::byte* head = panel + Panel::scales_at(block);
    const std::byte* codes = panel + Panel::codes_at(block);
    if (block % Panel::kSpanBlocks == 0) {
      for (std::int64_t at = 0; at < Panel::kScaleBytes; at += 64) __builtin_prefetch(head + kCodesAhead + at, 0, 0);
    }
    const BlockScales<Format> scales(head, block % Panel::kSpanBlocks);
    for (int group = 0; group < kGroups; ++group) {
      __m512 sum[kSplit][2][kRows];
#pragma GCC unroll 2
      for (int split = 0; split < kSplit; ++split) {
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) sum[split][0][row] = sum[split][1][row] = _mm512_setzero_ps();
      }
      for (std::int64_t step = group * kSteps; step < (group + 1) * kSteps; ++step, pairs += kVectors / 2 * kRows) {
#pragma GCC unroll 5
        for (int line = 0; line < kStepLines; ++line) {
          __builtin_prefetch(codes + kCodesAhead + (step * kStepLines + line) * 64, 0, 0);
        }
        const Lines lines(codes, step);
#pragma GCC unroll 16
        for (int vector = 0; vector < kVectors; ++vector) {
          const auto numbers = bf16_numbers(lines, vector);
#pragma GCC unroll 6
          for (int row = 0; row < kRows; ++row) {
            const auto x = std::bit_cast<__m512bh>(_mm512_set1_epi32(pairs[vector / 2 * kRows + row]));
            __m512& to = sum[vector / 2 % kSplit][vector % 2][row];
            to = _mm512_dpbf16_ps(to, x, std::bit_cast<__m512bh>(numbers.first));
            if constexpr (kInTwo<Format>) to = _mm512_dpbf16_ps(to, x, std::bit_cast<__m512bh>(numbers.second));
          }
        }
      }
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          __m512 of_group = sum[0][side][row];
          if constexpr (kSplit == 2) of_group = _mm512_add_ps(of_group, sum[1][side][row]);
          if constexpr (Format::kScales == 0) {
            total[side][row] = _mm512_add_ps(of_group, total[side][row]);
          } else {
            const __m512 scale = _mm512_load_ps(scales.scale[group] + side * kHalfPanel);
            total[side][row] = _mm512_fmadd_ps(of_group, scale, total[side][row]);
          }
        }
      }
    }
    if constexpr (Format::kMins) {
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const __m512 min = _mm512_load_ps(scales.min + side * kHalfPanel);
#pragma GCC unroll 6
        for (int row = 0; row < kRows; ++row) {
          total[side][row] = _mm512_fnmadd_ps(_mm512_set1_ps(a_sums[block * kRows + row]), min, total[side][row]);
        }
      }
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(tile + row * kPanelWidth, total[0][row]);
    _mm512_store_ps(tile + row * kPanelWidth + kHalfPanel, total[1][row]);
  }
}

// tile[row][32] = sum over k of a[k][row] * panel[k][32], of up to `kMaxCodeRows` rows. `a_sums` as `sum_blocks` gives
// them; formats without minima do not read them, and may have null.
template <class Panel>
void multiply_blocks(int rows, std::int64_t padded_k, const bf16* a, const float* a_sums, const std::byte* panel,
                     float* tile) {
  using Multiply = void (*)(std::int64_t, const bf16*, const float*, const std::byte*, float*);
  static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
    return std::array<Multiply, sizeof...(row)>{&multiply_blocks_of<Panel, static_cast<int>(row) + 1>...};
  }(std::make_index_sequence<kMaxCodeRows>{});
  kByRows[static_cast<std::size_t>(rows - 1)](padded_k, a, a_sums, panel, tile);
}

}  // namespace ktc::weight_format
