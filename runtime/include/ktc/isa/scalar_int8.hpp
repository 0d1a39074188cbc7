// Integer products in plain C++: the vector versions must equal them to the last bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/isa/integer.hpp"
#include "ktc/isa/scalar.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::scalar::inline KTC_UNIT {

template <class ElementType>
class IntegerIsa {
 public:
  using Element = std::uint8_t;
  using Accumulator = std::int32_t;
  static constexpr int kMaxRows = Isa<ElementType>::kMaxRows;
  static constexpr int kStreamRows = 0;
  static constexpr bool kBlocked = false;

  Isa<ElementType>& elements() { return elements_; }

  // tile[row][32] = sum over k of a[k][row] * panel[k][32], for `steps` groups of four neighbours of k.
  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel,
                       std::int32_t* tile, Ahead& ahead) {
    ahead.step();
    constexpr int kDepth = ElementTraits<Element>::kDepth;
    std::fill(tile, tile + rows * kPanelWidth, 0);
    for (std::int64_t step = 0; step < steps; ++step) {
      for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < kDepth; ++k) {
          for (int lane = 0; lane < kPanelWidth; ++lane) {
            tile[row * kPanelWidth + lane] += a[row * kDepth + k] * panel[lane * kDepth + k];
          }
        }
      }
      a += rows * kDepth;
      panel += kPanelWidth * kDepth;
    }
  }

  static constexpr std::int64_t steps_ahead(int, std::int64_t) { return 1; }

 private:
  Isa<ElementType> elements_;
};

}  // namespace ktc::scalar::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <class Element>
struct IntegerIsa<scalar::Isa<Element>> {
  using type = scalar::IntegerIsa<Element>;
};

}  // namespace ktc::inline KTC_UNIT
