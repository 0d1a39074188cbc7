// The last step of a linear layer's products.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// out = sums + bias, rounded once, of the first `columns` of a panel's 32 outputs. `bias` may be null.
template <class Lanes>
void write_outputs(const float* sums, const bf16* bias, std::int64_t columns, bf16* out) {
  bf16 added[kPanelWidth] = {};
  alignas(64) bf16 rounded[kPanelWidth];
  bf16* target = columns == kPanelWidth ? out : rounded;
  if (bias != nullptr) std::copy_n(bias, columns, added);
  for (int half = 0; half < kPanelWidth; half += kHalfPanel) {
    Lanes sum = Lanes::load(sums + half);
    if (bias != nullptr) sum = sum + Lanes::from_elements(added + half);
    sum.to_elements(target + half);
  }
  if (target == rounded) std::copy_n(rounded, columns, out);
}

}  // namespace ktc::inline KTC_UNIT
