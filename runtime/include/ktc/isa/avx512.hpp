// AVX-512 without its bf16 products: bf16 is widened to fp32 by a shift or a mask, and multiplied there.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/isa/avx512_transpose.hpp"
#include "ktc/isa/avx512_words.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

struct IntegerRounding {
  // A NaN keeps its upper bits and becomes quiet.
  static __m256i to_bf16(__m512 x) {
    const __m512i word = _mm512_castps_si512(x);
    const __m512i upper = _mm512_srli_epi32(word, 16);
    const __m512i bias = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(word, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(nearest, is_nan, upper, _mm512_set1_epi32(0x0040)));
  }
};

// 12 rows x 2 vectors are 24 accumulators; 4 vectors of widened weights, 2 of a row's values and the mask fit beside.
inline constexpr int kMaxRows = 12;
// As for avx512_bf16: up to this many rows the panel is streamed ahead of use, and the next one is not fetched.
inline constexpr int kStreamRows = 4;
inline constexpr int kUnroll = 2;

// Two bf16 read as one integer, without a violation of the aliasing rules.
using Pair [[gnu::may_alias]] = std::int32_t;

template <int kRows, class Ahead>
[[gnu::noinline]] void multiply_rows(std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& next) {
  constexpr int kStepBytes = 2 * 64;
  // Three rows take long enough for a prefetch of each line, which is then faster: 10 % of an expert with four.
  using Fetched = std::conditional_t<kRows <= 2, FetchedPages, FetchedLines<0>>;
  const __m512i upper_half = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const auto even = [](__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); };
  const auto odd = [=](__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, upper_half)); };
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
#pragma GCC unroll 2
    for (int k = 0; k < kUnroll; ++k) {
      const __m512i b_left = _mm512_load_si512(b + k * kStepBytes);
      const __m512i b_right = _mm512_load_si512(b + k * kStepBytes + 64);
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const __m512i x = _mm512_set1_epi32(pairs[k * kRows + row]);
        left[row] = _mm512_fmadd_ps(even(x), even(b_left), left[row]);
        right[row] = _mm512_fmadd_ps(even(x), even(b_right), right[row]);
        left[row] = _mm512_fmadd_ps(odd(x), odd(b_left), left[row]);
        right[row] = _mm512_fmadd_ps(odd(x), odd(b_right), right[row]);
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
  using Lanes = avx512::Lanes<IntegerRounding>;
  using Words = avx512::Words;
  static constexpr int kMaxRows = avx512::kMaxRows;
  static constexpr int kStreamRows = avx512::kStreamRows;
  // An expert of up to this many rows is multiplied with codes as they are stored. With 16 rows this takes less than
  // two thirds of the time of decoding; a scratch panel has space for the converted values of as many.
  static constexpr int kCodeRows = 16;
  // The same of blocks of integers, which are decoded to words for more rows.
  static constexpr int kWordRows = 16;
  static constexpr int kNumberRows = 4;  // at a time, where codes are fp32 numbers
  static constexpr int kFp32Rows = 12;
  static constexpr int kFp32Halves = 2;
  static constexpr bool kBlocked = false;

  static void require() {}

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` pairs of k, a multiple of 16; tile, panel aligned.
  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const bf16*, const bf16*, float*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_rows<static_cast<int>(row) + 1, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    kByRows[static_cast<std::size_t>(rows - 1)](steps, a, panel, tile, ahead);
  }

  // The number of times that `multiply` calls `ahead.step()`.
  static constexpr std::int64_t steps_ahead(int, std::int64_t steps) { return steps / kUnroll; }

  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    avx512::transpose_piece(source, target, piece);
  }
};

}  // namespace ktc::avx512::inline KTC_UNIT
