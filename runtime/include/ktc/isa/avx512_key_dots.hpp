// Products of keys' codes with AVX-512 but not VNNI: VPMADDUBSW adds two in 16 bits, which codes below 16 never fill.
#pragma once

#include <immintrin.h>

#include "ktc/isa/avx512.hpp"
#include "ktc/isa/avx512_key_products.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/top_positions.hpp"

namespace ktc::avx512 {

struct AddWords {
  [[gnu::always_inline]] static __m512i products(__m512i sum, __m512i codes, __m512i query) {
    const __m512i pairs = _mm512_maddubs_epi16(codes, query);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
};

}  // namespace ktc::avx512

namespace ktc {

template <>
struct KeyDots<avx512::Isa> : avx512::KeyProducts<avx512::AddWords> {};

template <>
struct ScoreLanes<avx512::Isa> : avx512::ScoreLanes {};

}  // namespace ktc
