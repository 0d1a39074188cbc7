// The loop all four products of a layer share: expert by expert, own panel by own panel, slots group by group.
//
// A worker owns columns of the output: it alone adds to them, in ascending order of expert. So no result depends on how
// many workers there are, and nothing needs an atomic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ktc/panel_source.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"

namespace ktc {

// The panels of a sweep in its order: all of one active expert, then those of the next.
class SweepOrder {
 public:
  SweepOrder(const Routing& routing, Range own) : experts_(&routing.active_experts()), own_(own), panel_(own.begin) {}

  bool done() const { return own_.begin == own_.end || active_ == experts_->size(); }
  const ActiveExpert& active() const { return (*experts_)[active_]; }
  PanelIndex index() const { return {active().expert, panel_}; }

  SweepOrder next() const {
    SweepOrder result = *this;
    if (++result.panel_ == own_.end) {
      result.panel_ = own_.begin;
      ++result.active_;
    }
    return result;
  }

 private:
  const std::vector<ActiveExpert>* experts_;
  Range own_;
  std::size_t active_ = 0;
  std::int64_t panel_;
};

// What to do beside the products of one panel: get the next one ready, and nothing after the last.
template <class Panels>
typename Panels::Ahead work_ahead(const Panels& panels, const SweepOrder& here, std::int64_t calls) {
  const SweepOrder next = here.next();
  if (next.done()) return {};
  const SweepOrder after_next = next.next();
  return panels.ahead(next.index(), after_next.done() ? next.index() : after_next.index(), calls);
}

// For every active expert and each panel in `own`: multiply all its slots and call `epilogue(group, index, tile)`,
// announced by `epilogue.prefetch(group, index)`. `rows` are packed slots, `panels.contraction()` elements each (see
// `gather_slots`).
template <class Isa, class Panels, class Epilogue>
void sweep(const Routing& routing, Range own, Panels panels, const typename Isa::Element* rows,
           const Epilogue& epilogue) {
  alignas(64) typename Isa::Accumulator tile[Isa::kMaxRows * kPanelWidth];
  const std::int64_t contraction = panels.contraction();
  const std::int64_t steps = contraction / ElementTraits<typename Isa::Element>::kDepth;
  SweepOrder here(routing, own);
  if (!here.done()) panels.start(here.index());

  for (; !here.done(); here = here.next()) {
    const auto* group = &routing.groups()[here.active().first_group];
    const auto* last_group = &routing.groups()[here.active().last_group - 1];
    const std::int64_t num_groups = last_group - group + 1;
    const bool streams = Panels::kFromMemory && num_groups == 1 && group->rows <= Isa::kStreamRows;
    auto ahead = streams ? typename Panels::Ahead{} : work_ahead(panels, here, num_groups * Isa::steps_ahead(steps));
    const auto* packed = panels.current(here.index());
    for (; group <= last_group; ++group) {
      epilogue.prefetch(*group, here.index());
      Isa::multiply(group->rows, steps, rows + group->first_slot * contraction, packed, tile, ahead);
      epilogue(*group, here.index(), tile);
    }
    ahead.finish();
    panels.advance();
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
