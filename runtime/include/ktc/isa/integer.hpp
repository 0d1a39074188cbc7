// Products of unsigned bytes (a row's codes, 128 added) and signed ones (a weight's), summed in 32 bits.
#pragma once

#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <>
struct ElementTraits<std::uint8_t> {
  using Accumulator = std::int32_t;
  static constexpr int kDepth = 4;
};

// Each ISA's header for integers defines the type.
template <class Isa>
struct IntegerIsa;

template <class Isa>
using IntegerIsaOf = typename IntegerIsa<Isa>::type;

// The `IntegerKernel` of an instruction set: a micro-kernel of bytes beside that of the elements.
template <class Bytes, class Elements>
class BesideElements : public Bytes {
 public:
  Elements& elements() { return elements_; }

 private:
  Elements elements_;
};

}  // namespace ktc::inline KTC_UNIT
