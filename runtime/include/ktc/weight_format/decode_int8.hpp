// Codes of an `Int8Panel` to bf16 blocks, for backward: code x scale, rounded once, in the order of a bf16 panel.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/int8.hpp"

#if defined(__AVX512BW__)
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/unit.hpp"
#endif

namespace ktc::weight_format::inline KTC_UNIT {

// Of 8 outputs with four neighbours of k each, pair 0 or 1 of the neighbours.
template <class Lanes>
struct QuadDecoding {
  static Lanes pairs(const std::byte* quads, int pair) {
    alignas(64) typename Lanes::Scalar values[kHalfPanel];
    for (int i = 0; i < kHalfPanel; ++i) {
      values[i] = Int8::value(std::to_integer<std::uint8_t>(quads[i / 2 * 4 + pair * 2 + i % 2]));
    }
    return Lanes::load(values);
  }
};

#if defined(__AVX512BW__)
template <class Rounding>
struct QuadDecoding<avx512::Lanes<Rounding>> {
  static avx512::Lanes<Rounding> pairs(const std::byte* quads, int pair) {
    const __m256i stored = _mm256_load_si256(reinterpret_cast<const __m256i*>(quads));
    const __m128i codes = _mm256_cvtepi32_epi16(_mm256_srli_epi32(stored, 16 * pair));
    return avx512::Lanes<Rounding>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)));
  }
};
#endif

// Blocks [first, last) of a panel, as bf16 panels have them.
template <class Lanes, class Panel>
  requires std::same_as<Panel, Int8Panel>
void decode_blocks(const std::byte* panel, std::int64_t first, std::int64_t last, bf16* target) {
  constexpr std::int64_t kEight = kHalfPanel / 2;
  constexpr std::int64_t kQuadBytes = 4;
  const auto* scales = reinterpret_cast<const float*>(panel);
  const Lanes scale[4] = {Decoding<Lanes>::doubled(scales), Decoding<Lanes>::doubled(scales + kEight),
                          Decoding<Lanes>::doubled(scales + 2 * kEight), Decoding<Lanes>::doubled(scales + 3 * kEight)};
  const std::byte* const end = panel + Panel::codes_at(last);
  for (const std::byte* quads = panel + Panel::codes_at(first); quads < end; quads += kQuadBytes * kPanelWidth) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
#pragma GCC unroll 4
      for (int eight = 0; eight < 4; ++eight, target += kHalfPanel) {
        const Lanes numbers = QuadDecoding<Lanes>::pairs(quads + eight * kEight * kQuadBytes, pair);
        (numbers * scale[eight]).to_elements(target);
      }
    }
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
