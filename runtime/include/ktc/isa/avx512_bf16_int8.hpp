// Integer products with VNNI, which every CPU with AVX512-BF16 has: VPDPBUSD adds four products per lane.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/isa/avx512_codes.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512_bf16::inline KTC_UNIT {

class VnniProducts {
 public:
  class Weights {
   public:
    explicit Weights(__m512i codes) : codes_(codes) {}

   private:
    friend class VnniProducts;
    __m512i codes_;
  };

  explicit VnniProducts(__m512i codes) : codes_(codes) {}

  [[gnu::always_inline]] __m512i add_to(__m512i sum, const Weights& weights) const {
    return _mm512_dpbusd_epi32(sum, codes_, weights.codes_);
  }

 private:
  __m512i codes_;
};

using IntegerIsa = avx512::CodesIsa<Isa, VnniProducts, 4>;

}  // namespace ktc::avx512_bf16::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct IntegerIsa<avx512_bf16::Isa> {
  using type = avx512_bf16::IntegerIsa;
};

}  // namespace ktc::inline KTC_UNIT
