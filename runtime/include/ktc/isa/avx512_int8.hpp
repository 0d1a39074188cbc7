// Integer products with AVX-512 but not VNNI: as with AVX2, bytes are widened to words, which VPMADDWD multiplies
// exactly.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/isa/avx512.hpp"
#include "ktc/isa/avx512_rows.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

// One panel vector of four neighbours of k, widened: the even ones and the odd ones.
class WidenedBytes {
 public:
  using Row = std::uint8_t;
  using Weight = std::int8_t;
  using Sum = std::int32_t;
  using Register = __m512i;
  using Fetched = FetchedPages;
  static constexpr int kUnroll = 1;

  class Weights {
   public:
    explicit Weights(__m512i codes)
        : even_(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8)), odd_(_mm512_srai_epi16(codes, 8)) {}

   private:
    friend class WidenedBytes;
    __m512i even_;
    __m512i odd_;
  };

  explicit WidenedBytes(__m512i codes)
      : even_(_mm512_and_si512(codes, _mm512_set1_epi16(0x00ff))), odd_(_mm512_srli_epi16(codes, 8)) {}

  [[gnu::always_inline]] void add_to(__m512i& left, __m512i& right, const Weights& b_left,
                                     const Weights& b_right) const {
    left = sum_with(left, b_left);
    right = sum_with(right, b_right);
  }

 private:
  [[gnu::always_inline]] __m512i sum_with(__m512i sum, const Weights& weights) const {
    const __m512i with_even = _mm512_add_epi32(sum, _mm512_madd_epi16(even_, weights.even_));
    return _mm512_add_epi32(with_even, _mm512_madd_epi16(odd_, weights.odd_));
  }

  __m512i even_;
  __m512i odd_;
};

using IntegerIsa = BesideElements<RowKernel<WidenedBytes>, Isa>;
static_assert(IntegerKernel<IntegerIsa>);

}  // namespace ktc::avx512::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct IntegerIsa<avx512::Isa> {
  using type = avx512::IntegerIsa;
};

}  // namespace ktc::inline KTC_UNIT
