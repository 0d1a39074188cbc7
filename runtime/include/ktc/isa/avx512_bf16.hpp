// AVX-512 with VDPBF16PS: two bf16 products per fp32 lane and instruction. For every setting of MXCSR that instruction
// rounds to nearest even and reads and writes denormals as zero.
#pragma once

#include <immintrin.h>

#include <bit>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/isa/avx512_bf16_pairs.hpp"
#include "ktc/isa/avx512_bf16_words.hpp"
#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/isa/avx512_rows.hpp"
#include "ktc/isa/avx512_transpose.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

struct Rounding {
  static __m256i to_bf16(__m512 x) { return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
};
using Lanes = avx512::Lanes<Rounding>;

// A pair of bf16 for each sum. 2 registers of a panel's step and 1 of a row's beside 24 sums leave 5 of 32 free, and a
// load of the panel feeds 12 instructions.
class PairProducts {
 public:
  using Row = bf16;
  using Weight = bf16;
  using Sum = float;
  using Register = __m512;
  using Fetched = FetchedPages;
  static constexpr int kUnroll = 4;

  class Weights {
   public:
    explicit Weights(__m512i pairs) : pairs_(std::bit_cast<__m512bh>(pairs)) {}

   private:
    friend class PairProducts;
    __m512bh pairs_;
  };

  explicit PairProducts(__m512i pair) : pair_(std::bit_cast<__m512bh>(pair)) {}

  [[gnu::always_inline]] void add_to(__m512& left, __m512& right, const Weights& b_left, const Weights& b_right) const {
    left = _mm512_dpbf16_ps(left, pair_, b_left.pairs_);
    right = _mm512_dpbf16_ps(right, pair_, b_right.pairs_);
  }

 private:
  __m512bh pair_;
};

struct Isa : avx512::RowKernel<PairProducts> {
  using Lanes = avx512_bf16::Lanes;
  using Words = avx512_bf16::Words;
  template <class Stored, int kRows, int kColumns>
  using DotSums = std::conditional_t<std::is_same_v<Stored, bf16>, avx512_bf16::DotSums<kRows, kColumns>,
                                     LaneDots<Isa, Stored, kRows, kColumns>>;
  template <int kRows, int kUnits>
  using WeightedSums = avx512_bf16::WeightedSums<kRows, kUnits>;
  static constexpr bool kBf16Products = true;
  // Sums of a group, sums of all groups, a table and a broadcast value of this many rows fit 32 registers.
  static constexpr int kCodeRows = 6;
  static constexpr int kWordRows = 0;
  static constexpr int kNumberRows = 0;
  static constexpr int kFp32Rows = 12;
  static constexpr int kFp32Halves = 2;

  static void require() {}

  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    avx512::transpose_piece(source, target, piece);
  }
};
static_assert(InstructionSet<Isa>);

}  // namespace ktc::avx512_bf16::inline KTC_UNIT
