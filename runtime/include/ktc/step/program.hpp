// A decoding step as a list of operations on tensors at fixed addresses, which one call runs in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ktc/step/indexing.hpp"
#include "ktc/step/matrix_product.hpp"
#include "ktc/step/pointwise.hpp"
#include "ktc/step/rows.hpp"
#include "ktc/step/view.hpp"

namespace ktc::step {

using Operation = std::function<void()>;

// What an operation refers to must outlive the program.
class Program {
 public:
  void add(Operation operation) { operations_.push_back(std::move(operation)); }

  std::int64_t size() const { return static_cast<std::int64_t>(operations_.size()); }

  // Throws what an operation throws, and std::out_of_range for operations that are not there.
  void run(std::int64_t begin, std::int64_t end) const {
    if (begin < 0 || begin > end || end > size()) throw std::out_of_range("the program has no such operations");
    for (std::int64_t each = begin; each < end; ++each) operations_[static_cast<std::size_t>(each)]();
  }

 private:
  std::vector<Operation> operations_;
};

// Makes the operations that are compiled for an instruction set; the others need none.
class StepKernel {
 public:
  virtual ~StepKernel() = default;
  virtual Operation pointwise(Function function, View out, std::vector<View> inputs, Type computed) const = 0;
  virtual Operation reduce(Reduction reduction, View out, View input, Type computed) const = 0;
  virtual Operation softmax(View out, View input, Type computed) const = 0;
  virtual Operation matrix_product(Engine& engine, View out, View a, View b, View bias) const = 0;
};

// How a library lists a kernel for steps: its name, and the function that makes one.
struct StepEntry {
  const char* name;
  std::unique_ptr<StepKernel> (*make)();
};

template <class Isa>
class Step final : public StepKernel {
  using Lanes = typename Isa::Lanes;

 public:
  Operation pointwise(Function function, View out, std::vector<View> inputs, Type computed) const override {
    return Pointwise<Lanes>(function, std::move(out), std::move(inputs), computed);
  }

  Operation reduce(Reduction reduction, View out, View input, Type computed) const override {
    return Reduce<Lanes>(reduction, std::move(out), std::move(input), computed);
  }

  Operation softmax(View out, View input, Type computed) const override {
    return Softmax<Lanes>(std::move(out), std::move(input), computed);
  }

  Operation matrix_product(Engine& engine, View out, View a, View b, View bias) const override {
    return MatrixProduct<Isa>(engine, std::move(out), std::move(a), std::move(b), std::move(bias));
  }
};

template <class Kernel>
std::unique_ptr<StepKernel> make_step() {
  return std::make_unique<Kernel>();
}

}  // namespace ktc::step
