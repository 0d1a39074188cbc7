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
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

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

// Sums of one group of k with one scale, of kRows rows with the 16 outputs of either side of a panel. Few rows have
// them kSplit times: with only one sum, each product would wait for the last.
template <int kRows, int kVectors>
struct GroupSums {
  static constexpr int kSplit = kRows <= 2 ? std::min(2, kVectors / 2) : 1;

  [[gnu::always_inline]] GroupSums() {
#pragma GCC unroll 2
    for (auto& split : of) {
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) split[0][row] = split[1][row] = _mm512_setzero_ps();
    }
  }

  // kVectors vectors of a panel: two neighbours of k of one side, then of the other.
  template <class Numbers>
  [[gnu::always_inline]] void add(const Neighbours* pairs, const Numbers& numbers) {
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      const __m512bh weights = numbers(vector);
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) {
        const auto x = std::bit_cast<__m512bh>(_mm512_set1_epi32(pairs[vector / 2 * kRows + row]));
        __m512& to = of[vector / 2 % kSplit][vector % 2][row];
        to = _mm512_dpbf16_ps(to, x, weights);
      }
    }
  }

  [[gnu::always_inline]] __m512 sum(int side, int row) const {
    if constexpr (kSplit == 1) return of[0][side][row];
    return _mm512_add_ps(of[0][side][row], of[1][side][row]);
  }

  __m512 of[kSplit][2][kRows];
};

// Sums of all groups.
template <int kRows>
struct ScaledGroups {
  [[gnu::always_inline]] ScaledGroups() {
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) of[0][row] = of[1][row] = _mm512_setzero_ps();
  }

  // `add(sum, total, side)` adds a sum of the group to that of all.
  template <class Sums, class Add>
  [[gnu::always_inline]] void take(const Sums& sums, const Add& add) {
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
#pragma GCC unroll 6
      for (int row = 0; row < kRows; ++row) of[side][row] = add(sums.sum(side, row), of[side][row], side);
    }
  }

  [[gnu::always_inline]] void store(float* tile) const {
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      _mm512_store_ps(tile + row * kPanelWidth, of[0][row]);
      _mm512_store_ps(tile + row * kPanelWidth + kHalfPanel, of[1][row]);
    }
  }

  __m512 of[2][kRows];
};

// Adds a panel of groups of [scales][lines of codes].
template <class Panel, int kRows>
[[gnu::always_inline]] inline void add_lines(std::int64_t padded_k, const Neighbours* pairs, const CodedPanel& stored,
                                             ScaledGroups<kRows>& total) {
  using Code = typename Panel::Code;
  constexpr int kVectors = 16 / Code::kBits;
  const std::int64_t bytes = Panel::bytes(padded_k);
  const std::byte* panel = stored.begin;
  const std::byte* const end = panel + bytes;
  const bool into_l2 = fetches_into_l2();
  while (panel < end) {
    const std::ptrdiff_t jump = stored.jump(panel, bytes);
    if (into_l2) fetch_codes<Panel::kScaleBytes>(panel + jump, into_l2);
    const auto* scales = reinterpret_cast<const typename Panel::Scale*>(panel);
    const std::byte* line = panel + Panel::kScaleBytes;
    panel = std::min(end, line + Panel::kGroupBlocks * Panel::kBlockBytes);
    GroupSums<kRows, kVectors> sums;
    for (; line < panel; line += kLine, pairs += kVectors / 2 * kRows) {
      fetch_codes<kLine>(line + jump, into_l2);
      const __m512i stored = _mm512_load_si512(line);
      sums.add(pairs, [&](int vector) { return bf16_numbers(Code{}, stored, vector); });
    }
    __m512 scale[2] = {sixteen(scales), sixteen(scales + kHalfPanel)};
    if constexpr (kNumberScale<Code> != 1) {
      for (__m512& side : scale) side = _mm512_mul_ps(side, _mm512_set1_ps(kNumberScale<Code>));
    }
    total.take(sums, [&](__m512 sum, __m512 all, int side) { return _mm512_fmadd_ps(sum, scale[side], all); });
  }
}

// Adds a panel of a file's blocks: fp16, and codes that `multiply_words.hpp` would look up as well.
template <class Panel, int kRows>
[[gnu::always_inline]] inline void add_blocks(std::int64_t padded_k, const Neighbours* pairs, const CodedPanel& stored,
                                              ScaledGroups<kRows>& total) {
  using Format = typename Panel::Format;
  static_assert(!Format::kMins);
  using Lines = CodeLines<Panel>;
  constexpr int kVectors = Lines::kVectors;
  constexpr int kGroups = std::max(Format::kScales, 1);
  constexpr std::int64_t kSteps = kBlock / kPanelWidth / kVectors / kGroups;  // of a group
  constexpr std::int64_t kStepBytes = Panel::kBlockBytes / (kSteps * kGroups);
  const bool into_l2 = fetches_into_l2();
  const std::byte* const panel = stored.begin;
  for (std::int64_t block = 0; block < padded_k / kPanelWidth; ++block) {
    const std::byte* head = panel + Panel::scales_at(block);
    const std::byte* codes = panel + Panel::codes_at(block);
    const std::ptrdiff_t jump = stored.jump(codes, Panel::bytes(padded_k));
    if (block % Panel::kSpanBlocks == 0) fetch_codes<Panel::kScaleBytes>(head + jump, into_l2);
    const BlockScales<Format> scales(head, block % Panel::kSpanBlocks);
    for (int group = 0; group < kGroups; ++group) {
      GroupSums<kRows, kVectors> sums;
      for (std::int64_t step = group * kSteps; step < (group + 1) * kSteps; ++step, pairs += kVectors / 2 * kRows) {
        fetch_codes<kStepBytes>(codes + jump + step * kStepBytes, into_l2);
        const Lines lines(codes, step);
        sums.add(pairs, [&](int vector) { return bf16_numbers(lines, vector); });
      }
      total.take(sums, [&](__m512 sum, __m512 all, int side) {
        if constexpr (Format::kScales == 0) return _mm512_add_ps(sum, all);
        return _mm512_fmadd_ps(sum, _mm512_load_ps(scales.scale[group] + side * kHalfPanel), all);
      });
    }
  }
}

template <class Panel, int kRows>
[[gnu::noinline]] void multiply_codes_of(std::int64_t padded_k, const bf16* a, const CodedPanel& panel, float* tile) {
  const auto* pairs = reinterpret_cast<const Neighbours*>(a);
  ScaledGroups<kRows> total;
  if constexpr (StoredInBlocks<Panel>) {
    add_blocks<Panel>(padded_k, pairs, panel, total);
  } else {
    add_lines<Panel>(padded_k, pairs, panel, total);
  }
  total.store(tile);
}

// tile[row][32] = sum over k of a[k][row] * panel[k][32], of up to kMostRows rows.
template <class Panel, int kMostRows>
void multiply_codes(int rows, std::int64_t padded_k, const bf16* a, const CodedPanel& panel, float* tile) {
  using Multiply = void (*)(std::int64_t, const bf16*, const CodedPanel&, float*);
  static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
    return std::array<Multiply, sizeof...(row)>{&multiply_codes_of<Panel, static_cast<int>(row) + 1>...};
  }(std::make_index_sequence<kMostRows>{});
  kByRows[static_cast<std::size_t>(rows - 1)](padded_k, a, panel, tile);
}

}  // namespace ktc::weight_format::inline KTC_UNIT
