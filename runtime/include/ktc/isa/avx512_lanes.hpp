// Half a panel of fp32 in one register: the `Lanes` of every ISA that has AVX-512. `Rounding` gives bf16, to nearest
// even.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/math.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::avx512::inline KTC_UNIT {

// Two fp32 read as one double, without a violation of the aliasing rules.
using AnyDouble [[gnu::may_alias]] = double;

// The sums of four registers, in their order.
[[gnu::always_inline]] inline __m128 sums_of_four(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <class Rounding>
class Lanes {
 public:
  using Scalar = float;

  explicit Lanes(float value) : v_(_mm512_set1_ps(value)) {}
  explicit Lanes(__m512 v) : v_(v) {}

  static Lanes load(const float* source) { return Lanes(_mm512_loadu_ps(source)); }
  static Lanes from_elements(const bf16* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return Lanes(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
  static Lanes from_elements(const weight_format::fp16* source) {
    return Lanes(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source))));
  }
  // Two values again and again.
  static Lanes pairs(const float* two) {
    return Lanes(_mm512_castpd_ps(_mm512_set1_pd(*reinterpret_cast<const AnyDouble*>(two))));
  }
  static Lanes from_integers(const std::int32_t* sums, const std::int32_t* offsets) {
    return Lanes(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(offsets))));
  }
  void store(float* target) const { _mm512_storeu_ps(target, v_); }
  void to_elements(bf16* target) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), Rounding::to_bf16(v_));
  }
  void to_codes(std::uint8_t* target) const {
    const __m512i codes = _mm512_add_epi32(_mm512_cvtps_epi32(v_), _mm512_set1_epi32(128));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(codes));
  }
  float greatest() const {
    const unsigned bits = _mm512_reduce_max_epu32(_mm512_castps_si512(v_));
    return std::bit_cast<float>(bits);
  }
  float sum() const { return _mm512_reduce_add_ps(v_); }
  static void store_sums(Lanes a, Lanes b, Lanes c, Lanes d, float* target) {
    _mm_storeu_ps(target, sums_of_four(a.v_, b.v_, c.v_, d.v_));
  }
  float largest() const { return _mm512_reduce_max_ps(v_); }

  friend Lanes operator+(Lanes a, Lanes b) { return Lanes(_mm512_add_ps(a.v_, b.v_)); }
  friend Lanes operator-(Lanes a, Lanes b) { return Lanes(_mm512_sub_ps(a.v_, b.v_)); }
  friend Lanes operator*(Lanes a, Lanes b) { return Lanes(_mm512_mul_ps(a.v_, b.v_)); }
  friend Lanes operator/(Lanes a, Lanes b) { return Lanes(_mm512_div_ps(a.v_, b.v_)); }
  friend Lanes fused_multiply_add(Lanes a, Lanes b, Lanes c) { return Lanes(_mm512_fmadd_ps(a.v_, b.v_, c.v_)); }
  friend Lanes rounded(Lanes x) { return Lanes(_mm512_roundscale_ps(x.v_, _MM_FROUND_TO_NEAREST_INT)); }
  friend Lanes absolute(Lanes x) { return Lanes(_mm512_abs_ps(x.v_)); }
  // Of numbers that are not negative, the order is that of their bits.
  friend Lanes greater(Lanes a, Lanes b) {
    return Lanes(_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v_), _mm512_castps_si512(b.v_))));
  }
  // MAXPS and MINPS return their second operand when one is NaN.
  friend Lanes larger(Lanes kept, Lanes x) { return Lanes(_mm512_max_ps(x.v_, kept.v_)); }
  friend Lanes of_bits(Lanes x) {
    const __m512 bounded = _mm512_max_ps(_mm512_min_ps(x.v_, _mm512_set1_ps(kMostBits)), _mm512_set1_ps(kLeastBits));
    return Lanes(_mm512_castsi512_ps(_mm512_cvttps_epi32(bounded)));
  }
  friend Lanes times_power_of_two(Lanes x, Lanes n) { return Lanes(_mm512_scalef_ps(x.v_, n.v_)); }
  friend Lanes clamped(Lanes x, float low, float high) {
    return Lanes(_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), x.v_)));
  }
  friend Lanes zero_outside(float low, float high, Lanes x, Lanes value) {
    const __mmask16 from_low = _mm512_cmp_ps_mask(x.v_, _mm512_set1_ps(low), _CMP_GE_OQ);
    return Lanes(
        _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(from_low, x.v_, _mm512_set1_ps(high), _CMP_LE_OQ), value.v_));
  }
  friend Lanes zero_up_to(float bound, Lanes x, Lanes value) {
    return Lanes(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v_, _mm512_set1_ps(bound), _CMP_NLE_UQ), value.v_));
  }
  friend Lanes with_sign_of(Lanes magnitude, Lanes sign) {
    const __m512 sign_bit = _mm512_set1_ps(-0.0f);
    return Lanes(_mm512_or_ps(_mm512_andnot_ps(sign_bit, magnitude.v_), _mm512_and_ps(sign_bit, sign.v_)));
  }
  friend Lanes exp(Lanes x) { return exp_by_polynomial(x); }
  friend Lanes erf(Lanes x) { return erf_by_polynomial(x); }

 private:
  __m512 v_;
};

}  // namespace ktc::avx512::inline KTC_UNIT
