// Q4_0: 4-bit codes of -8 to 7, 32 with an fp16 scale. 4.5 bits per weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Q4_0 : OneHalfScale {
  static constexpr const char* kName = "q4_0";
  static constexpr int kBits = 4;
  static constexpr int kStoredBytes = 18;  // scale, codes of weights 0 and 16, 1 and 17, ...

  static constexpr float number(unsigned code) { return static_cast<float>(static_cast<int>(code) - 8); }
  static unsigned code(const std::uint8_t* stored, int k) { return halved_nibble(stored + 2, k); }

  // The weight of largest magnitude becomes -8 exactly, for either sign.
  static void quantise(const float* weights, std::uint8_t* stored) {
    float largest = weights[0];
    for (int k = 1; k < kWeights; ++k) {
      if (std::abs(weights[k]) > std::abs(largest)) largest = weights[k];
    }
    const float scale = largest / -8;
    const float inverse = std::isnormal(scale) ? 1 / scale : 0;  // of smaller ones it overflows, and fp16 has zero
    store_half(scale, stored);
    const auto code = [&](int k) {
      const float shifted = weights[k] * inverse + 8.5f;  // rounded twice, as gguf does: see -ffp-contract
      return static_cast<std::uint8_t>(std::clamp(static_cast<int>(shifted), 0, 15));
    };
    for (int k = 0; k < kWeights / 2; ++k) {
      stored[2 + k] = static_cast<std::uint8_t>(code(k) | code(k + kWeights / 2) << 4);
    }
  }
};
using Q4_0Panel = BlockPanel<Q4_0>;

}  // namespace ktc::weight_format::inline KTC_UNIT
