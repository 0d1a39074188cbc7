// Rows of slots in the order in which a micro-kernel reads them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Packed slots: group after group, [k / depth][row][depth neighbours of k], with the depth in which the ISA reads a
// group of that many rows, so that the micro-kernel reads one stretch. Rows of the source, thousands of bytes apart,
// would fall into the same sets of L1.
template <MicroKernel Kernel, class Function>
void with_row_depth(int rows, Function&& function) {
  if constexpr (Kernel::kBlocked) {
    if (Kernel::multiplies_tiles(rows)) return function(std::integral_constant<int, Kernel::kTileDepth>{});
  }
  function(std::integral_constant<int, ElementTraits<typename Kernel::Element>::kDepth>{});
}

// Writes 16 elements of a row to their places from `target` on, in a packed group of `num_rows`. Unrolled by hand: GCC
// makes scatters of a loop, which take four times as long as these stores.
template <int kRowDepth, class Element>
[[gnu::always_inline]] inline void interleave_row(const Element* row, int num_rows, Element* target) {
  constexpr std::int64_t kCopied = std::min<std::int64_t>(kRowDepth, kHalfPanel);
  const std::int64_t stride = static_cast<std::int64_t>(kRowDepth) * num_rows;
  [&]<std::size_t... copy>(std::index_sequence<copy...>) {
    (std::memcpy(target + copy * kCopied / kRowDepth * stride, row + copy * kCopied, kCopied * sizeof(Element)), ...);
  }(std::make_index_sequence<kHalfPanel / kCopied>{});
}

// Writes k from first_k to last_k of each row into the packed group at `target`. `rows[row]` points to first_k of a
// row; the range is whole half panels.
template <int kRowDepth, class Element>
void interleave(const Element* const* rows, int num_rows, std::int64_t first_k, std::int64_t last_k, Element* target) {
  constexpr std::int64_t kChunk = std::max<std::int64_t>(kHalfPanel, 64 / sizeof(Element));  // a cache line of each row
  for (std::int64_t chunk = first_k; chunk < last_k; chunk += kChunk) {
    const std::int64_t end = std::min(chunk + kChunk, last_k);
    for (int row = 0; row < num_rows; ++row) {
      for (std::int64_t k = chunk; k < end; k += kHalfPanel) {
        Element* place = target + k / kRowDepth * kRowDepth * num_rows + row * kRowDepth + k % kRowDepth;
        interleave_row<kRowDepth>(rows[row] + k - first_k, num_rows, place);
      }
    }
  }
}

// Copies the row `row_of(slot)` of `columns` elements of each slot of a group into packed slots of `padded` elements,
// and fills the padding with zeros.
template <MicroKernel Kernel, class RowOf>
void pack_group(const SlotGroup& group, const RowOf& row_of, std::int64_t columns, std::int64_t padded,
                typename Kernel::Element* target) {
  using Element = typename Kernel::Element;
  const Element* rows[Kernel::kMaxRows];
  for (int row = 0; row < group.rows; ++row) rows[row] = row_of(group.first_slot + row);

  with_row_depth<Kernel>(group.rows, [&]<int kRowDepth>(std::integral_constant<int, kRowDepth>) {
    Element* packed = target + group.first_slot * padded;
    const std::int64_t whole = columns / kHalfPanel * kHalfPanel;
    const std::int64_t last_step = columns / kRowDepth * kRowDepth;
    std::fill(packed + last_step * group.rows, packed + padded * group.rows, Element{});
    interleave<kRowDepth>(rows, group.rows, 0, whole, packed);
    for (std::int64_t k = whole; k < columns; ++k) {
      for (int row = 0; row < group.rows; ++row) {
        packed[k / kRowDepth * kRowDepth * group.rows + row * kRowDepth + k % kRowDepth] = rows[row][k];
      }
    }
  });
}

// The same for all slots of some groups, from the rows of their tokens in `tokens` (T, K).
template <MicroKernel Kernel>
void gather_slots(const Routing& routing, const MatrixView<const typename Kernel::Element>& tokens, std::int64_t padded,
                  Range groups, typename Kernel::Element* target) {
  for (std::int64_t index = groups.begin; index < groups.end; ++index) {
    pack_group<Kernel>(
        routing.groups()[static_cast<std::size_t>(index)],
        [&](std::int64_t slot) { return tokens.row(routing.token(slot)); }, tokens.columns, padded, target);
  }
}

}  // namespace ktc::inline KTC_UNIT
