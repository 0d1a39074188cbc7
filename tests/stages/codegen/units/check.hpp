// The tests of a program and what they check with. The program is built for one instruction set, KTC_ISA.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include "ktc/element.hpp"

namespace unit_tests {

using Isa = KTC_ISA;
using Lanes = typename Isa::Lanes;

// A test, run by `main` in an unknown order.
struct Test {
  Test(const char* name, void (*body)());
};

// Ends the program with status 1.
[[noreturn]] void fail(const char* file, int line, const std::string& message);

#define CHECK(condition)                                    \
  do {                                                      \
    if (!(condition)) fail(__FILE__, __LINE__, #condition); \
  } while (false)

// Equal to the bit, or both NaN.
inline bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

#define CHECK_SAME(computed, expected)                                                                   \
  do {                                                                                                   \
    const float check_computed = (computed), check_expected = (expected);                                \
    if (!same(check_computed, check_expected)) {                                                         \
      fail(__FILE__, __LINE__,                                                                           \
           #computed ": " + std::to_string(check_computed) + ", not " + std::to_string(check_expected)); \
    }                                                                                                    \
  } while (false)

#define CHECK_NEAR(computed, expected, tolerance)                                                              \
  do {                                                                                                         \
    const double check_computed = (computed), check_expected = (expected);                                     \
    if (!(std::abs(check_computed - check_expected) <= (tolerance))) {                                         \
      fail(__FILE__, __LINE__,                                                                                 \
           #computed ": " + std::to_string(check_computed) + ", not about " + std::to_string(check_expected)); \
    }                                                                                                          \
  } while (false)

// Numbers of a fixed sequence.
class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }
  float normal() { return normal_(engine_); }
  int integer(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

}  // namespace unit_tests
