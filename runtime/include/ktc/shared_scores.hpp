// Scores of positions that the query heads of a key head share: the sum of their softmax, with powers of two that are
// linear between whole exponents, and in bf16 where they are added up. Every step rounds as in
// `ktc/model/attention/shared_scores.py`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa>
struct SharedScores {
  using Lanes = typename Isa::Lanes;

  // The blocks of 16 positions whose greatest score is a query's unit of weights: every `stride`-th.
  class Sample {
   public:
    explicit Sample(std::int64_t blocks)
        : stride_(std::max<std::int64_t>(1, blocks / kLeast)), blocks_((blocks + stride_ - 1) / stride_) {}

    std::int64_t blocks() const { return blocks_; }
    std::int64_t at(std::int64_t index) const { return index * stride_; }

   private:
    static constexpr std::int64_t kLeast = 64;

    std::int64_t stride_;
    std::int64_t blocks_;
  };

  // Scores in nats times this are exponents in units of 2^-23. Up to a shift, they are the bits of the weights.
  static constexpr float kPartsOfE = 12102203.0f;
  static constexpr float kOne = 127.0f * 8388608.0f;  // the bits of 1.0f

  // The shift that makes the scores of a query the bits of its weights: the greatest of the `count` samples becomes 1.
  // A masked sample is -infinity; a NaN is not greater than any number.
  static float shift(const float* samples, std::int64_t count) {
    constexpr float kMost = std::numeric_limits<float>::max();
    float greatest[kKeysTogether];
    std::fill(greatest, greatest + kKeysTogether, -kMost);
    for (std::int64_t at = 0; at < count; at += kKeysTogether) {
      for (std::int64_t lane = 0; lane < kKeysTogether; ++lane) {
        greatest[lane] = greatest[lane] < samples[at + lane] ? samples[at + lane] : greatest[lane];
      }
    }
    return kOne - std::min(*std::max_element(greatest, greatest + kKeysTogether), kMost);
  }

  // One over the sum of a query's weights. `sums` has partial sums, lane by lane, of stretches that are `stride` apart.
  static float inverse(const float* sums, std::int64_t stretches, std::int64_t stride) {
    Lanes all(0.0f);
    for (std::int64_t stretch = 0; stretch < stretches; ++stretch) all = all + Lanes::load(sums + stretch * stride);
    float lanes[kKeysTogether], total = 0.0f;
    all.store(lanes);
    for (const float lane : lanes) total += lane;
    return total > 0.0f ? 1.0f / total : 0.0f;
  }

  [[gnu::always_inline]] static void narrow(Lanes weight, bf16* to) {
    if constexpr (requires { weight.to_elements(to); }) {
      weight.to_elements(to);
    } else {
      float numbers[kKeysTogether];
      weight.store(numbers);
      for (std::int64_t lane = 0; lane < kKeysTogether; ++lane) to[lane] = bf16(numbers[lane]);
    }
  }
};

}  // namespace ktc::inline KTC_UNIT
