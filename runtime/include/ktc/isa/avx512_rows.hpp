// Products of a group of rows with a panel, for every ISA with AVX-512: two registers of sums for each row.
//
// `Products` multiplies a register of the panel, some neighbours of k of 16 outputs, with the same neighbours of a row:
//   Row, Weight, Sum    the types of a row's values, of the panel's, and of sums in memory.
//   Register            16 sums.
//   Weights(line)       the panel's values as `add_to` reads them, made once for all rows.
//   Products(values)    the row's values, the same in all lanes.
//   add_to(left, right, ...)   adds products to the sums of either half of a panel.
//   kUnroll             steps between two calls of `ahead.step()`; a panel has a multiple of it.
//   Fetched             how a panel is fetched that few rows read.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

// Up to this many rows memory limits the speed of an expert, not the products. Then the panel is fetched where it is
// read, and not the next one into L2: 31 instead of 21 GB/s at one token of bf16.
inline constexpr int kStreamRows = 4;

template <class Products, class Fetched, int kRows, class Ahead>
[[gnu::noinline]] void multiply_rows(std::int64_t steps, const typename Products::Row* a,
                                     const typename Products::Weight* panel, typename Products::Sum* tile,
                                     Ahead& next) {
  using Register = typename Products::Register;
  using Weights = typename Products::Weights;
  constexpr int kUnroll = Products::kUnroll;
  constexpr int kLine = 64;
  constexpr int kStepBytes = 2 * kLine;
  Ahead ahead = next;  // by value: the stores to `tile` must not force it back to memory
  Register left[kRows];
  Register right[kRows];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) left[row] = right[row] = Register{};

  const auto* b = reinterpret_cast<const std::byte*>(panel);
  const auto* neighbours = reinterpret_cast<const Neighbours*>(a);
  for (std::int64_t step = 0; step < steps; step += kUnroll) {
    if constexpr (kRows <= kStreamRows) {
      Fetched::template OfRows<kRows>::template fetch<kUnroll * kStepBytes>(b);
    }
    ahead.step();
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) {
      const Weights b_left(_mm512_load_si512(b + k * kStepBytes));
      const Weights b_right(_mm512_load_si512(b + k * kStepBytes + kLine));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const Products x(_mm512_set1_epi32(neighbours[k * kRows + row]));
        x.add_to(left[row], right[row], b_left, b_right);
      }
    }
    b += kUnroll * kStepBytes;
    neighbours += kUnroll * kRows;
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    *reinterpret_cast<Register*>(tile + row * kPanelWidth) = left[row];
    *reinterpret_cast<Register*>(tile + row * kPanelWidth + kHalfPanel) = right[row];
  }
  next = ahead;
}

// The micro-kernel of these products.
template <class Products>
class RowKernel {
 public:
  using Element = typename Products::Row;
  using Weight = typename Products::Weight;
  using Accumulator = typename Products::Sum;
  // 12 rows x 2 registers are 24 sums. The weights of a step and a row's values fit the other 8.
  static constexpr int kMaxRows = 12;
  static constexpr int kStreamRows = avx512::kStreamRows;
  static constexpr bool kBlocked = false;

  template <class Fetched = typename Products::Fetched, class Ahead>
  static void multiply(int rows, std::int64_t steps, const Element* a, const Weight* panel, Accumulator* tile,
                       Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const Element*, const Weight*, Accumulator*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{
          &multiply_rows<Products, Fetched, static_cast<int>(row) + 1, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    kByRows[static_cast<std::size_t>(rows - 1)](steps, a, panel, tile, ahead);
  }

  static constexpr std::int64_t steps_ahead(int, std::int64_t steps) { return steps / Products::kUnroll; }
};

}  // namespace ktc::avx512::inline KTC_UNIT
