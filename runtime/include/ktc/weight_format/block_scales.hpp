// How the scales of blocks lie in a panel, where several formats share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/shape.hpp"
#include "ktc/weight_format/fp16.hpp"

namespace ktc::weight_format {

inline void store_half(float value, std::uint8_t* stored) {
  const fp16 half(value);
  std::memcpy(stored, &half, sizeof(half));
}

// Of 32 codes the first sixteen are lower nibbles, the others the upper ones of the same bytes.
inline unsigned halved_nibble(const std::uint8_t* bytes, int k) {
  return bytes[k % 16] >> (k / 16 * 4) & 0xfu;
}

// A line of 32 halves in fp32.
inline void widen_halves(const std::byte* line, float* values) {
  const auto* halves = reinterpret_cast<const fp16*>(line);
  for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) values[lane] = static_cast<float>(halves[lane]);
}
inline void put_half(const std::uint8_t* stored, std::byte* line, std::int64_t lane) {
  std::memcpy(line + lane * 2, stored, 2);
}

// 32 weights with an fp16 scale, which a stored block begins with.
struct OneHalfScale {
  static constexpr int kWeights = 32;
  static constexpr int kScales = 1;
  static constexpr bool kMins = false;
  static constexpr std::int64_t kSpanBlocks = 1;
  static constexpr std::int64_t kHeadBytes = kPanelWidth * 2;
  static constexpr std::int64_t kBlockHeadBytes = kHeadBytes;

  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) { put_half(stored, head, lane); }
  static void scales(const std::byte* head, std::int64_t, float (*scale)[kPanelWidth], float*) {
    widen_halves(head, scale[0]);
  }
};

// 256 weights with an fp16 scale and an fp16 minimum; each 32 have six bits that multiply the one and six for the
// other. A stored block begins with the two halves and 12 bytes of sixes, which lie in a panel byte by byte: a plane of
// 32 outputs for each of the twelve.
struct ScalesAndMins {
  static constexpr int kWeights = 256;
  static constexpr int kScales = 1;
  static constexpr bool kMins = true;
  static constexpr std::int64_t kSpanBlocks = 8;
  static constexpr std::int64_t kPlanes = 12;
  static constexpr std::int64_t kHeadBytes = 2 * kPanelWidth * 2 + kPlanes * kPanelWidth;
  static constexpr std::int64_t kBlockHeadBytes = 0;

  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    put_half(stored, head, lane);
    put_half(stored + 2, head + kMinsAt, lane);
    for (std::int64_t plane = 0; plane < kPlanes; ++plane) {
      head[kPlanesAt + plane * kPanelWidth + lane] = static_cast<std::byte>(stored[4 + plane]);
    }
  }
  static void scales(const std::byte* head, std::int64_t block, float (*scale)[kPanelWidth], float* min) {
    widen_halves(head, scale[0]);
    widen_halves(head + kMinsAt, min);
    const auto* planes = reinterpret_cast<const std::uint8_t*>(head + kPlanesAt) + block % 4 * kPanelWidth;
    const std::uint8_t* for_scale = planes;
    const std::uint8_t* for_min = planes + 4 * kPanelWidth;
    const std::uint8_t* lower = planes + 8 * kPanelWidth;  // of the last four: four bits of either
    if (block < 4) {
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        scale[0][lane] *= static_cast<float>(for_scale[lane] & 0x3f);
        min[lane] *= static_cast<float>(for_min[lane] & 0x3f);
      }
      return;
    }
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
      scale[0][lane] *= static_cast<float>((lower[lane] & 0xf) | (for_scale[lane] >> 2 & 0x30));
      min[lane] *= static_cast<float>((lower[lane] >> 4) | (for_min[lane] >> 2 & 0x30));
    }
  }

 private:
  static constexpr std::int64_t kMinsAt = kPanelWidth * 2;
  static constexpr std::int64_t kPlanesAt = 2 * kMinsAt;
};

}  // namespace ktc::weight_format
