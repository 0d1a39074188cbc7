// Rows with an infinity or a NaN, multiplied with a panel of codes through bf16 weights, block by block.
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
#include "ktc/weight_format/fixed_point_rows.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// tile[row][32] = sum over k of a[k][row] * panel[k][32], of the rows that are not finite. Those of the others stay, so
// that a result does not depend on the other tokens of its group. It is not inlined, since that
// slows down the products before it.
template <InstructionSet Isa, WeightPanel Panel>
[[gnu::noinline, gnu::cold]] void multiply_decoded(const FixedPointRows& x, std::int64_t padded_k, const bf16* a,
                                                   const std::byte* panel, float* tile) {
  alignas(64) bf16 weights[kBlock];
  alignas(64) bf16 values[kPanelWidth];
  alignas(64) float product[kPanelWidth];
  FetchAhead<Isa> ahead;
  for (int row = 0; row < x.rows; ++row, tile += kPanelWidth) {
    if (x.finite(row)) continue;
    std::fill(tile, tile + kPanelWidth, 0.0f);
    for (std::int64_t block = 0; block < padded_k / kPanelWidth; ++block) {
      const bf16* pairs = a + (block * kPanelWidth * x.rows + 2 * row);
      for (int pair = 0; pair < kPanelWidth / 2; ++pair, pairs += 2 * x.rows) {
        std::copy_n(pairs, 2, values + 2 * pair);
      }
      decode_blocks<typename Isa::Lanes, Panel>(panel, block, block + 1, weights);
      Isa::multiply(1, kPanelWidth / 2, values, weights, product, ahead);
      for (int output = 0; output < kPanelWidth; ++output) tile[output] += product[output];
    }
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
