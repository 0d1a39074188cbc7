// Vectors of 16-bit words with AVX-512, of 16 outputs with two neighbours of k each: see `code_words.hpp`.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/isa/words_of.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

struct WordRegisters {
  using Vector = __m512i;
  using Floats = __m512;
  static constexpr int kOutputs = 16;

  static Vector load(const std::byte* words) { return _mm512_load_si512(words); }
  static Vector widened(const std::byte* bytes) {
    return _mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)));
  }
  static void store(Vector words, std::byte* target) { _mm512_store_si512(target, words); }
  static Vector all(std::int16_t word) { return _mm512_set1_epi16(word); }
  static Vector right(Vector words, int bits) { return _mm512_srli_epi16(words, static_cast<unsigned>(bits)); }
  static Vector left(Vector words, int bits) { return _mm512_slli_epi16(words, static_cast<unsigned>(bits)); }
  static Vector both(Vector a, Vector b) { return _mm512_and_si512(a, b); }
  static Vector difference(Vector a, Vector b) { return _mm512_sub_epi16(a, b); }
  static Vector joined(Vector mask, Vector a, Vector b) {
    constexpr int kAndOr = 0xea;  // (first and second) or third
    return _mm512_ternarylogic_epi32(mask, a, b, kAndOr);
  }
  static Vector looked_up(const std::uint8_t* table, Vector bytes) {
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), bytes);
  }

  static Vector sums(std::int32_t value) { return _mm512_set1_epi32(value); }
  static Vector pairs(std::int32_t two_words) { return _mm512_set1_epi32(two_words); }
  static Vector add(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
  static Vector add_words(Vector a, Vector b) { return _mm512_add_epi16(a, b); }
  static Vector products(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
  static Vector byte_products(Vector a, Vector b) { return _mm512_maddubs_epi16(a, b); }

  static Floats to_floats(Vector sums) { return _mm512_cvtepi32_ps(sums); }
  static Floats all(float value) { return _mm512_set1_ps(value); }
  static Floats load(const float* values) { return _mm512_loadu_ps(values); }
  static Floats load(const bf16* values) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static Floats from_bytes(const std::uint8_t* values) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  }
  static Floats from_bytes(const std::int8_t* values) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  static void store(Floats values, float* target) { _mm512_storeu_ps(target, values); }
  static Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats add_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Floats subtract_product(Floats a, Floats b, Floats sum) { return _mm512_fnmadd_ps(a, b, sum); }
};

using Words = WordsOf<WordRegisters>;

}  // namespace ktc::avx512::inline KTC_UNIT
