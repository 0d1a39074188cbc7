// Plain C++ on any element type: the oracle for the tests of the vector versions, and the one that runs on every CPU.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/math.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc::scalar::inline KTC_UNIT {

template <class Element>
class Lanes {
 public:
  using Scalar = AccumulatorOf<Element>;

  Lanes() = default;
  explicit Lanes(double value) { values_.fill(static_cast<Scalar>(value)); }

  static Lanes load(const Scalar* source) {
    return make([=](int lane) { return source[lane]; });
  }
  template <class Stored>
  static Lanes from_elements(const Stored* source) {
    if constexpr (std::is_same_v<Stored, double>) {
      return make([=](int lane) { return static_cast<Scalar>(source[lane]); });
    } else {
      return make([=](int lane) { return static_cast<float>(source[lane]); });
    }
  }
  static Lanes from_integers(const std::int32_t* sums, const std::int32_t* offsets) {
    return make([=](int lane) { return static_cast<Scalar>(sums[lane] - offsets[lane]); });
  }
  void store(Scalar* target) const {
    for (int lane = 0; lane < kHalfPanel; ++lane) target[lane] = values_[lane];
  }
  void to_codes(std::uint8_t* target) const {
    for (int lane = 0; lane < kHalfPanel; ++lane) {
      target[lane] = static_cast<std::uint8_t>(static_cast<int>(std::nearbyint(values_[lane])) + 128);
    }
  }
  void to_elements(Element* target) const {
    for (int lane = 0; lane < kHalfPanel; ++lane) target[lane] = Element(values_[lane]);
  }
  Scalar sum() const {
    Scalar total = 0;
    for (const Scalar value : values_) total += value;
    return total;
  }
  Scalar greatest() const {
    Scalar result = values_[0];
    for (const Scalar value : values_) result = greater(result, value);
    return result;
  }
  Scalar largest() const { return *std::max_element(values_.begin(), values_.end()); }
  static void store_sums(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d, Scalar* target) {
    for (const Lanes* lanes : {&a, &b, &c, &d}) *target++ = lanes->sum();
  }

  friend Lanes operator+(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return a.values_[lane] + b.values_[lane]; });
  }
  friend Lanes operator-(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return a.values_[lane] - b.values_[lane]; });
  }
  friend Lanes operator*(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return a.values_[lane] * b.values_[lane]; });
  }
  friend Lanes operator/(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return a.values_[lane] / b.values_[lane]; });
  }
  friend Lanes fused_multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) { return a * b + c; }
  friend Lanes larger(const Lanes& kept, const Lanes& x) {
    return make([&](int lane) { return kept.values_[lane] < x.values_[lane] ? x.values_[lane] : kept.values_[lane]; });
  }
  friend Lanes absolute(const Lanes& x) {
    return make([&](int lane) { return std::abs(x.values_[lane]); });
  }
  friend Lanes greater(const Lanes& a, const Lanes& b) {
    return make([&](int lane) { return greater(a.values_[lane], b.values_[lane]); });
  }
  friend Lanes of_bits(const Lanes& x) {
    return make([&](int lane) {
      const Scalar value = x.values_[lane];
      const auto low = Scalar(kLeastBits), high = Scalar(kMostBits);
      return std::bit_cast<float>(static_cast<std::int32_t>(value < low ? low : value <= high ? value : high));
    });
  }
  friend Lanes clamped(const Lanes& x, double low, double high) {
    return make([&](int lane) {
      const Scalar value = x.values_[lane];
      return value < Scalar(low) ? Scalar(low) : value > Scalar(high) ? Scalar(high) : value;
    });
  }
  friend Lanes zero_outside(double low, double high, const Lanes& x, const Lanes& value) {
    return make([&](int lane) {
      return x.values_[lane] >= Scalar(low) && x.values_[lane] <= Scalar(high) ? value.values_[lane] : Scalar{};
    });
  }
  friend Lanes zero_up_to(double bound, const Lanes& x, const Lanes& value) {
    return make([&](int lane) { return x.values_[lane] <= Scalar(bound) ? Scalar{} : value.values_[lane]; });
  }
  friend Lanes exp(const Lanes& x) {
    return make([&](int lane) { return std::exp(x.values_[lane]); });
  }
  friend Lanes erf(const Lanes& x) {
    return make([&](int lane) { return std::erf(x.values_[lane]); });
  }

 private:
  static Scalar greater(Scalar a, Scalar b) { return a <= b ? b : b < a ? a : a + b; }

  template <class Function>
  static Lanes make(Function function) {
    Lanes result;
    for (int lane = 0; lane < kHalfPanel; ++lane) result.values_[lane] = function(lane);
    return result;
  }

  std::array<Scalar, kHalfPanel> values_;
};

// Rows of one type with weights of another, in groups of the same neighbours of k.
template <class RowType, class WeightType>
struct RowKernel {
  using Element = RowType;
  using Weight = WeightType;
  using Accumulator = AccumulatorOf<Element>;
  static constexpr int kMaxRows = 4;
  static constexpr int kStreamRows = 0;
  static constexpr bool kBlocked = false;

  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const Element* a, const Weight* panel, Accumulator* tile,
                       Ahead& ahead) {
    ahead.step();
    constexpr int kDepth = ElementTraits<Element>::kDepth;
    std::fill(tile, tile + rows * kPanelWidth, Accumulator{});
    for (std::int64_t step = 0; step < steps; ++step) {
      for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < kDepth; ++k) {
          const auto value = static_cast<Accumulator>(a[row * kDepth + k]);
          for (int lane = 0; lane < kPanelWidth; ++lane) {
            tile[row * kPanelWidth + lane] += value * static_cast<Accumulator>(panel[lane * kDepth + k]);
          }
        }
      }
      a += rows * kDepth;
      panel += kPanelWidth * kDepth;
    }
  }

  static constexpr std::int64_t steps_ahead(int, std::int64_t) { return 1; }
};

template <class Element>
struct Isa : RowKernel<Element, Element> {
  using Lanes = scalar::Lanes<Element>;
  using Words = NoWords;
  template <class Stored, int kRows, int kColumns>
  using DotSums = LaneDots<Isa, Stored, kRows, kColumns>;
  static constexpr bool kBf16Products = false;
  static constexpr int kCodeRows = 0;
  static constexpr int kWordRows = 0;
  static constexpr int kNumberRows = 0;
  static constexpr int kFp32Rows = 4;
  static constexpr int kFp32Halves = 2;

  static void require() {}

  static void transpose_piece(const Element* source, Element* target, unsigned piece) {
    constexpr int kRows = kPanelWidth / weight_format::kBlockPieces;
    for (std::int64_t k = piece * kRows; k < (piece + 1) * kRows; ++k) {
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        target[weight_format::panel_offset<Element>(k, lane)] = source[weight_format::panel_offset<Element>(lane, k)];
      }
    }
  }
};
static_assert(InstructionSet<Isa<bf16>> && InstructionSet<Isa<float>> && InstructionSet<Isa<double>>);

}  // namespace ktc::scalar::inline KTC_UNIT
