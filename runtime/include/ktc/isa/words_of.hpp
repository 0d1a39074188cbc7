// What vectors of 16-bit words do in the same way at every width: `ktc/concepts.hpp` describes them (`VectorWords`).
// `Registers` has the rest of their operations, one or two instructions each, and those that are put together here:
//
//   products, byte_products   of two words, and of two unsigned with two signed bytes, added for each output or word.
//   add, add_words            of integers of 32 and of 16 bits.
#pragma once

#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <class Registers>
struct WordsOf : Registers {
  using Vector = typename Registers::Vector;

  static Vector add_products(Vector sums, Vector a, Vector b) {
    return Registers::add(sums, Registers::products(a, b));
  }
  static Vector add_products_in_order(Vector sums, Vector a, Vector b) { return computed(add_products(sums, a, b)); }

  static constexpr int kByteSumBits = 16;
  static Vector add_byte_products(Vector sums, Vector a, Vector b) {
    return computed(Registers::add_words(sums, Registers::byte_products(a, b)));
  }
  static Vector add_byte_sums(Vector sums, Vector upper, Vector lower) {
    const Vector with_upper = add_products(sums, upper, Registers::all(std::int16_t{256}));
    return add_products(with_upper, lower, Registers::all(std::int16_t{-1}));
  }

 private:
  // In a register before anything that follows.
  static Vector computed(Vector value) {
    asm("" : "+v"(value));
    return value;
  }
};

}  // namespace ktc::inline KTC_UNIT
