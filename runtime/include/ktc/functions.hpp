// `KernelFunction` of a function that takes a struct, whose fields are addresses and integers of 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ktc/interface/functions.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <auto kFunction>
struct FunctionOf;

template <class Struct, void (*kFunction)(Engine&, const Struct&)>
struct FunctionOf<kFunction> {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % sizeof(std::int64_t) == 0);
  static constexpr std::size_t kFields = sizeof(Struct) / sizeof(std::int64_t);

  static void call(Engine& engine, const std::int64_t* values) {
    Struct arguments;
    std::memcpy(&arguments, values, sizeof(Struct));
    kFunction(engine, arguments);
  }
};

// `arguments` names every field of the struct, in their order.
template <auto kFunction, std::size_t kNames>
constexpr KernelFunction kernel_function(const char* name, const char* const (&arguments)[kNames]) {
  static_assert(kNames == FunctionOf<kFunction>::kFields);
  return {name, arguments, kNames, &FunctionOf<kFunction>::call};
}

}  // namespace ktc::inline KTC_UNIT
