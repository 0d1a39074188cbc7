// Codes to bf16, vector by vector, in the `Lanes` of an ISA. Every ISA gives the same bits: code x scale is computed in
// fp32, where it is exact or nearly so, and rounded once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// The factor by which the bits of an E4M3 number, as those of an fp16, are too small.
inline constexpr float kFp8AsHalf = 0x1p8f;

// The steps that an ISA may specialise; this version works on every ISA. A vector of 32 elements, 16 outputs with two
// neighbours of k each, is two `Lanes`.
template <class Lanes>
struct Decoding {
  using Scalar = typename Lanes::Scalar;

  // Of 8 outputs' scales, each twice.
  template <class Scale>
  static Lanes doubled(const Scale* scales) {
    alignas(64) Scalar values[kHalfPanel];
    for (int i = 0; i < kHalfPanel; ++i) values[i] = static_cast<float>(scales[i / 2]);
    return Lanes::load(values);
  }

  // Half a vector of a line: the values of its codes.
  static Lanes numbers(Int4, const std::byte* line, int vector, int half) {
    std::array<std::uint16_t, kHalfPanel> words;
    std::memcpy(words.data(), line + half * sizeof(words), sizeof(words));
    alignas(64) Scalar values[kHalfPanel];
    for (int i = 0; i < kHalfPanel; ++i) values[i] = static_cast<Scalar>((words[i] >> (4 * vector) & 0xf) - 8);
    return Lanes::load(values);
  }
  // 8-bit codes are in the order of the vector.
  template <class Code>
  static Lanes numbers(Code, const std::byte* line, int vector, int half) {
    const std::byte* codes = line + (2 * vector + half) * kHalfPanel;
    alignas(64) Scalar values[kHalfPanel];
    for (int i = 0; i < kHalfPanel; ++i) values[i] = Code::value(std::to_integer<std::uint8_t>(codes[i]));
    return Lanes::load(values);
  }
};

// Blocks [first, last) of a panel, as bf16 panels have them.
template <class Lanes, class Panel>
void decode_blocks(const std::byte* panel, std::int64_t first, std::int64_t last, bf16* target) {
  using Code = typename Panel::Code;
  using Scale = typename Panel::Scale;
  constexpr int kVectors = 16 / Code::kBits;  // of a line
  constexpr std::int64_t kLanes = kHalfPanel / 2;
  for (std::int64_t block = first; block < last;) {
    const auto* scales = reinterpret_cast<const Scale*>(panel + Panel::scales_at(block));
    const std::array<Lanes, 4> scale = {Decoding<Lanes>::doubled(scales), Decoding<Lanes>::doubled(scales + kLanes),
                                        Decoding<Lanes>::doubled(scales + 2 * kLanes),
                                        Decoding<Lanes>::doubled(scales + 3 * kLanes)};
    const std::byte* line = panel + Panel::codes_at(block);
    const std::int64_t end = std::min(last, (block / Panel::kGroupBlocks + 1) * Panel::kGroupBlocks);
    for (const std::byte* after = line + (end - block) * Panel::kBlockBytes; line < after; line += kLine) {
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half, target += kHalfPanel) {
          const Lanes numbers = Decoding<Lanes>::numbers(Code{}, line, vector, half);
          (numbers * scale[vector % 2 * 2 + half]).to_elements(target);
        }
      }
    }
    block = end;
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT

#if defined(__AVX512BW__)
#include "ktc/unit.hpp"
#include "ktc/weight_format/decode_avx512.hpp"
#endif
