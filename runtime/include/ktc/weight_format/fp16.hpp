// fp16 weights, as checkpoints store them; computed with after rounding to bf16.
#pragma once

#include <cstdint>

#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct FP16 {
  static constexpr const char* kName = "f16";
  static constexpr int kBits = 16;
  static constexpr int kWeights = 1;
  static constexpr int kStoredBytes = 2;
  static constexpr int kScales = 0;
  static constexpr bool kMins = false;
  static constexpr bool kQuantises = true;
  using Span = void;
  static constexpr std::int64_t kSpanBlocks = 1;
  static constexpr std::int64_t kHeadBytes = 0;

  static float number(unsigned code) {
    fp16 half;
    half.bits = static_cast<std::uint16_t>(code);
    return static_cast<float>(half);
  }
  static unsigned code(const std::uint8_t* stored, int) { return stored[0] | static_cast<unsigned>(stored[1]) << 8; }
  static void quantise(const float* weights, std::uint8_t* stored) { store_half(*weights, stored); }
};
using FP16Panel = BlockPanel<FP16>;

}  // namespace ktc::weight_format::inline KTC_UNIT
