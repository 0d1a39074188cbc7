// MXFP4: 4-bit floats (two bits of exponent, one of significand), 32 with a power of two. 4.25 bits per weight.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct MXFP4 {
  static constexpr const char* kName = "mxfp4";
  static constexpr int kBits = 4;
  static constexpr int kWeights = 32;
  static constexpr int kStoredBytes = 17;  // exponent, codes of weights 0 and 16, 1 and 17, ...
  static constexpr int kScales = 1;
  static constexpr bool kMins = false;
  static constexpr bool kQuantises = true;
  using Span = void;
  static constexpr std::int64_t kSpanBlocks = 2;  // whose exponents fill a line
  static constexpr std::int64_t kBlockHeadBytes = kPanelWidth;
  static constexpr std::int64_t kHeadBytes = kSpanBlocks * kBlockHeadBytes;

  // Twice the value of the code, which makes it an integer; the scale is half of the power of two.
  static constexpr float number(unsigned code) { return kNumbers[code]; }
  static unsigned code(const std::uint8_t* stored, int k) { return halved_nibble(stored + 1, k); }

  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    head[lane] = static_cast<std::byte>(stored[0]);
  }
  static void scales(const std::byte* head, std::int64_t block, float (*scale)[kPanelWidth], float*) {
    const auto* exponents = reinterpret_cast<const std::uint8_t*>(head) + block * kBlockHeadBytes;
    std::uint32_t bits[kPanelWidth];
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) bits[lane] = half_power_bits(exponents[lane]);
    std::memcpy(scale[0], bits, sizeof(bits));
  }

  static void quantise(const float* weights, std::uint8_t* stored) {
    float largest = 0;
    for (int k = 0; k < kWeights; ++k) largest = std::max(largest, std::abs(weights[k]));
    const float exponent = largest > 0 ? std::floor(std::log2(largest)) - 2 + 127 : 0;
    stored[0] = static_cast<std::uint8_t>(std::clamp(exponent, 0.0f, 254.0f));
    const float scale = half_power(stored[0]);
    const auto code = [&](int k) {  // the nearest, of two the lower code
      std::uint8_t best = 0;
      float least = std::abs(weights[k]);
      for (unsigned candidate = 1; candidate < 16; ++candidate) {
        const float error = std::abs(scale * number(candidate) - weights[k]);
        if (error < least) least = error, best = static_cast<std::uint8_t>(candidate);
      }
      return best;
    };
    for (int k = 0; k < kWeights / 2; ++k) {
      stored[1 + k] = static_cast<std::uint8_t>(code(k) | code(k + kWeights / 2) << 4);
    }
  }

 private:
  static constexpr std::array<float, 16> kNumbers = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

  // 2^(exponent - 128): the two smallest are denormals.
  static std::uint32_t half_power_bits(std::uint32_t exponent) {
    return exponent < 2 ? 0x00200000u * (exponent + 1) : (exponent - 1) << 23;
  }
  static float half_power(std::uint32_t exponent) { return std::bit_cast<float>(half_power_bits(exponent)); }
};
using MXFP4Panel = BlockPanel<MXFP4>;

}  // namespace ktc::weight_format::inline KTC_UNIT
