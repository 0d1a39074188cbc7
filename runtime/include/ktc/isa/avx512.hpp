// AVX-512 without its bf16 products: bf16 is widened to fp32 by a shift or a mask, and multiplied there.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/isa/avx512_rows.hpp"
#include "ktc/isa/avx512_transpose.hpp"
#include "ktc/isa/avx512_words.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

struct IntegerRounding {
  // A NaN keeps its upper bits and becomes quiet.
  static __m256i to_bf16(__m512 x) {
    const __m512i word = _mm512_castps_si512(x);
    const __m512i upper = _mm512_srli_epi32(word, 16);
    const __m512i bias = _mm512_add_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(1)), _mm512_set1_epi32(0x7fff));
    const __m512i nearest = _mm512_srli_epi32(_mm512_add_epi32(word, bias), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(nearest, is_nan, upper, _mm512_set1_epi32(0x0040)));
  }
};

// Pairs of bf16 as fp32, the even ones and the odd ones: 4 registers of a panel's step, 2 of a row's and the mask fit
// beside 24 sums.
class WidenedBf16 {
 public:
  using Row = bf16;
  using Weight = bf16;
  using Sum = float;
  using Register = __m512;
  static constexpr int kUnroll = 2;

  // Three rows take long enough for a prefetch of each line, which is then faster: 10 % of an expert with four.
  struct Fetched {
    template <int kRows>
    using OfRows = std::conditional_t<kRows <= 2, FetchedPages, FetchedLines<0>>;
  };

  class Weights {
   public:
    explicit Weights(__m512i pairs) : even_(even(pairs)), odd_(odd(pairs)) {}

   private:
    friend class WidenedBf16;
    __m512 even_;
    __m512 odd_;
  };

  explicit WidenedBf16(__m512i pair) : even_(even(pair)), odd_(odd(pair)) {}

  // In this order, in which no product waits for the one before it.
  [[gnu::always_inline]] void add_to(__m512& left, __m512& right, const Weights& b_left, const Weights& b_right) const {
    left = _mm512_fmadd_ps(even_, b_left.even_, left);
    right = _mm512_fmadd_ps(even_, b_right.even_, right);
    left = _mm512_fmadd_ps(odd_, b_left.odd_, left);
    right = _mm512_fmadd_ps(odd_, b_right.odd_, right);
  }

 private:
  static __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static __m512 odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }

  __m512 even_;
  __m512 odd_;
};

struct Isa : RowKernel<WidenedBf16> {
  using Lanes = avx512::Lanes<IntegerRounding>;
  using Words = avx512::Words;
  template <class Stored, int kRows, int kColumns>
  using DotSums = LaneDots<Isa, Stored, kRows, kColumns>;
  static constexpr bool kBf16Products = false;
  // With 16 rows this takes less than two thirds of the time of decoding; a scratch panel has space for the converted
  // values of as many.
  static constexpr int kCodeRows = 16;
  static constexpr int kWordRows = 16;
  static constexpr int kNumberRows = 4;
  static constexpr int kFp32Rows = 12;
  static constexpr int kFp32Halves = 2;

  static void require() {}

  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    avx512::transpose_piece(source, target, piece);
  }
};
static_assert(InstructionSet<Isa>);

}  // namespace ktc::avx512::inline KTC_UNIT
