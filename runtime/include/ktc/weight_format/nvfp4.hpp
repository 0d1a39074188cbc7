// NVFP4: 4-bit floats (two bits of exponent, one of significand), 16 with an FP8 scale (E4M3), and an fp32 scale for
// the whole matrix. 4.75 bits per weight: a panel repeats the scale of the matrix for each output and 128 weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/mxfp4.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct NVFP4 {
  static constexpr const char* kName = "nvfp4";
  static constexpr int kBits = 4;
  static constexpr int kWeights = 32;
  static constexpr int kStoredBytes = 22;  // half the matrix's scale, two scales, codes of weights 0 and 16, ...
  static constexpr int kScales = 2;
  static constexpr bool kMins = false;
  static constexpr bool kQuantises = true;
  using Span = void;
  static constexpr std::int64_t kSpanBlocks = 4;
  static constexpr std::int64_t kSharedBytes = kPanelWidth * 4;
  static constexpr std::int64_t kBlockHeadBytes = kScales * kPanelWidth;
  static constexpr std::int64_t kHeadBytes = kSharedBytes + kSpanBlocks * kBlockHeadBytes;

  // Twice the value of the code, as for MXFP4; the scale of the matrix is stored halved.
  static constexpr float number(unsigned code) { return MXFP4::number(code); }
  static unsigned code(const std::uint8_t* stored, int k) { return halved_nibble(stored + 6, k); }

  static void put_shared(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    std::memcpy(head + lane * 4, stored, 4);
  }
  static void put_head(const std::uint8_t* stored, std::byte* head, std::int64_t lane) {
    for (std::int64_t group = 0; group < kScales; ++group) {
      head[kSharedBytes + group * kPanelWidth + lane] = static_cast<std::byte>(stored[4 + group]);
    }
  }
  static void scales(const std::byte* head, std::int64_t block, float (*scale)[kPanelWidth], float*) {
    const std::byte* eights = head + kSharedBytes + block * kBlockHeadBytes;
    for (std::int64_t group = 0; group < kScales; ++group) {
      widen_float8_products(eights + group * kPanelWidth, head, scale[group]);
    }
  }

  // With it, the largest scale of 16 weights is the largest number of FP8.
  static float matrix_scale(float largest) { return std::max(largest / (kLargest * kLargestScale), 0x1p-100f); }
  static void quantise(const float* weights, std::uint8_t* stored, float matrix) {
    const float half = matrix / 2;
    std::memcpy(stored, &half, sizeof(half));
    std::fill(stored + 6, stored + kStoredBytes, std::uint8_t{0});
    for (int group = 0; group < kScales; ++group) {
      const float* of_group = weights + group * kGroup;
      float largest = 0;
      for (int k = 0; k < kGroup; ++k) largest = std::max(largest, std::abs(of_group[k]));
      stored[4 + group] = Fp8::encode(largest / (kLargest * matrix), 1.0f);
      const float scale = Fp8::value(stored[4 + group]) * half;
      for (int k = 0; k < kGroup; ++k) {
        stored[6 + k] = static_cast<std::uint8_t>(stored[6 + k] | nearest(of_group[k], scale) << group * 4);
      }
    }
  }

 private:
  static constexpr int kGroup = 16;
  static constexpr float kLargest = 6, kLargestScale = 448;

  // The nearest code, of two the lower one.
  static unsigned nearest(float weight, float scale) {
    unsigned best = 0;
    float least = std::abs(weight);
    for (unsigned candidate = 1; candidate < 16; ++candidate) {
      const float error = std::abs(scale * number(candidate) - weight);
      if (error < least) least = error, best = candidate;
    }
    return best;
  }

  // A line of 32 numbers of FP8 in fp32, each times an fp32 number.
  static void widen_float8_products(const std::byte* line, const std::byte* factors, float* values) {
    constexpr float kOfHalf = 256;  // the bits of a number of FP8 in the places of fp16's are 2^-8 of it
#if defined(__AVX512F__)
    for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
      const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line + half)));
      const __m512 numbers = _mm512_mul_ps(_mm512_cvtph_ps(as_half(bytes)), _mm512_set1_ps(kOfHalf));
      _mm512_storeu_ps(values + half, _mm512_mul_ps(numbers, _mm512_loadu_ps(factors + 4 * half)));
    }
#elif defined(__AVX2__) && defined(__F16C__)
    for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
      const __m256i words =
          as_half(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line + half))));
      const __m128i quarters[] = {_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)};
      for (std::int64_t quarter = 0; quarter < 2; ++quarter) {
        const std::int64_t at = half + 8 * quarter;
        const __m256 numbers = _mm256_mul_ps(_mm256_cvtph_ps(quarters[quarter]), _mm256_set1_ps(kOfHalf));
        const __m256 of_matrix = _mm256_loadu_ps(reinterpret_cast<const float*>(factors + 4 * at));
        _mm256_storeu_ps(values + at, _mm256_mul_ps(numbers, of_matrix));
      }
    }
#else
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
      float of_matrix;
      std::memcpy(&of_matrix, factors + 4 * lane, sizeof(of_matrix));
      values[lane] = Fp8::value(std::to_integer<std::uint8_t>(line[lane])) * of_matrix;
    }
    static_cast<void>(kOfHalf);
#endif
  }

#if defined(__AVX2__)
  // Words that a byte was widened to with its sign, in the places of fp16's bits.
  static __m256i as_half(__m256i words) {
    const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(0x7f)), 7);
    return _mm256_or_si256(magnitude, _mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0x8000))));
  }
#endif
};
using NVFP4Panel = BlockPanel<NVFP4>;

}  // namespace ktc::weight_format::inline KTC_UNIT
