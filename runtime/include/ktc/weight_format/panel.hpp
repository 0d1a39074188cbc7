// The packed order of a weight matrix, shared by every format that computes in `Element`.
//
// A matrix W (outputs N, contraction K) is cut into panels of 32 outputs; a panel holds, step after step along K, [32
// outputs][kDepth neighbours of K]. So one row of the micro-kernel multiplies one step, and 32 steps' worth of K (a
// block) is 32 x 32 elements in one stretch: the unit in which a panel of W^T is rebuilt for backward. Padding to whole
// panels and blocks is zero.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

inline constexpr std::int64_t kBlock = kPanelWidth * kPanelWidth;
// Every ISA transposes a block in this many pieces.
inline constexpr unsigned kBlockPieces = 16;

// The offset of element (lane, k) in a panel.
template <class Element>
constexpr std::int64_t panel_offset(std::int64_t lane, std::int64_t k) {
  constexpr std::int64_t kDepth = ElementTraits<Element>::kDepth;
  return (k / kDepth * kPanelWidth + lane) * kDepth + k % kDepth;
}

// Write `lanes` outputs, from row `first_row` of `source` on, into a panel of padded contraction `padded_k`, beginning
// at lane `first_lane`. Elements outside the source become zero.
template <class Element, class Source>
void pack_lanes(const MatrixView<const Source>& source, std::int64_t first_row, std::int64_t lanes,
                std::int64_t first_lane, std::int64_t padded_k, Element* panel) {
  for (std::int64_t block = 0; block < padded_k; block += kPanelWidth) {  // 2 KB of bf16: stays in L1 while it fills
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const std::int64_t row = first_row + lane;
      for (std::int64_t k = block; k < block + kPanelWidth; ++k) {
        const bool inside = row < source.rows && k < source.columns;
        panel[panel_offset<Element>(first_lane + lane, k)] = inside ? Element(source.row(row)[k]) : Element{};
      }
    }
  }
}

// The inverse of `pack_lanes`, without the padding.
template <class Element>
void unpack_lanes(const Element* panel, std::int64_t first_lane, std::int64_t lanes, std::int64_t first_row,
                  const MatrixView<Element>& target) {
  const std::int64_t last_row = std::min(first_row + lanes, target.rows);
  for (std::int64_t block = 0; block < target.columns; block += kPanelWidth) {
    const std::int64_t last_k = std::min(block + kPanelWidth, target.columns);
    for (std::int64_t row = first_row; row < last_row; ++row) {
      const std::int64_t lane = first_lane + row - first_row;
      for (std::int64_t k = block; k < last_k; ++k) target.row(row)[k] = panel[panel_offset<Element>(lane, k)];
    }
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
