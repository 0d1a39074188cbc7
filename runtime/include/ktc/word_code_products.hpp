// `CacheCodeProducts` where bytes are widened to words, and products of two are added at once. `Words` has the vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "ktc/cache_code_products.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// A tile of sums in registers has `kTileRows` rows, and keys or units of values beside them.
template <class Words, int kTileRows, int kTileSides, int kTileUnits>
struct WordCodeProducts {
  using Vector = typename Words::Vector;
  using Sums = typename Words::Sums;
  static constexpr std::int64_t kUnit = 2 * Words::kOutputs;
  static constexpr int kRows = kTileRows;
  static constexpr int kSides = kTileSides;
  static constexpr int kWide = kTileUnits;

  static void to_codes(const float* numbers, float factor, std::int64_t count, std::int16_t* codes) {
    for (std::int64_t at = 0; at < count; at += kHalfPanel) {
      Words::to_words(numbers + at, factor, codes + at);
    }
  }

  template <int kCount, int kColumns>
  static void dots(const std::int16_t* queries, std::int64_t query_stride, const std::int8_t* keys,
                   std::int64_t key_stride, std::int64_t width, float* out, std::int64_t out_stride) {
    const auto of = width % kUnit == 0 ? &dots_of<kCount, kColumns, true> : &dots_of<kCount, kColumns, false>;
    of(queries, query_stride, keys, key_stride, width, out, out_stride);
  }

  template <int kCount, int kUnits, class Ahead>
  static void add_rows(const std::int16_t* weights, std::int64_t weight_stride, const std::int8_t* values,
                       std::int64_t stride, std::int64_t count, std::int64_t columns, const float* factors,
                       float* added, std::int64_t added_stride, Ahead& ahead, std::int64_t work) {
    const auto of = columns >= kUnits * kUnit ? &add_rows_of<kCount, kUnits, true, Ahead>
                                              : &add_rows_of<kCount, kUnits, false, Ahead>;
    of(weights, weight_stride, values, stride, count, columns, factors, added, added_stride, ahead, work);
  }

  // Words are interleaved within 128 bits: of every eight columns the first four come before all others.
  static constexpr std::int64_t place(std::int64_t column) {
    const std::int64_t unit = column / kUnit * kUnit, in_unit = column % kUnit;
    return unit + in_unit % 8 / 4 * Words::kOutputs + in_unit / 8 * 4 + in_unit % 4;
  }

 private:
  // With `kWhole` a row's columns are all there.
  template <bool kWhole>
  [[gnu::always_inline]] static Vector widened(const std::int8_t* bytes, std::int64_t columns) {
    if constexpr (kWhole) {
      return Words::widened(bytes);
    } else {
      return Words::widened(bytes, columns);
    }
  }

  template <int kCount, int kColumns, bool kWhole>
  [[gnu::noinline]] static void dots_of(const std::int16_t* queries, std::int64_t query_stride, const std::int8_t* keys,
                                        std::int64_t key_stride, std::int64_t width, float* out,
                                        std::int64_t out_stride) {
    Sums sum[kCount][kColumns];
    // Loops over registers are unrolled, or the compiler keeps the sums in memory.
#pragma GCC unroll 4
    for (auto& row : sum) {
#pragma GCC unroll 4
      for (Sums& column : row) column = Sums{};
    }
    for (std::int64_t at = 0; at < width; at += kUnit) {
      Vector key[kColumns];
#pragma GCC unroll 4
      for (int column = 0; column < kColumns; ++column) {
        key[column] = widened<kWhole>(keys + column * key_stride + at, width - at);
      }
#pragma GCC unroll 4
      for (int row = 0; row < kCount; ++row) {
        const Vector query = Words::load(queries + row * query_stride + at);
#pragma GCC unroll 4
        for (int column = 0; column < kColumns; ++column) {
          sum[row][column] = Sums(Words::add_products(Vector(sum[row][column]), query, key[column]));
        }
      }
    }
    if constexpr (kColumns == 2 && kCount % 2 == 0) {
#pragma GCC unroll 2
      for (int row = 0; row < kCount; row += 2, out += 2 * out_stride) {
        float totals[4];
        Words::store_totals(Vector(sum[row][0]), Vector(sum[row][1]), Vector(sum[row + 1][0]), Vector(sum[row + 1][1]),
                            totals);
        std::memcpy(out, totals, 2 * sizeof(float));
        std::memcpy(out + out_stride, totals + 2, 2 * sizeof(float));
      }
      return;
    }
#pragma GCC unroll 4
    for (int row = 0; row < kCount; ++row, out += out_stride) {
      if constexpr (kColumns == 4) {
        Words::store_totals(Vector(sum[row][0]), Vector(sum[row][1]), Vector(sum[row][2]), Vector(sum[row][3]), out);
      } else {
#pragma GCC unroll 4
        for (int column = 0; column < kColumns; ++column) {
          out[column] = static_cast<float>(Words::total(Vector(sum[row][column])));
        }
      }
    }
  }

  template <int kCount, int kUnits, bool kWhole, class Ahead>
  [[gnu::noinline]] static void add_rows_of(const std::int16_t* weights, std::int64_t weight_stride,
                                            const std::int8_t* values, std::int64_t stride, std::int64_t count,
                                            std::int64_t columns, const float* factors, float* added,
                                            std::int64_t added_stride, Ahead& ahead, std::int64_t work) {
    Sums low[kCount][kUnits], high[kCount][kUnits];
#pragma GCC unroll 4
    for (int row = 0; row < kCount; ++row) {
#pragma GCC unroll 2
      for (int unit = 0; unit < kUnits; ++unit) low[row][unit] = high[row][unit] = Sums{};
    }
    Ahead local_ahead = ahead;  // a copy: the caller's object has an address, which would keep its members in memory
    for (std::int64_t k = 0; k < count; k += 2, values += 2 * stride) {
      local_ahead.step(work);
      // After an odd number of rows follows a weight of 0, by which the last row is multiplied again.
      const std::int8_t* following = values + (k + 1 < count ? stride : 0);
      Vector low_pairs[kUnits], high_pairs[kUnits];
#pragma GCC unroll 2
      for (int unit = 0; unit < kUnits; ++unit) {
        const Vector one = widened<kWhole>(values + unit * kUnit, columns - unit * kUnit);
        const Vector other = widened<kWhole>(following + unit * kUnit, columns - unit * kUnit);
        low_pairs[unit] = Words::low_pairs(one, other);
        high_pairs[unit] = Words::high_pairs(one, other);
      }
#pragma GCC unroll 4
      for (int row = 0; row < kCount; ++row) {
        std::int32_t pair;
        std::memcpy(&pair, weights + row * weight_stride + k, sizeof pair);
        const Vector weight = Words::pairs(pair);
#pragma GCC unroll 2
        for (int unit = 0; unit < kUnits; ++unit) {
          low[row][unit] = Sums(Words::add_products(Vector(low[row][unit]), weight, low_pairs[unit]));
          high[row][unit] = Sums(Words::add_products(Vector(high[row][unit]), weight, high_pairs[unit]));
        }
      }
    }
    ahead = local_ahead;
#pragma GCC unroll 4
    for (int row = 0; row < kCount; ++row) {
      const auto add = [&](Sums sums, float* to) {
        Words::store(Words::add_product(Words::to_floats(Vector(sums)), Words::all(factors[row]), Words::load(to)), to);
      };
#pragma GCC unroll 2
      for (int unit = 0; unit < kUnits; ++unit) {
        float* const of_unit = added + row * added_stride + unit * kUnit;
        add(low[row][unit], of_unit);
        add(high[row][unit], of_unit + Words::kOutputs);
      }
    }
  }
};

}  // namespace ktc::inline KTC_UNIT
