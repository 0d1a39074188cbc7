// A few rows multiplied with blocks as they are stored, for ISAs with VDPBF16PS: see `multiply_codes.hpp`. Of fp16, and
// of codes that `multiply_words.hpp` would look up as well.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/decode_blocks.hpp"
#include "ktc/weight_format/multiply_codes.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// 32 numbers, which are exact in bf16, or fp16 rounded to it.
template <class Panel>
[[gnu::always_inline]] inline __m512bh bf16_numbers(const CodeLines<Panel>& lines, int vector) {
  if constexpr (CodeLines<Panel>::kLookedUp) {
    return std::bit_cast<__m512bh>(lines.words(vector));
  } else {
    const Halves halves = lines.halves(vector);
    return _mm512_cvtne2ps_pbh(halves.second, halves.first);
  }
}

template <class Panel, int kRows>
[[gnu::noinline]] void multiply_blocks_of(std::int64_t padded_k, const bf16* a, const std::byte* panel, float* tile) {
  using Format = typename Panel::Format;
  static_assert(!Format::kMins);
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
          const __m512bh numbers = bf16_numbers(lines, vector);
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
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(tile + row * kPanelWidth, total[0][row]);
    _mm512_store_ps(tile + row * kPanelWidth + kHalfPanel, total[1][row]);
  }
}

// tile[row][32] = sum over k of a[k][row] * panel[k][32], of up to `kMaxCodeRows` rows.
template <class Panel>
void multiply_blocks(int rows, std::int64_t padded_k, const bf16* a, const std::byte* panel, float* tile) {
  using Multiply = void (*)(std::int64_t, const bf16*, const std::byte*, float*);
  static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
    return std::array<Multiply, sizeof...(row)>{&multiply_blocks_of<Panel, static_cast<int>(row) + 1>...};
  }(std::make_index_sequence<kMaxCodeRows>{});
  kByRows[static_cast<std::size_t>(rows - 1)](padded_k, a, panel, tile);
}

}  // namespace ktc::weight_format::inline KTC_UNIT
