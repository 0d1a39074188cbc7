// Kernels of linear layers whose weights stay as PyTorch stores them.
#pragma once

#include <cstdint>
#include <memory>

#include "ktc/interface/engine.hpp"

namespace ktc {

// x (rows, inputs), weight (outputs, inputs), bias (outputs) or null, and out (rows, outputs) are contiguous and of the
// kernel's element type; nothing need be aligned.
struct LinearArguments {
  const void* x;
  const void* weight;
  const void* bias;
  void* out;
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
  bool transposed = false;  // of `multiply`: x (rows, outputs) times W
};

class LinearKernel {
 public:
  virtual ~LinearKernel();
  virtual void forward(Engine& engine, const LinearArguments& arguments) const = 0;
  // The same for many rows. Throws std::invalid_argument for elements other than bf16.
  virtual void multiply(Engine& engine, const LinearArguments& arguments) const = 0;
};

// How a library lists a kernel for linear layers: its name, and the function that makes one.
struct LinearEntry {
  const char* name;
  std::unique_ptr<LinearKernel> (*make)();
};

}  // namespace ktc
