// Products of keys' codes with VNNI, which every CPU with AVX512-BF16 has.
#pragma once

#include <immintrin.h>

#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/isa/avx512_key_products.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/top_positions.hpp"

namespace ktc::avx512_bf16 {

struct AddBytes {
  [[gnu::always_inline]] static __m512i products(__m512i sum, __m512i codes, __m512i query) {
    return _mm512_dpbusd_epi32(sum, codes, query);
  }
};

}  // namespace ktc::avx512_bf16

namespace ktc {

template <>
struct KeyDots<avx512_bf16::Isa> : avx512::KeyProducts<avx512_bf16::AddBytes> {};

template <>
struct ScoreLanes<avx512_bf16::Isa> : avx512::ScoreLanes {};

}  // namespace ktc
