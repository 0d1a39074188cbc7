// Q4_1: codes of 0 to 15, 32 with an fp16 scale and an fp16 minimum that is added. 5 bits per weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Q4_1 {
  static constexpr const char* kName = "q4_1";
  static constexpr int kBits = 4;
  static constexpr int kWeights = 32;
  static constexpr int kStoredBytes = 20;  // scale, minimum, codes of weights 0 and 16, 1 and 17, ...
  static constexpr int kScales = 1;
  static constexpr bool kMins = true;
  static constexpr bool kQuantises = true;
  using Span = void;
  static constexpr std::int64_t kSpanBlocks = 1;
  static constexpr std::int64_t kMinsAt = kPanelWidth * 2;
  static constexpr std::int64_t kHeadBytes = 2 * kMinsAt;
  static constexpr std::int64_t kBlockHeadBytes = kHeadBytes;

  static constexpr float number(unsigned code) { return static_cast<float>(code); }
  static unsigned code(const std::uint8_t* stored, int k) { return halved_nibble(stored + 4, k); }

  // A panel holds the negated minimum, since kernels subtract minima.
  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    put_half(stored, head, lane);
    const std::uint8_t negated[] = {stored[2], static_cast<std::uint8_t>(stored[3] ^ 0x80)};
    put_half(negated, head + kMinsAt, lane);
  }
  static void scales(const std::byte* head, std::int64_t, float (*scale)[kPanelWidth], float* min) {
    widen_halves(head, scale[0]);
    widen_halves(head + kMinsAt, min);
  }

  static void quantise(const float* weights, std::uint8_t* stored) {
    const auto [least, largest] = std::minmax_element(weights, weights + kWeights);
    const float scale = (*largest - *least) / 15;
    const float inverse = std::isnormal(scale) ? 1 / scale : 0;  // of smaller ones it overflows, and fp16 has zero
    store_half(scale, stored);
    store_half(*least, stored + 2);
    const auto code = [&](int k) {
      const float shifted = (weights[k] - *least) * inverse + 0.5f;  // rounded thrice, as gguf does
      return static_cast<std::uint8_t>(std::clamp(static_cast<int>(shifted), 0, 15));
    };
    for (int k = 0; k < kWeights / 2; ++k) {
      stored[4 + k] = static_cast<std::uint8_t>(code(k) | code(k + kWeights / 2) << 4);
    }
  }
};
using Q4_1Panel = BlockPanel<Q4_1>;

}  // namespace ktc::weight_format::inline KTC_UNIT
