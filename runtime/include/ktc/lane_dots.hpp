// Dot products of queries with keys as they are stored.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// sums[row][column] of a[row] . b[column] in fp32, with the lanes of any instruction set.
template <class Isa, class Element, int kRows, int kColumns>
class LaneDots {
  using Lanes = typename Isa::Lanes;

 public:
  using Query = float;

  // `a` is followed by zeros up to a multiple of kHalfPanel; b[column] points to the numbers of a column.
  template <class Rows>
  [[gnu::always_inline]] void add(const float* a, std::int64_t a_stride, const Rows& b, std::int64_t width) {
    const Element* columns[kColumns];
#pragma GCC unroll 4
    for (int column = 0; column < kColumns; ++column) columns[column] = b[column];
    const std::int64_t whole = width / kHalfPanel * kHalfPanel;
    const auto step = [&](int column, const Element* from, std::int64_t at) {
      const Lanes values = widened<Lanes>(from);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        Lanes& sum = sums_[row][column].value;
        sum = fused_multiply_add(values, Lanes::load(a + row * a_stride + at), sum);
      }
    };
    for (std::int64_t at = 0; at < whole; at += kHalfPanel) {
#pragma GCC unroll 4
      for (int column = 0; column < kColumns; ++column) step(column, columns[column] + at, at);
    }
    if (whole == width) return;
#pragma GCC unroll 4
    for (int column = 0; column < kColumns; ++column) {
      Element rest[kHalfPanel] = {};
      std::copy(columns[column] + whole, columns[column] + width, rest);
      step(column, rest, whole);
    }
  }

  [[gnu::always_inline]] void store(float* target, std::int64_t stride) const {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row, target += stride) {
      float sums[4];
      Lanes::store_sums(sum(row, 0), sum(row, 1), sum(row, 2), sum(row, 3), sums);
      std::copy(sums, sums + kColumns, target);
    }
  }

 private:
  static_assert(kColumns <= 4);
  struct Sum {
    Lanes value{0.0f};
  };
  [[gnu::always_inline]] Lanes sum(int row, int column) const {
    return column < kColumns ? sums_[row][column].value : Lanes(0.0f);
  }
  Sum sums_[kRows][kColumns];
};

}  // namespace ktc::inline KTC_UNIT
