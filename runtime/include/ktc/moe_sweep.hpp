// The loop all four products of a layer share: expert by expert, own panel by own panel, slots group by group.
//
// A worker owns columns of the output: it alone adds to them, in ascending order of expert. So no result depends on how
// many workers there are, and nothing needs an atomic.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ktc/prefetch.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc {

// One matrix per expert, as it is packed.
template <class Isa>
struct StoredPanels {
  using Element = typename Isa::Element;
  static constexpr bool kFromMemory = true;

  const Element* first;
  std::int64_t expert_stride;
  std::int64_t panel_size;

  std::int64_t contraction() const { return panel_size / kPanelWidth; }
  std::int64_t chunk() const { return contraction(); }

  const Element* prepare(std::int64_t expert, std::int64_t panel, std::int64_t) const {
    return first + expert * expert_stride + panel * panel_size;
  }
  PanelLocation location(std::int64_t expert, std::int64_t panel) const {
    const auto bytes = panel_size * static_cast<std::int64_t>(sizeof(Element));
    return {reinterpret_cast<const char*>(prepare(expert, panel, 0)), 1, bytes, bytes};
  }
};

// The same matrices transposed. A panel is rebuilt in chunks that stay in L1 while all slots of the expert use them;
// a whole panel would go to L2 and back, which takes longer than its shuffles.
template <class Isa>
struct TransposedPanels {
  using Element = typename Isa::Element;
  static constexpr bool kFromMemory = false;

  const Element* first;
  std::int64_t expert_stride;
  std::int64_t panel_size;
  std::int64_t num_panels;
  Element* scratch;

  static constexpr std::int64_t kChunkBlocks = 16;
  static constexpr std::int64_t kScratchSize = kChunkBlocks * weight_format::kBlock;

  std::int64_t contraction() const { return num_panels * kPanelWidth; }
  std::int64_t chunk() const { return kChunkBlocks * kPanelWidth; }

  const Element* prepare(std::int64_t expert, std::int64_t panel, std::int64_t first_k) const {
    const std::int64_t first_block = first_k / kPanelWidth;
    const std::int64_t last_block = std::min(first_block + kChunkBlocks, num_panels);
    const Element* source = block(expert, panel);
    for (std::int64_t stored = first_block; stored < last_block; ++stored) {
      Isa::transpose_block(source + stored * panel_size, scratch + (stored - first_block) * weight_format::kBlock);
    }
    return scratch;
  }
  PanelLocation location(std::int64_t expert, std::int64_t panel) const {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Element));
    return {reinterpret_cast<const char*>(block(expert, panel)), num_panels, weight_format::kBlock * kBytes,
            panel_size * kBytes};
  }

 private:
  const Element* block(std::int64_t expert, std::int64_t panel) const {
    return first + expert * expert_stride + panel * weight_format::kBlock;
  }
};

// Bytes of unfinished sums that a sweep may need, in accumulators.
template <class Isa>
std::int64_t tiles_size(const Routing& routing) {
  return routing.max_groups() * Isa::kMaxRows * kPanelWidth;
}

// For every active expert and each panel in `own`: multiply all its slots and call `epilogue(group, panel, tile)`,
// announced by `epilogue.prefetch(group, panel)` before the last product. `rows` are packed slots,
// `panels.contraction()` elements each (see `gather_slots`); `tiles` holds `tiles_size`.
template <class Isa, class Panels, class Epilogue>
void sweep(const Routing& routing, Range own, const Panels& panels, const typename Isa::Element* rows,
           typename Isa::Accumulator* tiles, const Epilogue& epilogue) {
  constexpr int kDepth = ElementTraits<typename Isa::Element>::kDepth;
  const std::int64_t contraction = panels.contraction();
  const std::int64_t tile_size = panels.chunk() < contraction ? Isa::kMaxRows * kPanelWidth : 0;  // else one serves all
  const auto& experts = routing.active_experts();
  if (own.begin == own.end) return;

  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto num_groups = static_cast<std::int64_t>(experts[i].last_group - experts[i].first_group);
    const auto* groups = &routing.groups()[experts[i].first_group];
    const bool streams = Panels::kFromMemory && num_groups == 1 && groups->rows <= Isa::kStreamRows;
    const std::int64_t prefetch_calls = num_groups * Isa::prefetch_calls(contraction / kDepth);
    for (std::int64_t panel = own.begin; panel < own.end; ++panel) {
      Prefetcher next;
      if (!streams && panel + 1 < own.end) {
        next = Prefetcher(panels.location(experts[i].expert, panel + 1), prefetch_calls);
      } else if (!streams && i + 1 < experts.size()) {
        next = Prefetcher(panels.location(experts[i + 1].expert, own.begin), prefetch_calls);
      }
      for (std::int64_t k = 0; k < contraction; k += panels.chunk()) {
        const std::int64_t end = std::min(k + panels.chunk(), contraction);
        const auto* packed = panels.prepare(experts[i].expert, panel, k);
        for (std::int64_t group = 0; group < num_groups; ++group) {
          const SlotGroup& slots = groups[group];
          auto* tile = tiles + group * tile_size;
          const auto* a = rows + slots.first_slot * contraction + k * slots.rows;
          if (end == contraction) epilogue.prefetch(slots, panel);
          Isa::multiply(slots.rows, (end - k) / kDepth, a, packed, tile, k > 0, next);
          if (end == contraction) epilogue(slots, panel, tile);
        }
      }
    }
  }
}

// Packed slots: group after group, [k step][row][kDepth neighbours of k], so that the micro-kernel reads one stretch.
// Rows of the source, thousands of bytes apart, would fall into the same sets of L1.
template <class Element>
void interleave(const Element* const* rows, int num_rows, std::int64_t first_k, std::int64_t last_k, Element* target) {
  constexpr std::int64_t kDepth = ElementTraits<Element>::kDepth;
  constexpr std::int64_t kChunk = 16 * kDepth;  // a cache line of each row at a time
  for (std::int64_t chunk = first_k; chunk < last_k; chunk += kChunk) {
    const std::int64_t end = std::min(chunk + kChunk, last_k);
    for (int row = 0; row < num_rows; ++row) {
      for (std::int64_t k = chunk; k < end; k += kDepth) {
        std::memcpy(target + (k - first_k) * num_rows + row * kDepth, rows[row] + k, kDepth * sizeof(Element));
      }
    }
  }
}

// Copy each slot's token from `tokens` (T, K) into packed slots of `padded` elements; the padding becomes zero.
template <class Isa>
void gather_slots(const Routing& routing, const MatrixView<const typename Isa::Element>& tokens, std::int64_t padded,
                  Range groups, typename Isa::Element* target) {
  using Element = typename Isa::Element;
  constexpr std::int64_t kDepth = ElementTraits<Element>::kDepth;
  const std::int64_t whole = tokens.columns / kDepth * kDepth;
  for (std::int64_t index = groups.begin; index < groups.end; ++index) {
    const SlotGroup& group = routing.groups()[static_cast<std::size_t>(index)];
    const Element* rows[Isa::kMaxRows];
    for (int row = 0; row < group.rows; ++row) rows[row] = tokens.row(routing.token(group.first_slot + row));

    Element* packed = target + group.first_slot * padded;
    interleave(rows, group.rows, 0, whole, packed);
    std::fill(packed + whole * group.rows, packed + padded * group.rows, Element{});
    if (whole == tokens.columns) continue;
    for (int row = 0; row < group.rows; ++row) packed[whole * group.rows + row * kDepth] = rows[row][whole];
  }
}

}  // namespace ktc
