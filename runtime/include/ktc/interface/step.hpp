// Kernels of the operations of a decoding step on tensors at fixed addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "ktc/interface/engine.hpp"

namespace ktc::step {

enum class Type : int { kBool, kInt32, kInt64, kFp16, kBf16, kFp32, kFp64, kComplex64 };

// Of single elements.
enum class Function : int {
  kCopy,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kMinimum,
  kMaximum,
  kPower,
  kNegative,
  kAbsolute,
  kSquare,
  kReciprocal,
  kSquareRoot,
  kReciprocalRoot,
  kExp,
  kLog,
  kSine,
  kCosine,
  kTanh,
  kSigmoid,
  kSilu,
  kGelu,
  kGeluTanh,
  kRelu,
  kSoftplus,
  kEqual,
  kUnequal,
  kLess,
  kLessOrEqual,
  kGreater,
  kGreaterOrEqual,
  kAnd,
  kOr,
  kExclusiveOr,
  kNot,
  kWhere,
};

enum class Reduction : int { kSum, kMean, kMaximum };

// A tensor of `dims` dimensions; `strides` are in elements. Both arrays need to live until the call returns.
struct TensorArgument {
  std::byte* data;
  Type type;
  std::int64_t dims;
  const std::int64_t* sizes;
  const std::int64_t* strides;
};

using Operation = std::function<void()>;

// Makes the operations that are compiled for an instruction set; the others need none. The memory of all tensors must
// outlive the operation. Each call throws std::invalid_argument for sizes or types that its operation does not take.
class StepKernel {
 public:
  virtual ~StepKernel();
  virtual Operation pointwise(Function function, const TensorArgument& out, const TensorArgument* inputs,
                              std::size_t num_inputs, Type computed) const = 0;
  virtual Operation reduce(Reduction reduction, const TensorArgument& out, const TensorArgument& input,
                           Type computed) const = 0;
  virtual Operation softmax(const TensorArgument& out, const TensorArgument& input, Type computed) const = 0;
  virtual Operation matrix_product(Engine& engine, const TensorArgument& out, const TensorArgument& a,
                                   const TensorArgument& b, const TensorArgument& bias) const = 0;
};

// How a library lists a kernel for steps: its name, and the function that makes one.
struct StepEntry {
  const char* name;
  std::unique_ptr<StepKernel> (*make)();
};

}  // namespace ktc::step
