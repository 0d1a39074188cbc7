// A row of activations to 8 bits: q = round(x * (127 / largest)), stored as q + 128, and its scale, largest / 127.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Added to a code: VPDPBUSD multiplies unsigned bytes with signed ones.
inline constexpr int kCodeOffset = 128;

// Writes `size` codes, and up to 15 more where `size` is not a multiple of 16, and returns the scale. A row whose
// largest magnitude is below 2^-100 counts as zero, since 127 times its inverse might not be finite. A row with an
// infinity or a NaN has the scale NaN, and all results from it are NaN.
template <class Lanes, class Element>
float quantise_row(const Element* row, std::int64_t size, std::uint8_t* codes) {
  const std::int64_t whole = size / kHalfPanel * kHalfPanel;
  alignas(64) Element last[kHalfPanel] = {};
  std::copy(row + whole, row + size, last);

  Lanes largest = absolute(Lanes::from_elements(last));
  for (std::int64_t k = 0; k < whole; k += kHalfPanel) {
    largest = greater(largest, absolute(Lanes::from_elements(row + k)));
  }
  const float of_row = largest.greatest();
  const bool finite = of_row <= std::numeric_limits<float>::max();
  const bool zero = of_row < 0x1p-100f;
  if (!finite || zero) {
    std::fill(codes, codes + size, static_cast<std::uint8_t>(kCodeOffset));
    return zero ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  const Lanes inverse(127.0f / of_row);
  for (std::int64_t k = 0; k < whole; k += kHalfPanel) {
    (Lanes::from_elements(row + k) * inverse).to_codes(codes + k);
  }
  if (whole < size) (Lanes::from_elements(last) * inverse).to_codes(codes + whole);
  return of_row / 127.0f;
}

}  // namespace ktc::inline KTC_UNIT
