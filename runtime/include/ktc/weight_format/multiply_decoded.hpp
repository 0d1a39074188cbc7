// A few rows multiplied with a panel of codes through bf16 weights, block by block: for rows with an infinity or a NaN.
// Products with the codes themselves subtract offsets, and infinity - infinity is NaN.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/decode_blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// tile[row][32] = sum over k of a[k][row] * panel[k][32], of up to a group's rows.
template <InstructionSet Isa, WeightPanel Panel>
void multiply_decoded(int rows, std::int64_t padded_k, const bf16* a, const std::byte* panel, float* tile) {
  alignas(64) bf16 weights[kBlock];
  alignas(64) float product[Isa::kMaxRows * kPanelWidth];
  FetchAhead<Isa> ahead;
  std::fill(tile, tile + rows * kPanelWidth, 0.0f);
  for (std::int64_t block = 0; block < padded_k / kPanelWidth; ++block, a += rows * kPanelWidth) {
    decode_blocks<typename Isa::Lanes, Panel>(panel, block, block + 1, weights);
    Isa::multiply(rows, kPanelWidth / 2, a, weights, product, ahead);
    for (int i = 0; i < rows * kPanelWidth; ++i) tile[i] += product[i];
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
