// The functions of single elements by name.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ktc/interface/step.hpp"
#include "ktc/unit.hpp"

namespace ktc::step::inline KTC_UNIT {

struct NamedFunction {
  std::string_view name;
  Function function;
  std::size_t inputs;
};

inline constexpr std::array kFunctions{
    NamedFunction{"copy", Function::kCopy, 1},
    NamedFunction{"add", Function::kAdd, 2},
    NamedFunction{"subtract", Function::kSubtract, 2},
    NamedFunction{"multiply", Function::kMultiply, 2},
    NamedFunction{"divide", Function::kDivide, 2},
    NamedFunction{"minimum", Function::kMinimum, 2},
    NamedFunction{"maximum", Function::kMaximum, 2},
    NamedFunction{"power", Function::kPower, 2},
    NamedFunction{"negative", Function::kNegative, 1},
    NamedFunction{"absolute", Function::kAbsolute, 1},
    NamedFunction{"square", Function::kSquare, 1},
    NamedFunction{"reciprocal", Function::kReciprocal, 1},
    NamedFunction{"square_root", Function::kSquareRoot, 1},
    NamedFunction{"reciprocal_root", Function::kReciprocalRoot, 1},
    NamedFunction{"exp", Function::kExp, 1},
    NamedFunction{"log", Function::kLog, 1},
    NamedFunction{"sine", Function::kSine, 1},
    NamedFunction{"cosine", Function::kCosine, 1},
    NamedFunction{"tanh", Function::kTanh, 1},
    NamedFunction{"sigmoid", Function::kSigmoid, 1},
    NamedFunction{"silu", Function::kSilu, 1},
    NamedFunction{"gelu", Function::kGelu, 1},
    NamedFunction{"gelu_tanh", Function::kGeluTanh, 1},
    NamedFunction{"relu", Function::kRelu, 1},
    NamedFunction{"softplus", Function::kSoftplus, 1},
    NamedFunction{"equal", Function::kEqual, 2},
    NamedFunction{"unequal", Function::kUnequal, 2},
    NamedFunction{"less", Function::kLess, 2},
    NamedFunction{"less_or_equal", Function::kLessOrEqual, 2},
    NamedFunction{"greater", Function::kGreater, 2},
    NamedFunction{"greater_or_equal", Function::kGreaterOrEqual, 2},
    NamedFunction{"and", Function::kAnd, 2},
    NamedFunction{"or", Function::kOr, 2},
    NamedFunction{"exclusive_or", Function::kExclusiveOr, 2},
    NamedFunction{"not", Function::kNot, 1},
    NamedFunction{"where", Function::kWhere, 3},
};

inline const NamedFunction& function_named(std::string_view name) {
  const auto* row = std::find_if(kFunctions.begin(), kFunctions.end(),
                                 [&](const NamedFunction& candidate) { return candidate.name == name; });
  if (row == kFunctions.end()) throw std::invalid_argument("no function `" + std::string(name) + "`");
  return *row;
}

}  // namespace ktc::step::inline KTC_UNIT
