// Products of the codes of a cache (signed bytes) with those of queries and weights (signed words): dot products of
// rows, and sums of weighted rows. Integer sums are exact, so every instruction set has the same. The header
// `ktc/isa/NAME_cache_codes.hpp` chooses them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The largest codes of a query and of a weight: 127 * kWeightCode * 128 positions and 127 * kQueryCode * 1032 columns
// fit 32 bits.
inline constexpr std::int32_t kQueryCode = 16383;
inline constexpr std::int32_t kWeightCode = 32767;
inline constexpr std::int64_t kCodeColumns = 1032;

template <class Isa>
struct CacheCodeProducts;

// In plain C++.
struct PlainCodeProducts {
  static constexpr std::int64_t kUnit = kHalfPanel;  // to which rows of codes are filled up
  static constexpr int kRows = 2;                    // of a tile of sums in registers
  static constexpr int kSides = 4;                   // keys of such a tile
  static constexpr int kWide = 2;                    // units of values of such a tile

  // codes[count] = numbers[count] * factor, rounded to nearest even; `count` is a multiple of kHalfPanel.
  static void to_codes(const float* numbers, float factor, std::int64_t count, std::int16_t* codes) {
    for (std::int64_t at = 0; at < count; ++at) {
      codes[at] = static_cast<std::int16_t>(std::nearbyint(numbers[at] * factor));
    }
  }

  // out[row][column] = queries[row] . keys[column], in fp32.
  template <int kCount, int kColumns>
  static void dots(const std::int16_t* queries, std::int64_t query_stride, const std::int8_t* keys,
                   std::int64_t key_stride, std::int64_t width, float* out, std::int64_t out_stride) {
    for (int row = 0; row < kCount; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        std::int32_t sum = 0;
        for (std::int64_t at = 0; at < width; ++at) {
          sum += queries[row * query_stride + at] * keys[column * key_stride + at];
        }
        out[row * out_stride + column] = static_cast<float>(sum);
      }
    }
  }

  // added[row][place(column)] += factors[row] * sum over k of weights[row][k] values[k][column], for the kUnits * kUnit
  // columns that `values` and `added` begin with, of which `columns` are there. `ahead` steps by `work` before
  // each two rows of values.
  template <int kCount, int kUnits, class Ahead>
  static void add_rows(const std::int16_t* weights, std::int64_t weight_stride, const std::int8_t* values,
                       std::int64_t stride, std::int64_t count, std::int64_t columns, const float* factors,
                       float* added, std::int64_t added_stride, Ahead& ahead, std::int64_t work) {
    constexpr std::int64_t kColumns = kUnits * kUnit;
    std::int32_t sums[kCount][kColumns] = {};
    for (std::int64_t k = 0; k < count; ++k, values += stride) {
      if (k % 2 == 0) ahead.step(work);
      for (int row = 0; row < kCount; ++row) {
        for (std::int64_t column = 0; column < std::min(columns, kColumns); ++column) {
          sums[row][column] += weights[row * weight_stride + k] * values[column];
        }
      }
    }
    for (int row = 0; row < kCount; ++row) {
      for (std::int64_t column = 0; column < kColumns; ++column) {
        added[row * added_stride + column] += factors[row] * static_cast<float>(sums[row][column]);
      }
    }
  }

  // Where `add_rows` has a column of the values.
  static constexpr std::int64_t place(std::int64_t column) { return column; }
};

}  // namespace ktc::inline KTC_UNIT
