// Q6_K: codes of -32 to 31 in blocks of 256, with an fp16 scale and a signed byte for each 16 that multiplies it.
// 6.5625 bits per weight.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Q6_K {
  static constexpr const char* kName = "q6_k";
  static constexpr int kBits = 6;
  static constexpr int kWeights = 256;
  static constexpr int kStoredBytes = 210;  // nibbles, upper pairs of bits, 16 signed bytes, scale
  static constexpr int kScales = 2;
  static constexpr bool kMins = false;
  static constexpr bool kQuantises = false;
  static constexpr std::int64_t kSpanBlocks = 8;
  static constexpr std::int64_t kGroups = 16;
  static constexpr std::int64_t kHeadBytes = kPanelWidth * 2 + kGroups * kPanelWidth;
  static constexpr std::int64_t kBlockHeadBytes = 0;

  static constexpr float number(unsigned code) { return static_cast<float>(static_cast<int>(code) - 32); }
  static unsigned code(const std::uint8_t* stored, int k) {
    const int half = k / 128;
    const unsigned low = stored[half * 64 + k % 64] >> (k % 128 / 64 * 4) & 0xfu;
    return low | (stored[128 + half * 32 + k % 32] >> (k % 128 / 32 * 2) & 3u) << 4;
  }

  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    put_half(stored + 208, head, lane);
    for (std::int64_t group = 0; group < kGroups; ++group) {
      head[kFactorsAt + group * kPanelWidth + lane] = static_cast<std::byte>(stored[192 + group]);
    }
  }
  static void scales(const std::byte* head, std::int64_t block, float (*scale)[kPanelWidth], float*) {
    for (std::int64_t group = 0; group < kScales; ++group) {
      const auto* factors = reinterpret_cast<const std::int8_t*>(head + kFactorsAt) + (2 * block + group) * kPanelWidth;
      widen_products(head, factors, scale[group]);
    }
  }

  // The same of all blocks of a span, whose fp16 scales are widened once.
  class Span {
   public:
    explicit Span(const std::byte* head) : factors_(reinterpret_cast<const std::int8_t*>(head + kFactorsAt)) {
      widen_halves(head, half_);
    }

    // Of one vector of outputs, from `lane` on.
    template <class Words>
    typename Words::Floats scale(std::int64_t block, int group, std::int64_t lane) const {
      const std::int8_t* factors = factors_ + (kScales * block + group) * kPanelWidth + lane;
      return Words::product(Words::load(half_ + lane), Words::from_bytes(factors));
    }

   private:
    alignas(64) float half_[kPanelWidth];
    const std::int8_t* factors_;
  };

 private:
  static constexpr std::int64_t kFactorsAt = kPanelWidth * 2;
};
using Q6_KPanel = BlockPanel<Q6_K>;

}  // namespace ktc::weight_format::inline KTC_UNIT
