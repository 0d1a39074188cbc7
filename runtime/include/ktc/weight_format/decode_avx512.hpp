// Codes to fp32 with AVX-512: widen, look up, multiply.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "ktc/element.hpp"
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/decode.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

template <class Rounding>
struct Decoding<avx512::Lanes<Rounding>> {
  using Lanes = avx512::Lanes<Rounding>;

  static Lanes doubled(const bf16* scales) {
    const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales));
    return pairs(_mm512_slli_epi64(_mm512_cvtepu16_epi64(stored), 16));
  }
  static Lanes doubled(const float* scales) {
    return pairs(_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales))));
  }

  static Lanes numbers(Int4, const std::byte* line, int vector, int half) {
    // VPERMPS reads the lowest four bits of an index, so nothing needs to be masked.
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + half);
    const __m512i nibbles = _mm512_srli_epi32(_mm512_cvtepu16_epi32(words), static_cast<unsigned>(4 * vector));
    return Lanes(_mm512_permutexvar_ps(nibbles, table));
  }
  static Lanes numbers(Fp8, const std::byte* line, int vector, int half) {
    return halves(line, vector, half) * Lanes(kFp8AsHalf);
  }
  // The same as fp16, whose exponent has another bias and which has the same denormals. The sign is extended into the
  // bit below it, which is removed.
  static Lanes halves(const std::byte* line, int vector, int half) {
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes(line, vector, half)), 7);
    return Lanes(_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbf80)))));
  }

 private:
  static __m128i codes(const std::byte* line, int vector, int half) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(line) + 2 * vector + half);
  }
  // Each even lane twice.
  static Lanes pairs(__m512i even) { return Lanes(_mm512_moveldup_ps(_mm512_castsi512_ps(even))); }
};

}  // namespace ktc::weight_format::inline KTC_UNIT
