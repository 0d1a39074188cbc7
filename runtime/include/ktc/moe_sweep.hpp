// The loop all four products of a layer share: expert by expert, own panel by own panel, slots group by group.
//
// A worker owns columns of the output: it alone adds to them, in ascending order of expert. So no result depends on how
// many workers there are, and nothing needs an atomic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "ktc/panel_source.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"

namespace ktc {

// How much of one expert's product an ISA keeps at hand: `groups` of slots against `panels`, `contraction` at a time.
struct Blocking {
  std::int64_t panels;
  std::int64_t groups;
  std::int64_t contraction;
};

// The parts of panels that a sweep multiplies, in its order: expert by expert; of an expert block by block, in which
// all panels get the first stretch of the contraction, then all the next. Without blocking that is panel by panel.
template <class Isa>
class SweepOrder {
 public:
  SweepOrder(const Routing& routing, Range own, std::int64_t contraction)
      : routing_(&routing), own_(own), contraction_(contraction) {
    if (!done()) enter_expert();
  }

  bool done() const { return own_.begin == own_.end || active_ == routing_->active_experts().size(); }
  PanelPart part() const { return {expert().expert, panel_, first_k_, std::min(blocking_.contraction, rest_k())}; }
  bool begins_sum() const { return first_k_ == 0; }
  bool ends_sum() const { return rest_k() <= blocking_.contraction; }

  const SlotGroup* begin() const { return routing_->groups().data() + first_group_; }
  const SlotGroup* end() const { return routing_->groups().data() + last_group(); }
  std::int64_t num_groups() const { return last_group() - first_group_; }
  // Where the sums of the first group belong among those kept at hand; the others' follow.
  std::int64_t first_sum() const { return ends_sum() && begins_sum() ? 0 : (panel_ - first_panel_) * num_groups(); }
  bool keeps_sums() const { return !(ends_sum() && begins_sum()); }

  SweepOrder next() const {
    SweepOrder result = *this;
    result.advance();
    return result;
  }

 private:
  const ActiveExpert& expert() const { return routing_->active_experts()[active_]; }
  std::int64_t rest_k() const { return contraction_ - first_k_; }
  std::int64_t last_panel() const { return std::min(first_panel_ + blocking_.panels, own_.end); }
  std::int64_t last_group() const {
    return std::min(first_group_ + blocking_.groups, static_cast<std::int64_t>(expert().last_group));
  }

  void enter_expert() {
    const auto first = static_cast<std::int64_t>(expert().first_group);
    const auto last = static_cast<std::int64_t>(expert().last_group);
    blocking_ = {.panels = 1, .groups = last - first, .contraction = contraction_};
    if constexpr (Isa::kBlocked) {
      const SlotGroup& last_group = routing_->groups()[static_cast<std::size_t>(last - 1)];
      const std::int64_t rows = last_group.first_slot + last_group.rows - routing_->groups()[first].first_slot;
      if (rows >= Isa::kBlockedRows) blocking_ = Isa::kBlocking;
    }
    first_panel_ = panel_ = own_.begin;
    first_group_ = first;
    first_k_ = 0;
  }

  void advance() {
    if (++panel_ < last_panel()) return;
    if (!ends_sum()) {
      panel_ = first_panel_;
      first_k_ += blocking_.contraction;
      return;
    }
    first_k_ = 0;
    if (last_group() < static_cast<std::int64_t>(expert().last_group)) {
      panel_ = first_panel_;
      first_group_ = last_group();
      return;
    }
    first_group_ = static_cast<std::int64_t>(expert().first_group);
    first_panel_ = panel_;
    if (panel_ < own_.end) return;
    if (++active_ < routing_->active_experts().size()) enter_expert();
  }

  const Routing* routing_;
  Range own_;
  std::int64_t contraction_;
  std::size_t active_ = 0;
  Blocking blocking_{};
  std::int64_t first_panel_ = 0;
  std::int64_t panel_ = 0;
  std::int64_t first_group_ = 0;
  std::int64_t first_k_ = 0;
};

// What to do beside the products of one part: get the next one ready, and nothing after the last.
template <class Isa, class Panels>
typename Panels::Ahead work_ahead(Panels& panels, const SweepOrder<Isa>& here, std::int64_t calls) {
  const auto next = here.next();
  if (next.done()) return {};
  const auto after_next = next.next();
  return panels.ahead(next.part(), after_next.done() ? next.part() : after_next.part(), calls);
}

// Sums that a worker of `sweep` keeps at hand, in accumulators.
template <class Isa>
constexpr std::int64_t sums_at_hand() {
  if constexpr (Isa::kBlocked) return Isa::kBlocking.panels * Isa::kBlocking.groups * Isa::kMaxRows * kPanelWidth;
  return Isa::kMaxRows * kPanelWidth;
}

// For every active expert and each panel in `own`: multiply all its slots and call `epilogue(group, part, tile)`,
// announced by `epilogue.prefetch(group, part)`. Before it, `epilogue.complete(isa, group, part, tile)` may add
// products of its own; `epilogue.begin(part)` and `epilogue.end(part)` stand around the calls of a panel. `rows` are
// packed slots, `panels.contraction()` elements each (see `gather_slots`). `sums` are `sums_at_hand()` accumulators of
// this worker's own.
template <class Isa, class Panels, class Epilogue>
void sweep(const Routing& routing, Range own, Panels panels, const typename Isa::Element* rows,
           typename Isa::Accumulator* sums, const Epilogue& epilogue) {
  constexpr std::int64_t kTile = Isa::kMaxRows * kPanelWidth;
  constexpr int kDepth = ElementTraits<typename Isa::Element>::kDepth;
  const std::int64_t contraction = panels.contraction();
  Isa isa;
  SweepOrder<Isa> here(routing, own, contraction);
  if (!here.done()) panels.start(here.part());

  for (; !here.done(); here = here.next()) {
    const PanelPart part = here.part();
    const std::int64_t steps = part.size_k / kDepth;
    const SlotGroup* group = here.begin();
    const std::int64_t num_groups = here.num_groups();
    const bool streams = num_groups == 1 && group->rows <= Panels::kStreamRows;
    auto ahead = streams ? typename Panels::Ahead{}
                         : work_ahead(panels, here, num_groups * Isa::steps_ahead(group->rows, steps));
    const auto* packed = Panels::kMultipliesCodes && streams ? nullptr : panels.current(part);
    auto* tile = sums + here.first_sum() * kTile;
    if (here.ends_sum()) epilogue.begin(part);
    for (; group != here.end(); ++group) {
      if (here.ends_sum()) epilogue.prefetch(*group, part);
      const auto* a = rows + group->first_slot * contraction + part.first_k * group->rows;
      if constexpr (Panels::kMultipliesCodes) {
        if (streams) {  // the only group, and all of its panel
          panels.multiply_codes(group->rows, part, a, tile);
          epilogue(*group, part, tile);
          break;
        }
      }
      if (here.begins_sum()) {
        isa.multiply(group->rows, steps, a, packed, tile, ahead);
      } else if constexpr (Isa::kBlocked) {
        isa.multiply_add(group->rows, steps, a, packed, tile, ahead);
      }
      if (here.ends_sum()) {
        epilogue.complete(isa, *group, part, tile);
        epilogue(*group, part, tile);
      }
      if (here.keeps_sums()) tile += kTile;
    }
    if (here.ends_sum()) epilogue.end(part);
    ahead.finish();
    panels.advance();
  }
}

// Packed slots: group after group, [k / depth][row][depth neighbours of k], with the depth in which the ISA reads a
// group of so many rows, so that the micro-kernel reads one stretch. Rows of the source, thousands of bytes apart,
// would fall into the same sets of L1.
template <class Isa, class Function>
void with_row_depth(int rows, Function&& function) {
  if constexpr (Isa::kBlocked) {
    if (Isa::multiplies_tiles(rows)) return function(std::integral_constant<int, Isa::kTileDepth>{});
  }
  function(std::integral_constant<int, ElementTraits<typename Isa::Element>::kDepth>{});
}

// Write 16 elements of a row to its places from `target` on, in a packed group of `num_rows`. Unrolled by hand: the
// compiler would make scatters of a loop, which take four times as long as the stores they stand for.
template <int kRowDepth, class Element>
[[gnu::always_inline]] inline void interleave_row(const Element* row, int num_rows, Element* target) {
  constexpr std::int64_t kCopied = std::min<std::int64_t>(kRowDepth, kHalfPanel);
  const std::int64_t stride = static_cast<std::int64_t>(kRowDepth) * num_rows;
  [&]<std::size_t... copy>(std::index_sequence<copy...>) {
    (std::memcpy(target + copy * kCopied / kRowDepth * stride, row + copy * kCopied, kCopied * sizeof(Element)), ...);
  }(std::make_index_sequence<kHalfPanel / kCopied>{});
}

// Write the stretch [first_k, last_k) of each row, whole half panels that begin at `rows[row]`, into the packed group
// at `target`.
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

// Copy the row `row_of(slot)`, of `columns` elements, of each slot of a group into packed slots of `padded` elements;
// the padding becomes zero.
template <class Isa, class RowOf>
void pack_group(const SlotGroup& group, const RowOf& row_of, std::int64_t columns, std::int64_t padded,
                typename Isa::Element* target) {
  using Element = typename Isa::Element;
  const Element* rows[Isa::kMaxRows];
  for (int row = 0; row < group.rows; ++row) rows[row] = row_of(group.first_slot + row);

  with_row_depth<Isa>(group.rows, [&]<int kRowDepth>(std::integral_constant<int, kRowDepth>) {
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

// The same of each slot's token from `tokens` (T, K).
template <class Isa>
void gather_slots(const Routing& routing, const MatrixView<const typename Isa::Element>& tokens, std::int64_t padded,
                  Range groups, typename Isa::Element* target) {
  for (std::int64_t index = groups.begin; index < groups.end; ++index) {
    pack_group<Isa>(
        routing.groups()[static_cast<std::size_t>(index)],
        [&](std::int64_t slot) { return tokens.row(routing.token(slot)); }, tokens.columns, padded, target);
  }
}

}  // namespace ktc
