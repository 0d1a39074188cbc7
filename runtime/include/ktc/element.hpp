// The types a kernel stores and computes in.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The upper half of an fp32: storage only, every sum is in fp32.
struct bf16 {
  std::uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) {
      bits = static_cast<std::uint16_t>(word >> 16 | 0x0040);  // rounding could carry a NaN into an infinity
      return;
    }
    const std::uint32_t round_to_even = 0x7fff + (word >> 16 & 1);
    bits = static_cast<std::uint16_t>((word + round_to_even) >> 16);
  }
  explicit bf16(double value) : bf16(static_cast<float>(value)) {}
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  explicit operator double() const { return static_cast<float>(*this); }
};

// kDepth: the number of neighbours along the contraction that are stored side by side, because one multiply consumes
// them together.
template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<bf16> {
  using Accumulator = float;
  static constexpr int kDepth = 2;
};

template <>
struct ElementTraits<float> {
  using Accumulator = float;
  static constexpr int kDepth = 1;
};

template <>
struct ElementTraits<double> {
  using Accumulator = double;
  static constexpr int kDepth = 1;
};

template <class Element>
using AccumulatorOf = typename ElementTraits<Element>::Accumulator;

// Neighbours of k of one row, two of 16 bits or four of 8, read as one integer without a violation of the aliasing
// rules.
using Neighbours [[gnu::may_alias]] = std::int32_t;

}  // namespace ktc::inline KTC_UNIT
