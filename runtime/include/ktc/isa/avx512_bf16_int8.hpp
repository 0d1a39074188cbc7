// Integer products with VNNI, which every CPU with AVX512-BF16 has: VPDPBUSD adds four products per lane.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/isa/avx512_rows.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

class ByteProducts {
 public:
  using Row = std::uint8_t;
  using Weight = std::int8_t;
  using Sum = std::int32_t;
  using Register = __m512i;
  using Fetched = FetchedPages;
  static constexpr int kUnroll = 4;

  class Weights {
   public:
    explicit Weights(__m512i codes) : codes_(codes) {}

   private:
    friend class ByteProducts;
    __m512i codes_;
  };

  explicit ByteProducts(__m512i codes) : codes_(codes) {}

  [[gnu::always_inline]] void add_to(__m512i& left, __m512i& right, const Weights& b_left,
                                     const Weights& b_right) const {
    left = _mm512_dpbusd_epi32(left, codes_, b_left.codes_);
    right = _mm512_dpbusd_epi32(right, codes_, b_right.codes_);
  }

 private:
  __m512i codes_;
};

using IntegerIsa = BesideElements<avx512::RowKernel<ByteProducts>, Isa>;
static_assert(IntegerKernel<IntegerIsa>);

}  // namespace ktc::avx512_bf16::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct IntegerIsa<avx512_bf16::Isa> {
  using type = avx512_bf16::IntegerIsa;
};

}  // namespace ktc::inline KTC_UNIT
