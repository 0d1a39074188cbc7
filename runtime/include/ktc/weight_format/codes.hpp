// The meaning of stored codes: the number that is multiplied with its group's scale, and the code and scale of given
// weights. There is one type per quantised format; `QuantisedPanel` lays them out.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "ktc/element.hpp"
#include "ktc/unit.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

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

// Signed 8-bit integers, -127 to 127. `Int8Panel` lays these out.
struct Int8 {
  static constexpr const char* kName = "int8";

  static float scale_of(float largest) { return std::max(largest / 127.0f, kSmallest); }
  static std::uint8_t encode(float value, float scale) {
    const float quotient = std::clamp(std::nearbyint(value / scale), -127.0f, 127.0f);
    return static_cast<std::uint8_t>(static_cast<std::int8_t>(quotient));
  }
  static float value(std::uint8_t code) { return static_cast<float>(static_cast<std::int8_t>(code)); }

 private:
  static constexpr float kSmallest = 1e-12f;  // so that a row of zeros has a scale
};

// FP8 E4M3: four bits of exponent and three of significand, without infinities; the largest is 448.
struct Fp8 {
  static constexpr const char* kName = "fp8";
  static constexpr int kBits = 8;
  using Scale = float;

  static Scale scale_of(float largest) { return std::max(largest / 448.0f, 1e-12f); }
  static std::uint8_t encode(float value, Scale scale) {
    const float quotient = value / scale;
    const float magnitude = std::min(std::abs(quotient), 448.0f);
    const int exponent = std::max(std::ilogb(std::max(magnitude, 0x1p-6f)), -6);
    // Eighths of a power of two: a carry increments the exponent, and below 2^-6 they are the denormals.
    const int eighths = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
    const int code = (exponent + 6) * 8 + eighths;
    return static_cast<std::uint8_t>(code | (std::signbit(quotient) ? 0x80 : 0));
  }
  static std::uint8_t from_stored(std::uint8_t byte) {
    if ((byte & 0x7f) == 0x7f) throw std::invalid_argument("an fp8 code is not a number");
    return byte;
  }
  static float value(std::uint8_t code) { return kValues[code]; }

 private:
  static constexpr std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 0xf;
      float value = static_cast<float>((exponent == 0 ? 0 : 8) + (code & 7)) * 0x1p-9f;
      for (int doubled = 1; doubled < exponent; ++doubled) value *= 2;
      values[static_cast<std::size_t>(code)] = code & 0x80 ? -value : value;
    }
    return values;
  }();
};

}  // namespace ktc::weight_format::inline KTC_UNIT
