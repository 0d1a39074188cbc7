// Q4_K: codes of 0 to 15 in blocks of 256, with a scale and a minimum for each 32. 4.5 bits per weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Q4_K : ScalesAndMins {
  static constexpr const char* kName = "q4_k";
  static constexpr int kBits = 4;
  static constexpr int kStoredBytes = 144;  // scales; of each 64 codes the first 32 are lower nibbles

  static constexpr float number(unsigned code) { return static_cast<float>(code); }
  static unsigned code(const std::uint8_t* stored, int k) {
    return stored[16 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 0xfu;
  }
};
using Q4_KPanel = BlockPanel<Q4_K>;

}  // namespace ktc::weight_format::inline KTC_UNIT
