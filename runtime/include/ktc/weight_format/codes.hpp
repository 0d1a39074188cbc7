// What a stored code means: the number that is multiplied with its group's scale, and which code and scale stand for
// given weights. One type per quantised format; `QuantisedPanel` lays them out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "ktc/element.hpp"

namespace ktc::weight_format {

// Signed 4-bit integers, held as code + 8. The grid is symmetric, -7 to 7, of scales rounded to bf16 first, so that
// quantising the dequantised weights gives the same codes again; a checkpoint may use -8 as well.
struct Int4 {
  static constexpr const char* kName = "int4";
  static constexpr int kBits = 4;
  using Scale = bf16;

  static Scale scale_of(float largest) { return Scale(std::max(largest / 7.0f, 1e-5f)); }
  static std::uint8_t encode(float value, Scale scale) {
    const float quotient = std::nearbyint(value / static_cast<float>(scale));
    return static_cast<std::uint8_t>(static_cast<int>(std::clamp(quotient, -7.0f, 7.0f)) + 8);
  }
  static std::uint8_t from_stored(std::uint8_t byte) {
    const int code = static_cast<std::int8_t>(byte);
    if (code < -8 || code > 7) throw std::invalid_argument("an int4 code must be -8 to 7");
    return static_cast<std::uint8_t>(code + 8);
  }
  static float value(std::uint8_t code) { return static_cast<float>(code) - 8.0f; }
};

}  // namespace ktc::weight_format
