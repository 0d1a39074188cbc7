// Dot products of queries in fp32 with keys as they are stored, eight columns at a time. With 16, as `Lanes` have them,
// four queries by two keys would take more registers than there are, and each product would load its query.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::avx2::inline KTC_UNIT {

// Eight numbers as fp32.
[[gnu::always_inline]] inline __m256 widened(const bf16* source) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
[[gnu::always_inline]] inline __m256 widened(const weight_format::fp16* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
[[gnu::always_inline]] inline __m256 widened(const float* source) {
  return _mm256_loadu_ps(source);
}

// The sums of four registers, in their order.
[[gnu::always_inline]] inline __m128 sums_of_four(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d left = _mm256_castps_pd(ab), right = _mm256_castps_pd(cd);
  const __m256 all = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(left, right)),
                                   _mm256_castpd_ps(_mm256_unpackhi_pd(left, right)));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// sums[row][column] of a[row] . b[column], in registers: 12 sums, three columns and a vector of a row are all 16.
template <class Element, int kRows, int kColumns>
class DotSums {
  static_assert(kRows <= 4 && kColumns <= 4);

 public:
  using Query = float;

  [[gnu::always_inline]] DotSums() {
    // Loops over registers are unrolled, or the compiler keeps the sums in memory.
#pragma GCC unroll 4
    for (auto& row : sums_) {
#pragma GCC unroll 4
      for (__m256& sum : row) sum = _mm256_setzero_ps();
    }
  }

  // `a` is followed by zeros up to a multiple of 8; b[column] points to the numbers of a column.
  template <class Rows>
  [[gnu::always_inline]] void add(const float* a, std::int64_t a_stride, const Rows& b, std::int64_t width) {
    const Element* columns[kColumns];
#pragma GCC unroll 4
    for (int column = 0; column < kColumns; ++column) columns[column] = b[column];
    const std::int64_t whole = width / 8 * 8;
    for (std::int64_t at = 0; at < whole; at += 8) {
      step(a + at, a_stride, [&](int column) { return columns[column] + at; });
    }
    if (whole == width) return;
    Element rest[kColumns * 8] = {};
    for (int column = 0; column < kColumns; ++column) {
      std::copy(columns[column] + whole, columns[column] + width, rest + column * 8);
    }
    step(a + whole, a_stride, [&](int column) { return rest + column * 8; });
  }

  [[gnu::always_inline]] void store(float* target, std::int64_t stride) const {
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row, target += stride) {
      const __m128 totals = sums_of_four(sum(row, 0), sum(row, 1), sum(row, 2), sum(row, 3));
      if constexpr (kColumns == 4) {
        _mm_storeu_ps(target, totals);
      } else if constexpr (kColumns == 1) {
        _mm_store_ss(target, totals);
      } else {
        _mm_storel_pi(reinterpret_cast<__m64*>(target), totals);
        if constexpr (kColumns == 3) _mm_store_ss(target + 2, _mm_movehl_ps(totals, totals));
      }
    }
  }

 private:
  __m256 sum(int row, int column) const { return column < kColumns ? sums_[row][column] : _mm256_setzero_ps(); }

  template <class From>
  [[gnu::always_inline]] void step(const float* a, std::int64_t a_stride, const From& from) {
    __m256 columns[kColumns];
#pragma GCC unroll 4
    for (int column = 0; column < kColumns; ++column) columns[column] = widened(from(column));
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const __m256 values = _mm256_loadu_ps(a + row * a_stride);
#pragma GCC unroll 4
      for (int column = 0; column < kColumns; ++column) {
        sums_[row][column] = _mm256_fmadd_ps(values, columns[column], sums_[row][column]);
      }
    }
  }

  __m256 sums_[kRows][kColumns];
};

}  // namespace ktc::avx2::inline KTC_UNIT
