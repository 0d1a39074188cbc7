// Q8_0: signed bytes, 32 with an fp16 scale. 8.5 bits per weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Q8_0 : OneHalfScale {
  static constexpr const char* kName = "q8_0";
  static constexpr int kBits = 8;
  static constexpr int kStoredBytes = 34;  // scale, codes

  static constexpr float number(unsigned code) { return static_cast<float>(static_cast<std::int8_t>(code)); }
  static unsigned code(const std::uint8_t* stored, int k) { return stored[2 + k]; }

  static void quantise(const float* weights, std::uint8_t* stored) {
    float largest = 0;
    for (int k = 0; k < kWeights; ++k) largest = std::max(largest, std::abs(weights[k]));
    const float scale = largest / 127;
    const float inverse = std::isnormal(scale) ? 1 / scale : 0;  // of smaller ones it overflows, and fp16 has zero
    store_half(scale, stored);
    for (int k = 0; k < kWeights; ++k) {
      // Halves away from zero.
      stored[2 + k] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::round(weights[k] * inverse)));
    }
  }
};
using Q8_0Panel = BlockPanel<Q8_0>;

}  // namespace ktc::weight_format::inline KTC_UNIT
