// Asymmetric INT4, as AWQ, GPTQ and llm-compressor write it: a weight is scale x (code - zero point), of codes and zero
// points of 0 to 15, with both for 32, 64 or 128 weights of a row. 4.25 bits per weight in groups of 128.
//
// Checkpoints have the scale in fp16 or bf16. A block has it in the upper three bytes of an fp32, which hold either
// exactly, and the zero point in the byte below. All products of a scale are exact in fp32 then.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

template <int kGroup>
struct UInt4 {
  static constexpr const char* kName = kGroup == 32 ? "uint4_g32" : kGroup == 64 ? "uint4_g64" : "uint4_g128";
  static constexpr int kBits = 4;
  static constexpr int kWeights = kGroup;
  static constexpr int kStoredBytes = 4 + kGroup / 2;  // scale and zero point, codes of weights 0 and 16, 1 and 17, ...
  static constexpr int kScales = 1;
  static constexpr bool kMins = true;
  static constexpr bool kQuantises = false;
  using Span = void;
  static constexpr std::int64_t kSpanBlocks = kGroup / kPanelWidth;
  static constexpr std::int64_t kHeadBytes = kPanelWidth * 4;
  static constexpr std::int64_t kBlockHeadBytes = 0;
  static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128);

  static constexpr float number(unsigned code) { return static_cast<float>(code); }
  static unsigned code(const std::uint8_t* stored, int k) { return halved_nibble(stored + 4 + k / 32 * 16, k % 32); }

  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    std::memcpy(head + lane * 4, stored, 4);
  }
  static void scales(const std::byte* head, std::int64_t, float (*scale)[kPanelWidth], float* min) {
    alignas(64) std::uint32_t words[kPanelWidth];
    std::memcpy(words, head, sizeof(words));
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
      scale[0][lane] = std::bit_cast<float>(words[lane] & ~0xffu);
      min[lane] = scale[0][lane] * static_cast<float>(words[lane] & 0xffu);
    }
  }
};
template <int kGroup>
using UInt4Panel = BlockPanel<UInt4<kGroup>>;

}  // namespace ktc::weight_format::inline KTC_UNIT
