// The computation of experts between their products, over an ISA's `Lanes`: functions of one value, and their
// combination with gate and up. The template chooses `Constants`: kAlpha, kUpOffset, and kLimit, kGateCap and kUpCap,
// which are infinite for none.
//
// Where PyTorch's derivative is zero, the gradient is zero, even if the other factor is infinite.
#pragma once

#include <limits>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <class Lanes>
struct ValueAndGradient {
  Lanes value;
  Lanes gradient;  // `upstream` times the function's slope
};

// kCap tanh(x / kCap) and its slope; x and 1 without a cap.
template <double kCap>
struct SoftCap {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes x) {
    if constexpr (!kCaps) return x;
    return tanh(x * Lanes(1 / kCap)) * Lanes(kCap);
  }

  template <class Lanes>
  [[gnu::always_inline]] static Lanes slope(Lanes x) {
    if constexpr (!kCaps) return Lanes(1);
    const Lanes t = tanh(x * Lanes(1 / kCap));
    return Lanes(1) - t * t;
  }

  static constexpr bool kCaps = kCap < std::numeric_limits<double>::infinity();

 private:
  // The Taylor series where exp would cancel, to the precision of a double. NaN stays NaN.
  template <class Lanes>
  [[gnu::always_inline]] static Lanes tanh(Lanes x) {
    constexpr double kSmallSquare = 0.09;
    const Lanes square = x * x;
    Lanes sum(18888466084.0 / 194896477400625.0);
    for (const double coefficient :
         {-443861162.0 / 1856156927625.0, 6404582.0 / 10854718875.0, -929569.0 / 638512875.0, 21844.0 / 6081075.0,
          -1382.0 / 155925.0, 62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0}) {
      sum = sum * square + Lanes(coefficient);
    }
    const Lanes large = Lanes(1) - Lanes(2) / (exp(x + x) + Lanes(1));
    return zero_outside(0, kSmallSquare, square, sum * x) + zero_up_to(kSmallSquare, square, large);
  }
};

// x sigmoid(alpha x), where the first x may have a soft cap
template <class Constants>
struct Silu {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes x) {
    return Cap::value(x) * sigmoid(x);
  }

  template <class Lanes>
  [[gnu::always_inline]] static ValueAndGradient<Lanes> value_and_gradient(Lanes x, Lanes upstream) {
    const Lanes one(1);
    const Lanes s = sigmoid(x);
    const Lanes factor = Cap::value(x);
    return {factor * s, upstream * (s * (Cap::slope(x) + scaled(factor) * (one - s)))};
  }

 private:
  using Cap = SoftCap<Constants::kGateCap>;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes sigmoid(Lanes x) {
    return Lanes(1) / (Lanes(1) + exp(Lanes(0) - scaled(x)));
  }

  template <class Lanes>
  [[gnu::always_inline]] static Lanes scaled(Lanes x) {
    if constexpr (Constants::kAlpha == 1) return x;
    return x * Lanes(Constants::kAlpha);
  }
};

// The exact GELU, x Phi(x).
template <class Constants>
struct Gelu {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes x) {
    return x * normal_cdf(x);
  }

  template <class Lanes>
  [[gnu::always_inline]] static ValueAndGradient<Lanes> value_and_gradient(Lanes x, Lanes upstream) {
    constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
    const Lanes cdf = normal_cdf(x);
    const Lanes density = exp(x * x * Lanes(-0.5)) * Lanes(kInverseSqrtTwoPi);
    return {x * cdf, upstream * (cdf + x * density)};
  }

 private:
  template <class Lanes>
  [[gnu::always_inline]] static Lanes normal_cdf(Lanes x) {
    constexpr double kInverseSqrtTwo = 0.70710678118654752440;
    return (Lanes(1) + erf(x * Lanes(kInverseSqrtTwo))) * Lanes(0.5);
  }
};

// x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x sigmoid(2 u).
template <class Constants>
struct GeluTanh {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes x) {
    return x * sigmoid_of_2u(x);
  }

  template <class Lanes>
  [[gnu::always_inline]] static ValueAndGradient<Lanes> value_and_gradient(Lanes x, Lanes upstream) {
    const Lanes one(1);
    const Lanes s = sigmoid_of_2u(x);
    const Lanes slope_of_2u = (one + x * x * Lanes(3 * kCubic)) * Lanes(kTwoSqrtTwoOverPi);
    return {x * s, upstream * (s + x * (s * (one - s)) * slope_of_2u)};
  }

 private:
  static constexpr double kTwoSqrtTwoOverPi = 1.59576912160573071176;
  static constexpr double kCubic = 0.044715;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes sigmoid_of_2u(Lanes x) {
    const Lanes u2 = (x + x * x * x * Lanes(kCubic)) * Lanes(kTwoSqrtTwoOverPi);
    return Lanes(1) / (Lanes(1) + exp(Lanes(0) - u2));
  }
};

template <class Constants>
struct Relu {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes x) {
    return zero_up_to(0, x, x);
  }

  template <class Lanes>
  [[gnu::always_inline]] static ValueAndGradient<Lanes> value_and_gradient(Lanes x, Lanes upstream) {
    return {value(x), zero_up_to(0, x, upstream)};
  }
};

// The square of ReLU.
template <class Constants>
struct Relu2 {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes x) {
    const Lanes positive = zero_up_to(0, x, x);
    return positive * positive;
  }

  template <class Lanes>
  [[gnu::always_inline]] static ValueAndGradient<Lanes> value_and_gradient(Lanes x, Lanes upstream) {
    const Lanes positive = zero_up_to(0, x, x);
    return {positive * positive, zero_up_to(0, x, upstream * (positive + positive))};
  }
};

// Computed from the gradient of the down product's input, without the routing weight. `d_weight` is a share of the
// routing weight's gradient, lane by lane. `activated` is the input of the down product. The other fields carry the
// routing weight.
template <class Lanes>
struct GatedGradients {
  Lanes activated;
  Lanes d_weight;
  Lanes d_gate;
  Lanes d_up;
};

// f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset); a soft cap of up takes the place of the clamp
//
// `gradients` reads gate and up as `kept_gate` and `kept_up` returned them. A value beyond a limit is kept as infinite:
// rounded to bf16 it might equal the limit and get a gradient.
template <template <class> class FunctionType, class Constants>
struct Gated {
  using Function = FunctionType<Constants>;
  static constexpr bool kGated = true;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes gate, Lanes up) {
    return Function::value(bounded_gate(gate)) * factor(up);
  }

  template <class Lanes>
  [[gnu::always_inline]] static Lanes kept_gate(Lanes gate) {
    if constexpr (!kLimited) return gate;
    return gate + infinite_beyond_limit(gate);
  }
  template <class Lanes>
  [[gnu::always_inline]] static Lanes kept_up(Lanes up) {
    if constexpr (!kLimited) return up;
    return up + infinite_beyond_limit(up) - infinite_beyond_limit(Lanes(0) - up);
  }

  template <class Lanes>
  [[gnu::always_inline]] static GatedGradients<Lanes> gradients(Lanes gate, Lanes up, Lanes d_value, Lanes weight) {
    const Lanes weighted = d_value * weight;
    const Lanes times = factor(up);
    const auto [activated, d_bounded] = Function::value_and_gradient(bounded_gate(gate), weighted * times);
    const Lanes d_weight = d_value * activated * times;
    const Lanes d_factor = weighted * activated;
    const Lanes value = activated * times;
    if constexpr (UpCap::kCaps) return {value, d_weight, d_bounded, d_factor * UpCap::slope(up)};
    if constexpr (!kLimited) return {value, d_weight, d_bounded, d_factor};
    constexpr auto kLast = std::numeric_limits<typename Lanes::Scalar>::max();
    return {value, d_weight, zero_outside(-kInfinity, kLast, gate, d_bounded),
            zero_outside(-kLast, kLast, up, d_factor)};
  }

 private:
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  static constexpr double kLimit = Constants::kLimit;
  static constexpr bool kLimited = kLimit < kInfinity;
  using UpCap = SoftCap<Constants::kUpCap>;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes infinite_beyond_limit(Lanes x) {
    return zero_up_to(kLimit, x, Lanes(kInfinity));
  }

  template <class Lanes>
  [[gnu::always_inline]] static Lanes bounded_gate(Lanes gate) {
    if constexpr (!kLimited) return gate;
    return clamped(gate, -kInfinity, kLimit);
  }

  template <class Lanes>
  [[gnu::always_inline]] static Lanes factor(Lanes up) {
    const Lanes bounded = kLimited ? clamped(up, -kLimit, kLimit) : UpCap::value(up);
    if constexpr (Constants::kUpOffset == 0) return bounded;
    return bounded + Lanes(Constants::kUpOffset);
  }
};

template <class Lanes>
struct UngatedGradients {
  Lanes activated;
  Lanes d_weight;
  Lanes d_up;
};

// f(up), for experts without a gate
template <template <class> class FunctionType, class Constants>
struct Ungated {
  using Function = FunctionType<Constants>;
  static constexpr bool kGated = false;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes up) {
    return Function::value(up);
  }

  template <class Lanes>
  [[gnu::always_inline]] static UngatedGradients<Lanes> gradients(Lanes up, Lanes d_value, Lanes weight) {
    const auto [activated, d_up] = Function::value_and_gradient(up, d_value * weight);
    return {activated, d_value * activated, d_up};
  }
};

}  // namespace ktc::inline KTC_UNIT
