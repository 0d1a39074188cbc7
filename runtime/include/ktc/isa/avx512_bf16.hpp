// AVX-512 with VDPBF16PS: two bf16 products per fp32 lane and instruction. For every setting of MXCSR that instruction
// rounds to nearest even and reads and writes denormals as zero.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <concepts>
#include <cstdint>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_bf16_pairs.hpp"
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/isa/avx512_transpose.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

struct Rounding {
  static __m256i to_bf16(__m512 x) { return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
};
using Lanes = avx512::Lanes<Rounding>;

// 12 rows x 2 vectors are 24 accumulators; 2 vectors of the panel and 1 broadcast row value beside them leave 5 of the
// 32 registers free, and each load of the panel feeds 12 instructions.
inline constexpr int kMaxRows = 12;

// Up to this many rows memory limits the speed of an expert, not the products. Then the panel is fetched where it is
// read, and not the next one into L2: 31 instead of 21 GB/s at one token.
inline constexpr int kStreamRows = 4;

inline constexpr int kUnroll = 4;

// Two bf16 read as one integer, without a violation of the aliasing rules.
using Pair [[gnu::may_alias]] = std::int32_t;

template <int kRows, class Fetched, class Ahead>
[[gnu::noinline]] void multiply_rows(std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& next) {
  constexpr int kStepBytes = 2 * 64;
  Ahead ahead = next;  // by value: the stores to `tile` must not force it back to memory
  __m512 left[kRows];
  __m512 right[kRows];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) left[row] = right[row] = _mm512_setzero_ps();

  const auto* b = reinterpret_cast<const char*>(panel);
  const auto* pairs = reinterpret_cast<const Pair*>(a);  // one row's two neighbours, broadcast to all lanes
  for (std::int64_t step = 0; step < steps; step += kUnroll) {
    if constexpr (kRows <= kStreamRows) Fetched::template fetch<kUnroll * kStepBytes>(b);
    ahead.step();
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) {
      const auto b_left = std::bit_cast<__m512bh>(_mm512_load_si512(b + k * kStepBytes));
      const auto b_right = std::bit_cast<__m512bh>(_mm512_load_si512(b + k * kStepBytes + 64));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const auto x = std::bit_cast<__m512bh>(_mm512_set1_epi32(pairs[k * kRows + row]));
        left[row] = _mm512_dpbf16_ps(left[row], x, b_left);
        right[row] = _mm512_dpbf16_ps(right[row], x, b_right);
      }
    }
    b += kUnroll * kStepBytes;
    pairs += kUnroll * kRows;
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(tile + row * kPanelWidth, left[row]);
    _mm512_store_ps(tile + row * kPanelWidth + kHalfPanel, right[row]);
  }
  next = ahead;
}

struct Isa {
  using Element = bf16;
  using Accumulator = float;
  using Lanes = avx512_bf16::Lanes;
  static constexpr int kMaxRows = avx512_bf16::kMaxRows;
  static constexpr int kStreamRows = avx512_bf16::kStreamRows;
  static constexpr int kFp32Rows = 12;
  static constexpr int kFp32Halves = 2;
  static constexpr bool kBlocked = false;
  template <std::same_as<bf16> Stored, int kRows, int kColumns>
  using DotSums = avx512_bf16::DotSums<kRows, kColumns>;
  template <int kRows, int kUnits>
  using WeightedSums = avx512_bf16::WeightedSums<kRows, kUnits>;

  static void require() {}

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` pairs of k, a multiple of 16; tile, panel aligned.
  template <class Fetched = FetchedPages, class Ahead>
  static void multiply(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const bf16*, const bf16*, float*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_rows<static_cast<int>(row) + 1, Fetched, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    kByRows[static_cast<std::size_t>(rows - 1)](steps, a, panel, tile, ahead);
  }

  // The number of times that `multiply` calls `ahead.step()`.
  static constexpr std::int64_t steps_ahead(int, std::int64_t steps) { return steps / kUnroll; }

  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    avx512::transpose_piece(source, target, piece);
  }
};

}  // namespace ktc::avx512_bf16::inline KTC_UNIT
