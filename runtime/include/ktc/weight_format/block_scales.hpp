// The layouts of blocks' scales in a panel that several formats share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ktc::weight_format::inline KTC_UNIT {

inline void store_half(float value, std::uint8_t* stored) {
  const fp16 half(value);
  std::memcpy(stored, &half, sizeof(half));
}

// The first sixteen of 32 codes are the lower nibbles, the others the upper nibbles of the same bytes.
inline unsigned halved_nibble(const std::uint8_t* bytes, int k) {
  return bytes[k % 16] >> (k / 16 * 4) & 0xfu;
}

// A line of 32 halves in fp32.
inline void widen_halves(const std::byte* line, float* values) {
#if defined(__AVX512F__)
  const __m512i halves = _mm512_loadu_si512(line);
  _mm512_storeu_ps(values, _mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
  _mm512_storeu_ps(values + kHalfPanel, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
#elif defined(__F16C__)
  for (std::int64_t eight = 0; eight < kPanelWidth; eight += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 2 * eight));
    _mm256_storeu_ps(values + eight, _mm256_cvtph_ps(halves));
  }
#else
  const auto* halves = reinterpret_cast<const fp16*>(line);
  for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) values[lane] = static_cast<float>(halves[lane]);
#endif
}

// A line of 32 halves in fp32, each times an integer of a byte.
template <class Byte>
void widen_products(const std::byte* line, const Byte* factors, float* values) {
#if defined(__AVX512F__)
  for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
    const __m512 halves = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 2 * half)));
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(factors + half));
    const __m512i wide = std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
    _mm512_storeu_ps(values + half, _mm512_mul_ps(halves, _mm512_cvtepi32_ps(wide)));
  }
#elif defined(__F16C__)
  for (std::int64_t eight = 0; eight < kPanelWidth; eight += 8) {
    const __m256 halves = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 2 * eight)));
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(factors + eight));
    const __m256i wide = std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    _mm256_storeu_ps(values + eight, _mm256_mul_ps(halves, _mm256_cvtepi32_ps(wide)));
  }
#else
  widen_halves(line, values);
  for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) values[lane] *= static_cast<float>(factors[lane]);
#endif
}

inline void put_half(const std::uint8_t* stored, std::byte* line, std::int64_t lane) {
  std::memcpy(line + lane * 2, stored, 2);
}

// 32 weights with an fp16 scale, at the start of a stored block.
struct OneHalfScale {
  static constexpr int kWeights = 32;
  static constexpr int kScales = 1;
  static constexpr bool kMins = false;
  static constexpr bool kQuantises = true;
  using Span = void;
  static constexpr std::int64_t kSpanBlocks = 1;
  static constexpr std::int64_t kHeadBytes = kPanelWidth * 2;
  static constexpr std::int64_t kBlockHeadBytes = kHeadBytes;

  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) { put_half(stored, head, lane); }
  static void scales(const std::byte* head, std::int64_t, float (*scale)[kPanelWidth], float*) {
    widen_halves(head, scale[0]);
  }
};

// 256 weights with an fp16 scale and an fp16 minimum; each 32 have six bits that multiply the one and six for the
// other. A stored block begins with the two halves and 12 bytes of sixes. A panel stores these byte by byte: a plane of
// 32 outputs for each of the twelve.
struct ScalesAndMins {
  static constexpr int kWeights = 256;
  static constexpr int kScales = 1;
  static constexpr bool kMins = true;
  static constexpr bool kQuantises = false;
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
  [[gnu::always_inline]] static void scales(const std::byte* head, std::int64_t block, float (*scale)[kPanelWidth],
                                            float* min) {
    const auto* planes = reinterpret_cast<const std::uint8_t*>(head + kPlanesAt) + block % 4 * kPanelWidth;
    const std::uint8_t* for_scale = planes;
    const std::uint8_t* for_min = planes + 4 * kPanelWidth;
    const std::uint8_t* lower = planes + 8 * kPanelWidth;  // of the last four: four bits of either
    alignas(32) std::uint8_t six[2][kPanelWidth];
    if (block < 4) {
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        six[0][lane] = for_scale[lane] & 0x3f;
        six[1][lane] = for_min[lane] & 0x3f;
      }
    } else {
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        six[0][lane] = static_cast<std::uint8_t>((lower[lane] & 0xf) | (for_scale[lane] >> 2 & 0x30));
        six[1][lane] = static_cast<std::uint8_t>(lower[lane] >> 4 | (for_min[lane] >> 2 & 0x30));
      }
    }
    widen_products(head, six[0], scale[0]);
    widen_products(head + kMinsAt, six[1], min);
  }

  // The same of all blocks of a span: what they share is computed once. Products of one row with codes take so little
  // time that the scales of each block alone would be a quarter of it.
  class Span {
   public:
    explicit Span(const std::byte* head) {
      widen_halves(head, half_[0]);
      widen_halves(head + kMinsAt, half_[1]);
      const auto* planes = reinterpret_cast<const std::uint8_t*>(head + kPlanesAt);
      for (std::int64_t block = 0; block < 4; ++block) {
        const std::uint8_t* for_scale = planes + block * kPanelWidth;
        const std::uint8_t* for_min = for_scale + 4 * kPanelWidth;
        const std::uint8_t* lower = for_scale + 8 * kPanelWidth;
        for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
          six_[block][0][lane] = for_scale[lane] & 0x3f;
          six_[block][1][lane] = for_min[lane] & 0x3f;
          six_[block + 4][0][lane] = static_cast<std::uint8_t>((lower[lane] & 0xf) | (for_scale[lane] >> 2 & 0x30));
          six_[block + 4][1][lane] = static_cast<std::uint8_t>(lower[lane] >> 4 | (for_min[lane] >> 2 & 0x30));
        }
      }
    }

    // Of one vector of outputs, from `lane` on.
    template <class Words>
    typename Words::Floats scale(std::int64_t block, int, std::int64_t lane) const {
      return product<Words>(block, 0, lane);
    }
    template <class Words>
    typename Words::Floats min(std::int64_t block, std::int64_t lane) const {
      return product<Words>(block, 1, lane);
    }

   private:
    template <class Words>
    typename Words::Floats product(std::int64_t block, int which, std::int64_t lane) const {
      return Words::product(Words::load(half_[which] + lane), Words::from_bytes(six_[block][which] + lane));
    }

    alignas(64) float half_[2][kPanelWidth];
    alignas(64) std::uint8_t six_[kSpanBlocks][2][kPanelWidth];
  };

 private:
  static constexpr std::int64_t kMinsAt = kPanelWidth * 2;
  static constexpr std::int64_t kPlanesAt = 2 * kMinsAt;
};

}  // namespace ktc::weight_format::inline KTC_UNIT
