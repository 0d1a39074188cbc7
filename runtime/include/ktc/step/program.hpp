// A decoding step as a list of operations on tensors at fixed addresses, which one call runs in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ktc/interface/step.hpp"
#include "ktc/unit.hpp"

namespace ktc::step::inline KTC_UNIT {

// What an operation refers to must outlive the program.
class Program {
 public:
  void add(Operation operation) { operations_.push_back(std::move(operation)); }

  std::int64_t size() const { return static_cast<std::int64_t>(operations_.size()); }

  // Throws what an operation throws, and std::out_of_range for operations that are not there.
  void run(std::int64_t begin, std::int64_t end) const {
    if (begin < 0 || begin > end || end > size()) throw std::out_of_range("the program has no such operations");
    for (std::int64_t index = begin; index < end; ++index) operations_[static_cast<std::size_t>(index)]();
  }

 private:
  std::vector<Operation> operations_;
};

}  // namespace ktc::step::inline KTC_UNIT
