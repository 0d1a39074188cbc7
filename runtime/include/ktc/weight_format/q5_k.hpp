// Q5_K: codes of 0 to 31 in blocks of 256, with a scale and a minimum for each 32. 5.5 bits per weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Q5_K : ScalesAndMins {
  static constexpr const char* kName = "q5_k";
  static constexpr int kBits = 5;
  static constexpr int kStoredBytes = 176;  // scales; 32 bytes of fifth bits, one for each 32 codes; nibbles as Q4_K

  static constexpr float number(unsigned code) { return static_cast<float>(code); }
  static unsigned code(const std::uint8_t* stored, int k) {
    const unsigned low = stored[48 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 0xfu;
    return low | (stored[16 + k % 32] >> (k / 32) & 1u) << 4;
  }
};
using Q5_KPanel = BlockPanel<Q5_K>;

}  // namespace ktc::weight_format::inline KTC_UNIT
