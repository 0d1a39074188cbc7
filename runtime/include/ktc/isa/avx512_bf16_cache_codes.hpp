// Products of a cache's codes with VNNI, which every CPU with AVX512-BF16 has: VPDPWSSD adds two products of words.
// VPDPBUSD would add four of bytes, but words are two of them, so it takes as many instructions and twice the sums.
#pragma once

#include <immintrin.h>

#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/isa/avx512_cache_words.hpp"
#include "ktc/unit.hpp"
#include "ktc/word_code_products.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

struct CacheWords : avx512::CacheWords {
  static Vector add_products(Vector sums, Vector a, Vector b) { return _mm512_dpwssd_epi32(sums, a, b); }
};

}  // namespace ktc::avx512_bf16::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct CacheCodeProducts<avx512_bf16::Isa> : WordCodeProducts<avx512_bf16::CacheWords, 4, 4, 2> {};

}  // namespace ktc::inline KTC_UNIT
