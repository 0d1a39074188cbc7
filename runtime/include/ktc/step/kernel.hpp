// The operations of a decoding step that are compiled for an instruction set.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "ktc/concepts.hpp"
#include "ktc/interface/step.hpp"
#include "ktc/step/matrix_product.hpp"
#include "ktc/step/pointwise.hpp"
#include "ktc/step/rows.hpp"
#include "ktc/step/view.hpp"
#include "ktc/unit.hpp"

namespace ktc::step::inline KTC_UNIT {

template <InstructionSet Isa>
class Step final : public StepKernel {
  using Lanes = typename Isa::Lanes;

 public:
  Operation pointwise(Function function, const TensorArgument& out, const TensorArgument* inputs,
                      std::size_t num_inputs, Type computed) const override {
    std::vector<View> views;
    for (std::size_t input = 0; input < num_inputs; ++input) views.push_back(view_of(inputs[input]));
    return Pointwise<Lanes>(function, view_of(out), std::move(views), computed);
  }

  Operation reduce(Reduction reduction, const TensorArgument& out, const TensorArgument& input,
                   Type computed) const override {
    return Reduce<Lanes>(reduction, view_of(out), view_of(input), computed);
  }

  Operation softmax(const TensorArgument& out, const TensorArgument& input, Type computed) const override {
    return Softmax<Lanes>(view_of(out), view_of(input), computed);
  }

  Operation matrix_product(Engine& engine, const TensorArgument& out, const TensorArgument& a, const TensorArgument& b,
                           const TensorArgument& bias) const override {
    return MatrixProduct<Isa>(engine, view_of(out), view_of(a), view_of(b), view_of(bias));
  }
};

template <class Kernel>
std::unique_ptr<StepKernel> make_step() {
  return std::make_unique<Kernel>();
}

}  // namespace ktc::step::inline KTC_UNIT
