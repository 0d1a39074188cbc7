// Products of bf16 by VDPBF16PS where both operands are as stored: dot products of rows, and sums of weighted rows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

// Up to 32 neighbours, zeros after them.
[[gnu::always_inline]] inline __m512i loaded(const bf16* source, std::int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(source);
  return _mm512_maskz_loadu_epi16((std::uint32_t{1} << count) - 1, source);
}

// sums[row][column] of a[row] . b[column], in registers.
template <int kRows, int kColumns>
class DotSums {
 public:
  using Query = bf16;

  [[gnu::always_inline]] DotSums() {
    // Loops over registers are unrolled, or the compiler keeps the sums in memory.
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
      for (int column = 0; column < kColumns; ++column) sums_[row][column] = _mm512_setzero_ps();
    }
  }

  // `a` is followed by zeros up to a multiple of 32; b[column] points to the numbers of a column.
  template <class Rows>
  [[gnu::always_inline]] void add(const bf16* a, std::int64_t a_stride, const Rows& b, std::int64_t width) {
    const bf16* from[kColumns];
#pragma GCC unroll 4
    for (int column = 0; column < kColumns; ++column) from[column] = b[column];
    for (std::int64_t at = 0; at < width; at += 32) {
      __m512bh columns[kColumns];
#pragma GCC unroll 4
      for (int column = 0; column < kColumns; ++column) {
        columns[column] = std::bit_cast<__m512bh>(loaded(from[column] + at, width - at));
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const auto values = std::bit_cast<__m512bh>(_mm512_loadu_si512(a + row * a_stride + at));
#pragma GCC unroll 4
        for (int column = 0; column < kColumns; ++column) {
          sums_[row][column] = _mm512_dpbf16_ps(sums_[row][column], values, columns[column]);
        }
      }
    }
  }

  // Writes the sums times a factor, in one order of addition for any number of columns.
  [[gnu::always_inline]] void store(float* target, std::int64_t stride, float scale) const {
    static_assert(kColumns <= 4);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row, target += stride) {
      const __m128 sums = avx512::sums_of_four(sum(row, 0), sum(row, 1), sum(row, 2), sum(row, 3));
      float scaled[4];
      _mm_storeu_ps(scaled, _mm_mul_ps(sums, _mm_set1_ps(scale)));
      std::copy(scaled, scaled + kColumns, target);
    }
  }

 private:
  __m512 sum(int row, int column) const { return column < kColumns ? sums_[row][column] : _mm512_setzero_ps(); }

  __m512 sums_[kRows][kColumns];
};

// kUnits times 32 columns of sums over rows: sums[row][column] += sum over k of weights[row][k] values[k][column].
template <int kRows, int kUnits>
class WeightedSums {
 public:
  [[gnu::always_inline]] WeightedSums(const float* from, std::int64_t stride) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row, from += stride) {
#pragma GCC unroll 2
      for (int unit = 0; unit < kUnits; ++unit) {
        const __m512 left = _mm512_loadu_ps(from + unit * 32), right = _mm512_loadu_ps(from + unit * 32 + 16);
        low_[row][unit] = _mm512_permutex2var_ps(left, kLow(), right);
        high_[row][unit] = _mm512_permutex2var_ps(left, kHigh(), right);
      }
    }
  }

  // `weights` are followed by zeros up to an even count; values[k] points to a row, of which `columns` are values from
  // `first` on. `each_pair` is called before each two rows of values.
  template <class Rows, class EachPair>
  [[gnu::always_inline]] void add(const bf16* weights, std::int64_t weight_stride, const Rows& values,
                                  std::int64_t count, std::int64_t first, std::int64_t columns,
                                  const EachPair& each_pair) {
    for (std::int64_t k = 0; k < count; k += 2) {
      each_pair(k);
      const bf16* row = values[k] + first;
      const bf16* next = k + 1 < count ? values[k + 1] + first : nullptr;
      __m512bh low[kUnits], high[kUnits];
#pragma GCC unroll 2
      for (int unit = 0; unit < kUnits; ++unit) {
        const __m512i one = loaded(row + unit * 32, columns - unit * 32);
        const __m512i other = next != nullptr ? loaded(next + unit * 32, columns - unit * 32) : _mm512_setzero_si512();
        low[unit] = std::bit_cast<__m512bh>(_mm512_unpacklo_epi16(one, other));
        high[unit] = std::bit_cast<__m512bh>(_mm512_unpackhi_epi16(one, other));
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        std::int32_t pair;
        __builtin_memcpy(&pair, weights + row * weight_stride + k, sizeof pair);
        const auto weight = std::bit_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
        for (int unit = 0; unit < kUnits; ++unit) {
          low_[row][unit] = _mm512_dpbf16_ps(low_[row][unit], weight, low[unit]);
          high_[row][unit] = _mm512_dpbf16_ps(high_[row][unit], weight, high[unit]);
        }
      }
    }
  }

  [[gnu::always_inline]] void store(float* target, std::int64_t stride) const {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row, target += stride) {
#pragma GCC unroll 2
      for (int unit = 0; unit < kUnits; ++unit) {
        const __m512 low = low_[row][unit], high = high_[row][unit];
        _mm512_storeu_ps(target + unit * 32, _mm512_permutex2var_ps(low, kLeft(), high));
        _mm512_storeu_ps(target + unit * 32 + 16, _mm512_permutex2var_ps(low, kRight(), high));
      }
    }
  }

 private:
  // Interleaving of 16-bit values works within 128 bits: `low` has columns 0 to 3 of every eight, `high` the others.
  static __m512i kLow() { return _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27); }
  static __m512i kHigh() { return _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31); }
  static __m512i kLeft() { return _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23); }
  static __m512i kRight() { return _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31); }

  __m512 low_[kRows][kUnits];
  __m512 high_[kRows][kUnits];
};

}  // namespace ktc::avx512_bf16::inline KTC_UNIT
