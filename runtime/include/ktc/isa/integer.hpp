// Products of unsigned bytes (a row's codes, 128 added) and signed ones (a weight's), summed in 32 bits.
//
// An ISA's integer side has the interface of an ISA as far as a sweep needs it: `Element`, `Accumulator`, `kMaxRows`,
// `kStreamRows`, `kBlocked`, `multiply`, `steps_ahead`; and `elements()`, the ISA that multiplies elements, since one
// worker may need both in turn. Groups are the same for both.
#pragma once

#include <cstdint>

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

// Four neighbours of k as one integer, without a violation of the aliasing rules.
using Quad [[gnu::may_alias]] = std::int32_t;

}  // namespace ktc::inline KTC_UNIT
