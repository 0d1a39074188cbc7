// Kernels of linear layers whose weights are packed as they are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ktc/interface/engine.hpp"

namespace ktc {

// x (rows, inputs), bias (outputs) or null and out (rows, outputs) are contiguous bf16; `packed` is 64-byte aligned.
struct PackedLinearArguments {
  const void* x;
  const std::byte* packed;
  const void* bias;
  void* out;
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
};

class PackedLinearKernel {
 public:
  virtual ~PackedLinearKernel();
  virtual std::int64_t packed_bytes(std::int64_t inputs, std::int64_t outputs) const = 0;
  // `blocks` as a GGUF file stores them, (outputs, row_bytes). Throws std::invalid_argument unless rows are
  // whole numbers of blocks.
  virtual void pack(std::byte* packed, const std::uint8_t* blocks, std::int64_t outputs,
                    std::int64_t row_bytes) const = 0;
  // The weights (outputs, inputs), rounded to bf16.
  virtual void unpack(const std::byte* packed, void* target, std::int64_t inputs, std::int64_t outputs) const = 0;
  virtual void forward(Engine& engine, const PackedLinearArguments& arguments) const = 0;
};

// How a library lists such a kernel: its name, and the function that makes one.
struct PackedLinearEntry {
  const char* name;
  std::unique_ptr<PackedLinearKernel> (*make)();
};

}  // namespace ktc
