// Element-wise functions over an ISA's `Lanes`, in fp32 to about one unit in the last place. NaN stays NaN and exp
// overflows to infinity, as in PyTorch: a diverging model must look the same with and without the kernel.
#pragma once

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Of 2^-100 and 2^100 in fp32, as integers. Shares of the former are not denormal, which is slow, unless others
// weigh 2^26 times as much.
inline constexpr float kLeastBits = 27.0f * 8388608.0f;
inline constexpr float kMostBits = 227.0f * 8388608.0f;

// e^x: 2^n times a polynomial on [-ln2/2, ln2/2]. `Lanes` gives clamped (NaN passes), rounded, fused multiply-add
// and times_power_of_two.
template <class Lanes>
[[gnu::always_inline]] inline Lanes exp_by_polynomial(Lanes x) {
  constexpr float kOverflows = 105.0f;  // e^105 is infinite and e^-105 is zero in fp32; beyond it only NaN differs
  const Lanes bounded = clamped(x, -kOverflows, kOverflows);
  const Lanes n = rounded(bounded * Lanes(1.44269504f));
  const Lanes high_part = fused_multiply_add(n, Lanes(-0.693145752f), bounded);  // ln 2 in two parts: n * high is exact
  const Lanes f = fused_multiply_add(n, Lanes(-1.42860677e-6f), high_part);
  Lanes sum(1.0f / 720);
  for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = fused_multiply_add(sum, f, Lanes(coefficient));
  }
  return times_power_of_two(sum, n);
}

// erf x by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
template <class Lanes>
[[gnu::always_inline]] inline Lanes erf_by_polynomial(Lanes x) {
  const Lanes magnitude = absolute(x);
  const Lanes t = Lanes(1.0f) / fused_multiply_add(magnitude, Lanes(0.3275911f), Lanes(1.0f));
  Lanes sum(1.061405429f);
  for (const float coefficient : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) {
    sum = fused_multiply_add(sum, t, Lanes(coefficient));
  }
  const Lanes tail = sum * t * exp_by_polynomial(Lanes(0.0f) - magnitude * magnitude);
  return with_sign_of(Lanes(1.0f) - tail, x);
}

}  // namespace ktc::inline KTC_UNIT
