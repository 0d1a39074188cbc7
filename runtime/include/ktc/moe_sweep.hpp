// The loop all four products of a layer share: expert by expert, panel by panel, slots group by group.
//
// Workers take panels from a queue. The worker with a panel of an expert multiplies all slots of the expert. Panels to
// which several experts add are passed from expert to expert in ascending order. So no result depends on the number of
// workers or on their speed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/packed_slots.hpp"
#include "ktc/panel_queue.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/sweep_order.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Accumulators that a worker of a sweep keeps at hand. The plan counts on the bounds
// (ktc/model/kernels/working_memory.py).
template <MicroKernel Kernel>
constexpr std::int64_t sums_at_hand() {
  constexpr std::int64_t kBytes = sizeof(typename Kernel::Accumulator);
  constexpr std::int64_t kTile = Kernel::kMaxRows * kPanelWidth;
  if constexpr (Kernel::kBlocked) {
    constexpr std::int64_t kBlock = Kernel::kBlocking.panels * Kernel::kBlocking.groups * kTile;
    static_assert(kBlock * kBytes <= 3 << 18);
    return kBlock;
  }
  constexpr std::int64_t kSums = std::max(kTile, kMostOfRun * kRunRows * kPanelWidth);
  static_assert(kSums * kBytes <= 1 << 14);
  return kSums;
}

// One worker's part of a product. For every active expert and each panel that the worker takes from the queue, all
// slots are multiplied and given to the epilogue. `rows` are packed slots, `panels.contraction()` elements each (see
// `gather_slots`). `sums` are `sums_at_hand()` accumulators of this worker alone.
template <MicroKernel Kernel, PanelSource<Kernel> Panels, SweepEpilogue<Kernel> Epilogue>
class Sweep {
  using Element = typename Kernel::Element;
  using Accumulator = typename Kernel::Accumulator;

 public:
  Sweep(const Routing& routing, PanelQueue& queue, Panels panels, const Element* rows, Accumulator* sums,
        const Epilogue& epilogue)
      : queue_(queue),
        panels_(panels),
        rows_(rows),
        sums_(sums),
        epilogue_(epilogue),
        window_(SweepOrder<Kernel>(routing, queue, panels.contraction())) {}

  // `ready` is called with what the first panels of this worker are, and returns when `rows` are complete.
  template <class Ready>
  void run(const Ready& ready) {
    ready(upcoming());
    if (!here().done()) panels_.start(here().part());
    for (; !here().done(); window_.advance()) {
      if constexpr (Panels::kStreamRows > 0) {
        if (num_rows() <= Panels::kStreamRows) {
          multiply_run();
          continue;
        }
      }
      multiply_part();
    }
  }

 private:
  static constexpr std::int64_t kMostUpcoming = 1 << 16;  // a small part of an L2
  static constexpr std::int64_t kTile = Kernel::kMaxRows * kPanelWidth;
  static constexpr int kDepth = ElementTraits<Element>::kDepth;

  const SweepOrder<Kernel>& here() const { return window_.here(); }

  // The first panels, where they are read as they are stored; one from its first block on, if others are skipped.
  Upcoming upcoming() const {
    if constexpr (Panels::kStreamRows > 0) {
      if (!here().done() && num_rows() <= Panels::kStreamRows) {
        const PanelPart part = here().part();
        const std::byte* begin = panels_.stretch(part);
        const std::int64_t skipped = begin - panels_.places().panel(part.expert, part.panel);
        const std::int64_t panels = part.first_k > 0 ? 1 : here().num_panels_of_take();
        return {begin, std::min(panels * panels_.places().panel_bytes() - skipped, kMostUpcoming)};
      }
    }
    return {};
  }
  // Rows of the current groups.
  std::int64_t num_rows() const {
    const SlotGroup& last = *(here().end() - 1);
    return last.first_slot + last.rows - here().begin()->first_slot;
  }
  const Element* rows_of(const SlotGroup& group) const { return rows_ + group.first_slot * panels_.contraction(); }

  // Products of few rows: those of several panels of a take, then their epilogues. Of several groups one panel is
  // taken.
  void multiply_run() {
    const bool is_run = here().num_groups() == 1 && here().begin()->rows <= kRunRows;
    const std::int64_t num_panels = is_run ? here().num_panels_of_take() : 1;
    const std::size_t following = window_.following(num_panels);
    const PanelPart next = window_.done(following) ? part_of_run(num_panels - 1) : window_.part(following);
    for (const SlotGroup* group = here().begin(); group != here().end(); ++group) {
      for (std::int64_t index = 0; index < num_panels; ++index) {
        multiply_stored(*group, part_of_run(index), index + 1 < num_panels ? part_of_run(index + 1) : next, index);
      }
      for (std::int64_t index = 0; index < num_panels; ++index) {
        const PanelPart part = part_of_run(index);
        if (group == here().begin()) epilogue_.begin(part);
        finish(*group, part, sums_of_run(*group, index));
        if (group + 1 == here().end()) end_panel(part);
      }
    }
    panels_.advance();
    for (std::int64_t panel = 1; panel < num_panels; ++panel) panels_.advance();
    for (std::size_t order = 1; order < following; ++order) window_.advance();
  }

  PanelPart part_of_run(std::int64_t index) const {
    PanelPart part = here().part();
    part.panel += index;
    return part;
  }
  Accumulator* sums_of_run(const SlotGroup& group, std::int64_t index) const {
    return sums_ + index * group.rows * kPanelWidth;
  }

  void multiply_stored(const SlotGroup& group, PanelPart part, PanelPart next, std::int64_t index) {
    Accumulator* tile = sums_of_run(group, index);
    epilogue_.prefetch(group, part);
    if constexpr (Panels::kMultipliesCodes) {
      panels_.multiply_codes(group, part, next, rows_of(group), tile);
    } else {
      typename Panels::Ahead nothing;
      const Element* a = rows_of(group) + part.first_k * group.rows;
      kernel_.multiply(group.rows, part.size_k / kDepth, a, panels_.current(part), tile, nothing);
    }
  }

  // All groups of a block with one part of a panel, while the next part is prepared.
  void multiply_part() {
    const PanelPart part = here().part();
    const std::int64_t steps = part.size_k / kDepth;
    auto ahead = window_.work_ahead(panels_, here().num_groups() * steps_ahead(here().begin()->rows, steps));
    const auto* packed = panels_.current(part);
    Accumulator* tile = sums_ + here().first_sum() * kTile;
    if (here().ends_sum()) epilogue_.begin(part);
    for (const SlotGroup* group = here().begin(); group != here().end(); ++group) {
      if (here().ends_sum()) epilogue_.prefetch(*group, part);
      const Element* a = rows_of(*group) + part.first_k * group->rows;
      if constexpr (Panels::kReadsWords) {
        panels_.multiply(*group, rows_of(*group), tile, ahead);
      } else if (here().begins_sum()) {
        kernel_.multiply(group->rows, steps, a, packed, tile, ahead);
      } else if constexpr (Kernel::kBlocked) {
        kernel_.multiply_add(group->rows, steps, a, packed, tile, ahead);
      }
      if (here().ends_sum()) finish(*group, part, tile);
      if (here().keeps_sums()) tile += kTile;
    }
    if (here().ends_panel()) {
      end_panel(part);
    } else if (here().ends_sum()) {
      epilogue_.end(part);
    }
    ahead.finish();
    panels_.advance();
  }

  // How often a group's product calls `ahead.step()`.
  static constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
    if constexpr (Panels::kReadsWords) return Panels::steps_ahead(steps * kDepth);
    return Kernel::steps_ahead(rows, steps);
  }

  // A group's products are complete; the wait for the turn of its panel comes last.
  void finish(const SlotGroup& group, PanelPart part, Accumulator* tile) {
    epilogue_.complete(kernel_, group, part, tile);
    queue_.await_turn(part.panel, here().active());
    epilogue_(group, part, tile);
  }
  void end_panel(PanelPart part) {
    epilogue_.end(part);
    queue_.finish_turn(part.panel, here().active());
  }

  PanelQueue& queue_;
  Panels panels_;
  const Element* rows_;
  Accumulator* sums_;
  const Epilogue& epilogue_;
  Kernel kernel_;
  SweepWindow<Kernel> window_;
};

struct AlreadyComplete {
  void operator()(Upcoming) const {}
};

template <MicroKernel Kernel, PanelSource<Kernel> Panels, SweepEpilogue<Kernel> Epilogue, class Ready = AlreadyComplete>
void sweep(const Routing& routing, PanelQueue& queue, Panels panels, const typename Kernel::Element* rows,
           typename Kernel::Accumulator* sums, const Epilogue& epilogue, const Ready& ready = {}) {
  Sweep<Kernel, Panels, Epilogue>(routing, queue, panels, rows, sums, epilogue).run(ready);
}

}  // namespace ktc::inline KTC_UNIT
