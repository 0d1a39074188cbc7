// Products of keys' codes with AVX-512 but not VNNI.
#pragma once

#include <immintrin.h>

#include "ktc/isa/avx512.hpp"
#include "ktc/isa/avx512_key_products.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/top_positions.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

struct AddWords {
  static constexpr std::int64_t kNibbleGroups = kNibbleGroupsInWords;

  [[gnu::always_inline]] static __m512i products(__m512i sum, __m512i codes, __m512i query) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(codes, query));
  }
  [[gnu::always_inline]] static __m512i widened(__m512i sum) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(1)); }
};

}  // namespace ktc::avx512::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct KeyDots<avx512::Isa> : avx512::KeyProducts<avx512::AddWords> {};

template <>
struct ScoreLanes<avx512::Isa> : avx512::ScoreLanes {};

}  // namespace ktc::inline KTC_UNIT
