// Routers after their linear layer: logits become the numbers and the weights of the k chosen experts.
//
// `Form` has the routing of one model as constants (`RouterForm` of Python). A row is computed by one thread in fp32,
// so results do not depend on the number of threads. Values that the model has in 16 bits are rounded as it rounds
// them. A NaN counts as greater than any number, and of equal values the expert with the lower number is chosen.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/functions.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::inline KTC_UNIT {

enum class Scoring { kSoftmax, kSigmoid, kSqrtSoftplus };
enum class GroupScore { kGreatest, kTwoGreatest };
enum class Total { kNone, kPlus, kAtLeast };

// logits (rows, E) of the logits' type and bias (E) in fp32, null without a correction, are read; weights (rows, k) of
// the weights' type and indices (rows, k) are written, the best first.
struct RouterArguments {
  const void* logits;
  const float* bias;
  void* weights;
  std::int64_t* indices;
  std::int64_t rows;
};

// The gradient of the logits from that of the weights, and from what forward read and chose.
struct RouterGradient {
  const void* logits;
  const float* bias;
  const std::int64_t* indices;
  const void* weights_gradient;
  void* logits_gradient;
  std::int64_t rows;
};

// The places of the greatest values in descending order; of equal ones that which was offered first.
template <int kSize>
class Greatest {
 public:
  Greatest() {
    for (int at = 0; at < kSize; ++at) {
      orders_[at] = std::numeric_limits<std::int32_t>::min();
      places_[at] = 0;
    }
  }

  // An integer in the order of the value, of which a NaN is the greatest and -0 is 0.
  static std::int32_t order(float value) {
    const auto bits = std::bit_cast<std::int32_t>(value + 0.0f);
    if ((bits & 0x7fffffff) > 0x7f800000) return std::numeric_limits<std::int32_t>::max();
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }

  void offer(std::int32_t order, int place) {
    if (order <= orders_[kSize - 1]) return;
    int at = kSize - 1;
    for (; at > 0 && order > orders_[at - 1]; --at) {
      orders_[at] = orders_[at - 1];
      places_[at] = places_[at - 1];
    }
    orders_[at] = order;
    places_[at] = place;
  }

  std::int32_t least() const { return orders_[kSize - 1]; }
  int operator[](int at) const { return places_[at]; }

 private:
  std::int32_t orders_[kSize];
  int places_[kSize];
};

template <InstructionSet Isa, class Logit, class Weight, class Form>
class Router {
 public:
  static void forward(Engine& engine, const RouterArguments& arguments) {
    for_each_row(engine, arguments.rows, [&](std::int64_t row) {
      const Row scores = scored(arguments.logits, row);
      const Compared compared(scores, arguments.bias);
      Greatest<kTopK> best;
      compared.offer_to(best);
      Chosen picked;
      for (int at = 0; at < kTopK; ++at) {
        arguments.indices[row * kTopK + at] = best[at];
        picked[at] = (Form::kTakesLimited ? compared.values : scores)[best[at]];
      }
      const Chosen weights = weighted(Form::kLate ? late_scores(picked) : picked);
      auto* to = static_cast<Weight*>(arguments.weights) + row * kTopK;
      for (int at = 0; at < kTopK; ++at) to[at] = narrowed<Weight>(weights[at]);
    });
  }

  static void backward(Engine& engine, const RouterGradient& arguments) {
    for_each_row(engine, arguments.rows, [&](std::int64_t row) {
      const std::int64_t* indices = arguments.indices + row * kTopK;
      const auto* given = static_cast<const Weight*>(arguments.weights_gradient) + row * kTopK;
      const Row logits = widened(arguments.logits, row);
      const Row scores = scored(arguments.logits, row);
      const Picked picked(scores, arguments.bias, indices);
      const Chosen late = Form::kLate ? late_scores(picked.values) : picked.values;
      Chosen gradient = weighted_backward(late, given);
      if constexpr (Form::kLate) gradient = late_scores_backward(late, picked.values, gradient);
      Row result{};
      for (int at = 0; at < kTopK; ++at) {
        if (picked.varies[at]) result[indices[at]] += gradient[at];
      }
      if constexpr (!Form::kLate) scored_backward(logits, scores, result);
      auto* to = static_cast<Logit*>(arguments.logits_gradient) + row * kExperts;
      for (int expert = 0; expert < kExperts; ++expert) to[expert] = narrowed<Logit>(result[expert]);
    });
  }

 private:
  using Lanes = typename Isa::Lanes;
  static constexpr int kExperts = Form::kExperts;
  static constexpr int kTopK = Form::kTopK;
  static constexpr int kGroups = Form::kGroups;
  static constexpr int kGroupSize = kExperts / kGroups;
  static constexpr int kLanes = static_cast<int>(kHalfPanel);
  static constexpr int kPadded = (kExperts + kLanes - 1) / kLanes * kLanes;
  static constexpr bool kLimits = Form::kTopGroups < kGroups;
  static constexpr bool kReplaces = kLimits && Form::kTakesLimited;
  static constexpr std::int64_t kAtATime = 16;  // rows that a thread takes together
  static_assert(kExperts % kGroups == 0 && Form::kTopGroups <= kGroups && kTopK <= kExperts && kTopK > 0);
  static_assert(!kLimits || Form::kGroupScore == GroupScore::kGreatest || kGroupSize > 1);

  template <int kSize>
  struct Values {
    float& operator[](std::int64_t at) { return values[at]; }
    float operator[](std::int64_t at) const { return values[at]; }
    alignas(64) float values[kSize];
  };
  using Row = Values<kPadded>;
  using Chosen = Values<kTopK>;

  template <class Body>
  static void for_each_row(Engine& engine, std::int64_t rows, const Body& body) {
    exclusively(engine, [&](const Team& team, Workspace&) {
      std::atomic<std::int64_t> next{0};
      team.run([&](const Worker&) {
        for (;;) {
          const std::int64_t begin = next.fetch_add(kAtATime, std::memory_order_relaxed);
          if (begin >= rows) return;
          const std::int64_t end = begin + kAtATime < rows ? begin + kAtATime : rows;
          for (std::int64_t row = begin; row < end; ++row) body(row);
        }
      });
    });
  }

  template <class Element>
  static Element narrowed(float value) {
    if constexpr (std::is_same_v<Element, weight_format::fp16>)
      return weight_format::fp16::nearest(value);
    else
      return Element(value);
  }

  // As the model rounds scores of 16 bits, and sums of them and a bias where `kRoundsCompared`.
  static float rounded(float value) {
    if constexpr (Form::kRoundsScores) return static_cast<float>(narrowed<Logit>(value));
    return value;
  }

  // The logits of a row in fp32, and -inf up to whole lanes.
  static Row widened(const void* logits, std::int64_t row) {
    const auto* from = static_cast<const Logit*>(logits) + row * kExperts;
    Row result;
    constexpr int kWhole = kExperts / kLanes * kLanes;
    for (int at = 0; at < kWhole; at += kLanes) lanes_of(from + at).store(&result[at]);
    for (int at = kWhole; at < kExperts; ++at) result[at] = static_cast<float>(from[at]);
    for (int at = kExperts; at < kPadded; ++at) result[at] = -std::numeric_limits<float>::infinity();
    return result;
  }

  static Lanes lanes_of(const float* values) { return Lanes::load(values); }
  static Lanes lanes_of(const bf16* values) { return Lanes::from_elements(values); }
  static Lanes lanes_of(const weight_format::fp16* values) { return Lanes::from_elements(values); }

  // The scores of all experts, or where they are `kLate` the logits.
  static Row scored(const void* logits, std::int64_t row) {
    Row values = widened(logits, row);
    if constexpr (!Form::kLate) score(values.values, kPadded, kExperts);
    return values;
  }

  // `size` logits become scores, whole lanes of them where there are `padded` places.
  static void score(float* values, int padded, int size) {
    if constexpr (Form::kScoring == Scoring::kSoftmax) {
      float greatest = values[0];
      for (int at = 1; at < size; ++at) greatest = values[at] > greatest ? values[at] : greatest;
      float sum = 0;
      for (int at = 0; at < padded; at += kLanes) exp(Lanes::load(values + at) - Lanes(greatest)).store(values + at);
      for (int at = 0; at < size; ++at) sum += values[at];
      for (int at = 0; at < size; ++at) values[at] = rounded(values[at] / sum);
    } else if constexpr (Form::kScoring == Scoring::kSigmoid) {
      for (int at = 0; at < padded; at += kLanes) {
        (Lanes(1.0f) / (Lanes(1.0f) + exp(Lanes(0.0f) - Lanes::load(values + at)))).store(values + at);
      }
      if constexpr (Form::kRoundsScores)
        for (int at = 0; at < size; ++at) values[at] = rounded(values[at]);
    } else {
      for (int at = 0; at < size; ++at) values[at] = rounded(std::sqrt(rounded(softplus(values[at]))));
    }
  }

  static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
  static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }  // PyTorch's threshold

  // The derivative of a sigmoid or of the root of a softplus, whose value is `score`.
  static float slope(float logit, float score) {
    if constexpr (Form::kScoring == Scoring::kSigmoid) return score * (1.0f - score);
    return (logit > 20.0f ? 1.0f : sigmoid(logit)) / (2.0f * score);
  }

  // In place: the gradient of scores becomes that of logits.
  static void scored_backward(const Row& logits, const Row& scores, Row& gradient) {
    if constexpr (Form::kScoring == Scoring::kSoftmax) {
      float product = 0;
      for (int expert = 0; expert < kExperts; ++expert) product += scores[expert] * gradient[expert];
      for (int at = 0; at < kPadded; at += kLanes) {
        const Lanes difference = Lanes::load(&gradient[at]) - Lanes(product);
        (Lanes::load(&scores.values[at]) * difference).store(&gradient[at]);
      }
    } else {
      for (int expert = 0; expert < kExperts; ++expert) {
        if (gradient[expert] != 0) gradient[expert] *= slope(logits[expert], scores[expert]);
      }
    }
  }

  // What experts are chosen by: scores with the correction, and `kLimited` outside the best groups.
  struct Compared {
    Compared(const Row& scores, const float* bias) : values(scores) {
      if constexpr (Form::kCorrected) {
        for (int expert = 0; expert < kExperts; ++expert) {
          values[expert] += bias[expert];
          if constexpr (Form::kRoundsCompared) values[expert] = rounded(values[expert]);
        }
      }
      for (int at = 0; at < kPadded; ++at) orders[at] = Greatest<1>::order(values[at]);
      if constexpr (kLimits) limit();
    }

    void limit() {
      Greatest<Form::kTopGroups> best;
      for (int group = 0; group < kGroups; ++group) best.offer(Greatest<1>::order(of_group(group)), group);
      std::fill_n(kept, kGroups, false);
      for (int at = 0; at < Form::kTopGroups; ++at) kept[best[at]] = true;
      for (int group = 0; group < kGroups; ++group) {
        if (kept[group]) continue;
        for (int expert = group * kGroupSize; expert < (group + 1) * kGroupSize; ++expert) {
          values[expert] = Form::kLimited;
          orders[expert] = Greatest<1>::order(Form::kLimited);
        }
      }
    }

    float of_group(int group) const {
      constexpr bool kTwo = Form::kGroupScore == GroupScore::kTwoGreatest;
      Greatest<kTwo ? 2 : 1> best;
      for (int expert = group * kGroupSize; expert < (group + 1) * kGroupSize; ++expert)
        best.offer(orders[expert], expert);
      if constexpr (kTwo) {
        const float sum = values[best[0]] + values[best[1]];
        return Form::kRoundsCompared ? rounded(sum) : sum;
      }
      return values[best[0]];
    }

    void offer_to(Greatest<kTopK>& best) const {
      for (int begin = 0; begin < kExperts; begin += kLanes) {
        const int end = begin + kLanes < kExperts ? begin + kLanes : kExperts;
        std::int32_t greatest = std::numeric_limits<std::int32_t>::min();
        for (int expert = begin; expert < end; ++expert)
          greatest = orders[expert] > greatest ? orders[expert] : greatest;
        if (greatest <= best.least()) continue;
        for (int expert = begin; expert < end; ++expert) best.offer(orders[expert], expert);
      }
    }

    Row values;
    alignas(64) std::int32_t orders[kPadded];
    bool kept[kGroups];  // written where groups are limited
  };

  // What forward took for the weights of the chosen. A value that was put in the place of a score varies with no logit.
  struct Picked {
    Picked(const Row& scores, const float* bias, const std::int64_t* indices) {
      for (int at = 0; at < kTopK; ++at) {
        values[at] = scores[indices[at]];
        varies[at] = true;
      }
      if constexpr (kReplaces || (Form::kTakesLimited && Form::kCorrected)) {
        const Compared compared(scores, bias);
        for (int at = 0; at < kTopK; ++at) {
          values[at] = compared.values[indices[at]];
          if constexpr (kReplaces) varies[at] = compared.kept[indices[at] / kGroupSize];
        }
      }
    }

    Chosen values;
    bool varies[kTopK];
  };

  // The scores of the chosen logits alone.
  static Chosen late_scores(const Chosen& logits) {
    Values<(kTopK + kLanes - 1) / kLanes * kLanes> padded;
    for (float& value : padded.values) value = -std::numeric_limits<float>::infinity();
    for (int at = 0; at < kTopK; ++at) padded[at] = logits[at];
    score(padded.values, sizeof padded.values / sizeof(float), kTopK);
    Chosen scores;
    for (int at = 0; at < kTopK; ++at) scores[at] = padded[at];
    return scores;
  }

  static Chosen late_scores_backward(const Chosen& scores, const Chosen& logits, const Chosen& gradient) {
    Chosen result;
    float product = 0;
    for (int at = 0; at < kTopK; ++at) product += scores[at] * gradient[at];
    for (int at = 0; at < kTopK; ++at) {
      if constexpr (Form::kScoring == Scoring::kSoftmax)
        result[at] = scores[at] * (gradient[at] - product);
      else
        result[at] = gradient[at] * slope(logits[at], scores[at]);
    }
    return result;
  }

  static float sum_of(const Chosen& picked) {
    float sum = 0;
    for (const float value : picked.values) sum += value;
    return rounded(sum);
  }

  static float total_of(float sum) {
    if constexpr (Form::kTotal == Total::kPlus) return rounded(sum + Form::kTotalConstant);
    return sum < Form::kTotalConstant ? Form::kTotalConstant : sum;
  }

  static Chosen weighted(Chosen picked) {
    if constexpr (Form::kPickedScale != 1.0f)
      for (float& value : picked.values) value = rounded(value * Form::kPickedScale);
    if constexpr (Form::kTotal != Total::kNone) {
      const float total = total_of(sum_of(picked));
      for (float& value : picked.values) value = rounded(value / total);
    }
    if constexpr (Form::kScale != 1.0f)
      for (float& value : picked.values) value = rounded(value * Form::kScale);
    return picked;
  }

  static Chosen weighted_backward(Chosen picked, const Weight* given) {
    Chosen gradient;
    for (int at = 0; at < kTopK; ++at) gradient[at] = static_cast<float>(given[at]) * Form::kScale;
    if constexpr (Form::kTotal != Total::kNone) {
      for (float& value : picked.values) value *= Form::kPickedScale;
      const float sum = sum_of(picked), total = total_of(sum);
      float product = 0;
      for (int at = 0; at < kTopK; ++at) product += gradient[at] * picked[at];
      const bool varies = Form::kTotal == Total::kPlus || sum >= Form::kTotalConstant;
      const float shared = varies ? product / total / total : 0.0f;
      for (float& value : gradient.values) value = value / total - shared;
    }
    for (float& value : gradient.values) value *= Form::kPickedScale;
    return gradient;
  }
};

inline constexpr const char* kRouterNames[] = {"logits", "bias", "weights", "indices", "rows"};
inline constexpr const char* kRouterGradientNames[] = {"logits",          "bias", "indices", "weights_gradient",
                                                       "logits_gradient", "rows"};

template <class Router>
inline constexpr KernelFunction kRouterFunctions[] = {
    kernel_function<&Router::forward>("forward", kRouterNames),
    kernel_function<&Router::backward>("backward", kRouterGradientNames),
};

}  // namespace ktc::inline KTC_UNIT
