// Vectors of 16-bit words with AVX2, of 8 outputs with two neighbours of k each: see `code_words.hpp`.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/isa/words_of.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx2::inline KTC_UNIT {

struct WordRegisters {
  using Vector = __m256i;
  using Floats = __m256;
  static constexpr int kOutputs = 8;

  static Vector load(const std::byte* words) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(words)); }
  static Vector widened(const std::byte* bytes) {
    return _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  static void store(Vector words, std::byte* target) { _mm256_store_si256(reinterpret_cast<__m256i*>(target), words); }
  static Vector all(std::int16_t word) { return _mm256_set1_epi16(word); }
  static Vector right(Vector words, int bits) { return _mm256_srli_epi16(words, bits); }
  static Vector left(Vector words, int bits) { return _mm256_slli_epi16(words, bits); }
  static Vector both(Vector a, Vector b) { return _mm256_and_si256(a, b); }
  static Vector difference(Vector a, Vector b) { return _mm256_sub_epi16(a, b); }
  static Vector joined(Vector mask, Vector a, Vector b) { return _mm256_or_si256(_mm256_and_si256(mask, a), b); }
  static Vector looked_up(const std::uint8_t* table, Vector bytes) {
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), bytes);
  }

  static Vector sums(std::int32_t value) { return _mm256_set1_epi32(value); }
  static Vector pairs(std::int32_t two_words) { return _mm256_set1_epi32(two_words); }
  static Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
  static Vector add_words(Vector a, Vector b) { return _mm256_add_epi16(a, b); }
  static Vector products(Vector a, Vector b) { return _mm256_madd_epi16(a, b); }
  static Vector byte_products(Vector a, Vector b) { return _mm256_maddubs_epi16(a, b); }

  static Floats to_floats(Vector sums) { return _mm256_cvtepi32_ps(sums); }
  static Floats all(float value) { return _mm256_set1_ps(value); }
  static Floats load(const float* values) { return _mm256_loadu_ps(values); }
  static Floats load(const bf16* values) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Floats from_bytes(const std::uint8_t* values) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  static Floats from_bytes(const std::int8_t* values) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  static void store(Floats values, float* target) { _mm256_storeu_ps(target, values); }
  static Floats product(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats add_product(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Floats subtract_product(Floats a, Floats b, Floats sum) { return _mm256_fnmadd_ps(a, b, sum); }
};

using Words = WordsOf<WordRegisters>;

}  // namespace ktc::avx2::inline KTC_UNIT
