// Vectors of a cache's codes as words, for every ISA with AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/isa/avx512_words.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

template <class Words>
struct CacheWords : Words {
  using Vector = typename Words::Vector;
  using Words::load;
  using Sums = __v16si;  // and not of 64-bit lanes, which the compiler copies around each addition
  static Vector load(const std::int16_t* words) { return _mm512_loadu_si512(words); }
  static Vector widened(const std::int8_t* bytes) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
  }
  // Up to 32 bytes, zeros after them.
  static Vector widened(const std::int8_t* bytes, std::int64_t count) {
    const std::uint64_t there = count <= 0 ? 0 : count >= 32 ? 0xffffffff : (std::uint64_t{1} << count) - 1;
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(there), bytes));
  }
  static Vector low_pairs(Vector one, Vector other) { return _mm512_unpacklo_epi16(one, other); }
  static Vector high_pairs(Vector one, Vector other) { return _mm512_unpackhi_epi16(one, other); }
  static std::int32_t total(Vector sums) { return _mm512_reduce_add_epi32(sums); }
  static void store_totals(Vector a, Vector b, Vector c, Vector d, float* target) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i totals = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_ps(target, _mm_cvtepi32_ps(totals));
  }
  // 16 numbers times a factor, rounded to nearest even.
  static void to_words(const float* numbers, float factor, std::int16_t* words) {
    const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(numbers), _mm512_set1_ps(factor)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm512_cvtepi32_epi16(codes));
  }
};

}  // namespace ktc::avx512::inline KTC_UNIT
