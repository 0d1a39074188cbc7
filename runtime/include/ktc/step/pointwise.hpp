// Functions of single elements in a decoding step. Values are computed in fp32, fp64, int64 or complex fp32 and rounded
// once, as PyTorch computes them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ktc/interface/step.hpp"
#include "ktc/shape.hpp"
#include "ktc/step/functions.hpp"
#include "ktc/step/view.hpp"
#include "ktc/unit.hpp"

namespace ktc::step::inline KTC_UNIT {

// Blocks of values: the first operand's block takes the result.
template <class Computed, class Lanes>
struct Values {
  static constexpr std::int64_t kBlock = 256;

  static void apply(Function function, Computed* a, const Computed* b, const Computed* c, std::int64_t count) {
    if constexpr (std::is_same_v<Computed, complex64>) {
      return apply_complex(function, a, b, count);
    } else {
      apply_real(function, a, b, c, count);
    }
  }

  // e^x for a block, whose room is whole lanes.
  static void exponentials(Computed* a, std::int64_t count) {
    if constexpr (std::is_same_v<Computed, float>) {
      for (std::int64_t at = 0; at < count; at += kHalfPanel) exp(Lanes::load(a + at)).store(a + at);
    } else {
      for (std::int64_t at = 0; at < count; ++at) a[at] = static_cast<Computed>(std::exp(static_cast<double>(a[at])));
    }
  }

 private:
  template <class Body>
  [[gnu::always_inline]] static void assign(Computed* a, std::int64_t count, Body&& body) {
    for (std::int64_t at = 0; at < count; ++at) a[at] = static_cast<Computed>(body(at));
  }

  static void apply_complex(Function function, complex64* a, const complex64* b, std::int64_t count) {
    if (function == Function::kCopy) return;
    if (function != Function::kMultiply) throw std::invalid_argument("complex values are multiplied or copied alone");
    for (std::int64_t at = 0; at < count; ++at) {
      const float real = a[at].real() * b[at].real() - a[at].imag() * b[at].imag();
      const float imaginary = a[at].real() * b[at].imag() + a[at].imag() * b[at].real();
      a[at] = {real, imaginary};
    }
  }

  static void apply_real(Function function, Computed* a, const Computed* b, const Computed* c, std::int64_t count) {
    using Real = std::conditional_t<std::is_integral_v<Computed>, double, Computed>;
    const auto real = [&](std::int64_t at) { return static_cast<Real>(a[at]); };
    switch (function) {
      case Function::kCopy:
        return;
      case Function::kAdd:
        return assign(a, count, [&](auto at) { return a[at] + b[at]; });
      case Function::kSubtract:
        return assign(a, count, [&](auto at) { return a[at] - b[at]; });
      case Function::kMultiply:
        return assign(a, count, [&](auto at) { return a[at] * b[at]; });
      case Function::kDivide:
        return assign(a, count, [&](auto at) { return real(at) / static_cast<Real>(b[at]); });
      case Function::kMinimum:  // of a NaN and a number, the NaN
        return assign(a, count, [&](auto at) { return a[at] < b[at] || a[at] != a[at] ? a[at] : b[at]; });
      case Function::kMaximum:
        return assign(a, count, [&](auto at) { return a[at] > b[at] || a[at] != a[at] ? a[at] : b[at]; });
      case Function::kPower:
        return assign(a, count, [&](auto at) { return std::pow(real(at), static_cast<Real>(b[at])); });
      case Function::kNegative:
        return assign(a, count, [&](auto at) { return -a[at]; });
      case Function::kAbsolute:
        return assign(a, count, [&](auto at) { return a[at] < Computed{} ? -a[at] : a[at]; });
      case Function::kSquare:
        return assign(a, count, [&](auto at) { return a[at] * a[at]; });
      case Function::kReciprocal:
        return assign(a, count, [&](auto at) { return Real{1} / real(at); });
      case Function::kSquareRoot:
        return assign(a, count, [&](auto at) { return std::sqrt(real(at)); });
      case Function::kReciprocalRoot:
        return assign(a, count, [&](auto at) { return Real{1} / std::sqrt(real(at)); });
      case Function::kExp:
        return exponentials(a, count);
      case Function::kLog:
        return assign(a, count, [&](auto at) { return std::log(real(at)); });
      case Function::kSine:
        return assign(a, count, [&](auto at) { return std::sin(real(at)); });
      case Function::kCosine:
        return assign(a, count, [&](auto at) { return std::cos(real(at)); });
      case Function::kTanh:
        return assign(a, count, [&](auto at) { return std::tanh(real(at)); });
      case Function::kSigmoid:
        return sigmoids(a, count);
      case Function::kSilu:
        return silus(a, count);
      case Function::kGelu:
        return assign(a, count, [&](auto at) {
          return real(at) * Real(0.5) * (Real{1} + std::erf(real(at) * Real(std::numbers::sqrt2 / 2)));
        });
      case Function::kGeluTanh:
        return assign(a, count, [&](auto at) {
          const Real x = real(at), cubic = x + Real(0.044715) * x * x * x;
          constexpr Real kFactor = Real(std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
          return Real(0.5) * x * (Real{1} + std::tanh(kFactor * cubic));
        });
      case Function::kRelu:
        return assign(a, count, [&](auto at) { return a[at] < Computed{} ? Computed{} : a[at]; });
      case Function::kSoftplus:
        return assign(a, count,
                      [&](auto at) { return real(at) > Real{20} ? real(at) : std::log1p(std::exp(real(at))); });
      case Function::kEqual:
        return assign(a, count, [&](auto at) { return a[at] == b[at]; });
      case Function::kUnequal:
        return assign(a, count, [&](auto at) { return a[at] != b[at]; });
      case Function::kLess:
        return assign(a, count, [&](auto at) { return a[at] < b[at]; });
      case Function::kLessOrEqual:
        return assign(a, count, [&](auto at) { return a[at] <= b[at]; });
      case Function::kGreater:
        return assign(a, count, [&](auto at) { return a[at] > b[at]; });
      case Function::kGreaterOrEqual:
        return assign(a, count, [&](auto at) { return a[at] >= b[at]; });
      case Function::kWhere:
        return assign(a, count, [&](auto at) { return a[at] != Computed{} ? b[at] : c[at]; });
      default:
        return apply_bits(function, a, b, count);
    }
  }

  static void apply_bits(Function function, Computed* a, const Computed* b, std::int64_t count) {
    if constexpr (std::is_integral_v<Computed>) {
      switch (function) {
        case Function::kAnd:
          return assign(a, count, [&](auto at) { return a[at] & b[at]; });
        case Function::kOr:
          return assign(a, count, [&](auto at) { return a[at] | b[at]; });
        case Function::kExclusiveOr:
          return assign(a, count, [&](auto at) { return a[at] ^ b[at]; });
        case Function::kNot:  // of a bool
          return assign(a, count, [&](auto at) { return a[at] == 0; });
        default:
          break;
      }
    }
    throw std::invalid_argument("a function of bits, of values that are no integers");
  }

  static void sigmoids(Computed* a, std::int64_t count) {
    assign(a, count, [&](auto at) { return -a[at]; });
    exponentials(a, count);
    assign(a, count, [&](auto at) { return Computed{1} / (Computed{1} + a[at]); });
  }

  static void silus(Computed* a, std::int64_t count) {
    alignas(64) Computed powers[kBlock];
    std::copy(a, a + count, powers);
    assign(powers, count, [&](auto at) { return -powers[at]; });
    exponentials(powers, count);
    assign(a, count, [&](auto at) { return a[at] / (Computed{1} + powers[at]); });
  }
};

// out = function(inputs...), where every view has the sizes of `out`.
template <class Lanes>
class Pointwise {
 public:
  Pointwise(Function function, View out, std::vector<View> inputs, Type computed)
      : function_(function), computed_(computed), out_(std::move(out)), inputs_(std::move(inputs)) {
    inputs_.resize(kInputs, inputs_.front());
  }

  void operator()() const {
    switch (computed_) {
      case Type::kFp32:
        return run<float>();
      case Type::kFp64:
        return run<double>();
      case Type::kComplex64:
        return run<complex64>();
      default:
        return run<std::int64_t>();
    }
  }

 private:
  static constexpr std::size_t kInputs = 3;

  template <class Computed>
  void run() const {
    using Of = Values<Computed, Lanes>;
    alignas(64) Computed blocks[kInputs][Of::kBlock];
    const std::size_t used = used_inputs();
    const std::int64_t width = out_.last_size(), outer = std::max<std::int64_t>(0, out_.dims() - 1);
    const std::array<const View*, kInputs + 1> views{&out_, &inputs_[0], &inputs_[1], &inputs_[2]};
    for_each_index(out_.sizes, outer, views, [&](const std::array<std::int64_t, kInputs + 1>& offsets) {
      for (std::int64_t begin = 0; begin < width; begin += Of::kBlock) {
        const std::int64_t count = std::min(Of::kBlock, width - begin);
        for (std::size_t input = 0; input < used; ++input) {
          const View& from = inputs_[input];
          const std::int64_t at = offsets[input + 1] + begin * from.last_stride();
          Blocks<Computed>::load(from.data + at * bytes_of(from.type), from.type, from.last_stride(), count,
                                 blocks[input]);
        }
        Of::apply(function_, blocks[0], blocks[1], blocks[2], count);
        const std::int64_t at = offsets[0] + begin * out_.last_stride();
        Blocks<Computed>::store(out_.data + at * bytes_of(out_.type), out_.type, out_.last_stride(), count, blocks[0]);
      }
    });
  }

  std::size_t used_inputs() const {
    const auto* row = std::find_if(kFunctions.begin(), kFunctions.end(),
                                   [&](const NamedFunction& candidate) { return candidate.function == function_; });
    return row->inputs;
  }

  Function function_;
  Type computed_;
  View out_;
  std::vector<View> inputs_;
};

}  // namespace ktc::step::inline KTC_UNIT
