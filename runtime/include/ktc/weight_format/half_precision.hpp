// IEEE half precision: how checkpoints store weights and the scales of blocks. Nothing is computed in it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "ktc/unit.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct fp16 {
  std::uint16_t bits = 0;

  fp16() = default;
  // Rounds to nearest even. Throws std::invalid_argument for a value that becomes infinite.
  explicit fp16(float value) {
    const float magnitude = std::abs(value);
    if (!(magnitude < 65520.0f)) throw std::invalid_argument("a weight or scale is beyond the range of fp16");
    const int exponent = magnitude < 0x1p-14f ? -14 : std::ilogb(magnitude);
    // In units of the last of ten binary places; a carry increments the exponent, and fewer than 1024 of them are a
    // denormal.
    const auto places = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    bits = static_cast<std::uint16_t>((exponent + 14) * 1024 + places + (std::signbit(value) ? 0x8000 : 0));
  }
  // Rounds to nearest even; a value beyond the range becomes infinite, and NaN stays.
  static fp16 nearest(float value) {
    if (std::abs(value) < 65520.0f) return fp16(value);
    fp16 result;
    result.bits =
        static_cast<std::uint16_t>((std::isnan(value) ? 0x7e00 : 0x7c00) | (std::signbit(value) ? 0x8000 : 0));
    return result;
  }
  explicit operator float() const {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fff) << 13;
    // The exponents' biases differ by 112, which is correct for denormals too; infinities and NaN stay.
    const auto finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const std::uint32_t value = (bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite;
    return std::bit_cast<float>(value | static_cast<std::uint32_t>(bits & 0x8000) << 16);
  }
};

}  // namespace ktc::weight_format::inline KTC_UNIT
