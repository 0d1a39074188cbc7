// The loop of integer products for every ISA with AVX-512: `Products` multiplies four neighbours of k of one row and of
// 16 outputs.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <utility>

#include "ktc/isa/integer.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

template <class Products, int kUnroll, int kStreamRows, int kRows, class Fetched, class Ahead>
[[gnu::noinline]] void multiply_code_rows(std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                                          std::int32_t* tile, Ahead& next) {
  constexpr int kStepBytes = 2 * 64;
  using Weights = typename Products::Weights;
  Ahead ahead = next;  // by value: the stores to `tile` must not force it back to memory
  __m512i left[kRows];
  __m512i right[kRows];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) left[row] = right[row] = _mm512_setzero_si512();

  const auto* quads = reinterpret_cast<const Quad*>(a);  // one row's four neighbours, broadcast to all lanes
  for (std::int64_t step = 0; step < steps; step += kUnroll) {
    if constexpr (kRows <= kStreamRows) Fetched::template fetch<kUnroll * kStepBytes>(panel);
    ahead.step();
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) {
      const Weights b_left(_mm512_load_si512(panel + k * kStepBytes));
      const Weights b_right(_mm512_load_si512(panel + k * kStepBytes + 64));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const Products x(_mm512_set1_epi32(quads[k * kRows + row]));
        left[row] = x.add_to(left[row], b_left);
        right[row] = x.add_to(right[row], b_right);
      }
    }
    panel += kUnroll * kStepBytes;
    quads += kUnroll * kRows;
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_si512(tile + row * kPanelWidth, left[row]);
    _mm512_store_si512(tile + row * kPanelWidth + kHalfPanel, right[row]);
  }
  next = ahead;
}

// The integer side of `ElementIsa`, in groups of the same number of rows.
template <class ElementIsa, class Products, int kUnroll>
class CodesIsa {
 public:
  using Element = std::uint8_t;
  using Accumulator = std::int32_t;
  static constexpr int kMaxRows = ElementIsa::kMaxRows;
  static constexpr int kStreamRows = ElementIsa::kStreamRows;
  static constexpr bool kBlocked = false;

  ElementIsa& elements() { return elements_; }

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` times four of k, a multiple of 16; tile and panel
  // aligned.
  template <class Fetched = FetchedPages, class Ahead>
  static void multiply(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                       std::int32_t* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const std::uint8_t*, const std::int8_t*, std::int32_t*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{
          &multiply_code_rows<Products, kUnroll, kStreamRows, static_cast<int>(row) + 1, Fetched, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    kByRows[static_cast<std::size_t>(rows - 1)](steps, a, panel, tile, ahead);
  }

  static constexpr std::int64_t steps_ahead(int, std::int64_t steps) { return steps / kUnroll; }

 private:
  ElementIsa elements_;
};

}  // namespace ktc::avx512::inline KTC_UNIT
