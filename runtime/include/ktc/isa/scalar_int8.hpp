// Integer products in plain C++: the vector versions must equal them to the last bit.
#pragma once

#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/isa/scalar.hpp"
#include "ktc/unit.hpp"

namespace ktc::scalar::inline KTC_UNIT {

template <class Element>
using IntegerIsa = BesideElements<RowKernel<std::uint8_t, std::int8_t>, Isa<Element>>;
static_assert(IntegerKernel<IntegerIsa<bf16>>);

}  // namespace ktc::scalar::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <class Element>
struct IntegerIsa<scalar::Isa<Element>> {
  using type = scalar::IntegerIsa<Element>;
};

}  // namespace ktc::inline KTC_UNIT
