// Products of a cache's codes with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ktc/isa/avx2.hpp"
#include "ktc/unit.hpp"
#include "ktc/word_code_products.hpp"

namespace ktc::avx2::inline KTC_UNIT {

struct CacheWords : Words {
  using Words::load;
  using Sums = __v8si;
  static Vector load(const std::int16_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); }
  static Vector widened(const std::int8_t* bytes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  // Up to 16 bytes, zeros after them.
  static Vector widened(const std::int8_t* bytes, std::int64_t count) {
    std::int8_t rest[16] = {};
    std::memcpy(rest, bytes, static_cast<std::size_t>(count < 0 ? 0 : count < 16 ? count : 16));
    return widened(rest);
  }
  static Vector low_pairs(Vector one, Vector other) { return _mm256_unpacklo_epi16(one, other); }
  static Vector high_pairs(Vector one, Vector other) { return _mm256_unpackhi_epi16(one, other); }
  static std::int32_t total(Vector sums) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  static void store_totals(Vector a, Vector b, Vector c, Vector d, float* target) {
    const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    const __m128i totals = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storeu_ps(target, _mm_cvtepi32_ps(totals));
  }
  // 16 numbers times a factor, rounded to nearest even.
  static void to_words(const float* numbers, float factor, std::int16_t* words) {
    const __m256i left = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(numbers), _mm256_set1_ps(factor)));
    const __m256i right = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(numbers + 8), _mm256_set1_ps(factor)));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(left, right), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), both);
  }
};

}  // namespace ktc::avx2::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct CacheCodeProducts<avx2::Isa> : WordCodeProducts<avx2::CacheWords, 4, 2, 1> {};

}  // namespace ktc::inline KTC_UNIT
