// Kernels that are functions of addresses and numbers, without state: a new op needs no interface of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/interface/engine.hpp"

namespace ktc {

// One function of a kernel: `arguments` has the names of the values that a call takes, addresses and integers, in their
// order. An address is 0 for null.
struct KernelFunction {
  const char* name;
  const char* const* arguments;
  std::size_t num_arguments;
  void (*call)(Engine& engine, const std::int64_t* values);
};

// How a library lists such a kernel: its name, and its functions.
struct FunctionsEntry {
  const char* name;
  const KernelFunction* functions;
  std::size_t num_functions;
};

}  // namespace ktc
