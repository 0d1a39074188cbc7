// The activation of the gate, and its derivative, over an ISA's `Lanes`.
#pragma once

namespace ktc {

template <class Lanes>
struct ActivationAndSlope {
  Lanes value;
  Lanes slope;
};

struct Silu {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes gate) {
    return gate * sigmoid(gate);
  }

  template <class Lanes>
  [[gnu::always_inline]] static ActivationAndSlope<Lanes> value_and_slope(Lanes gate) {
    const Lanes one(1);
    const Lanes s = sigmoid(gate);
    return {gate * s, s * (one + gate * (one - s))};
  }

 private:
  template <class Lanes>
  [[gnu::always_inline]] static Lanes sigmoid(Lanes x) {
    return Lanes(1) / (Lanes(1) + exp(Lanes(0) - x));
  }
};

// The exact GELU, x Phi(x).
struct Gelu {
  template <class Lanes>
  [[gnu::always_inline]] static Lanes value(Lanes gate) {
    return gate * normal_cdf(gate);
  }

  template <class Lanes>
  [[gnu::always_inline]] static ActivationAndSlope<Lanes> value_and_slope(Lanes gate) {
    constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
    const Lanes cdf = normal_cdf(gate);
    const Lanes density = exp(gate * gate * Lanes(-0.5)) * Lanes(kInverseSqrtTwoPi);
    return {gate * cdf, cdf + gate * density};
  }

 private:
  template <class Lanes>
  [[gnu::always_inline]] static Lanes normal_cdf(Lanes x) {
    constexpr double kInverseSqrtTwo = 0.70710678118654752440;
    return (Lanes(1) + erf(x * Lanes(kInverseSqrtTwo))) * Lanes(0.5);
  }
};

}  // namespace ktc
