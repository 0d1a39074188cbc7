// The words of `avx512_words.hpp` with VNNI: products of words, and of bytes, are added in the instruction that
// multiplies them. Every processor with bf16 products has it.
#pragma once

#include <immintrin.h>

#include "ktc/isa/avx512_words.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

struct Words : avx512::Words {
  static Vector add_products(Vector sums, Vector a, Vector b) { return _mm512_dpwssd_epi32(sums, a, b); }
  static Vector add_products_in_order(Vector sums, Vector a, Vector b) { return add_products(sums, a, b); }

  // Four neighbours of k for a sum.
  static constexpr int kByteSumBits = 32;
  static Vector add_byte_products(Vector sums, Vector a, Vector b) { return _mm512_dpbusd_epi32(sums, a, b); }
  static Vector add_byte_sums(Vector sums, Vector upper, Vector lower) {
    return _mm512_add_epi32(sums, _mm512_sub_epi32(_mm512_slli_epi32(upper, 8), lower));
  }
};

}  // namespace ktc::avx512_bf16::inline KTC_UNIT
