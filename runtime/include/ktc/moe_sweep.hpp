// The loop all four products of a layer share: expert by expert, panel by panel, slots group by group.
//
// Workers take panels from a queue. The worker with a panel of an expert multiplies all slots of the expert. Panels to
// which several experts add are passed from expert to expert in ascending order. So no result depends on the number of
// workers or on their speed.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "ktc/numa.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/panel_queue.hpp"
#include "ktc/panel_source.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The block of one expert's product that an ISA keeps in caches: `groups` of slots against `panels`, `contraction` at a
// time.
struct Blocking {
  std::int64_t panels;
  std::int64_t groups;
  std::int64_t contraction;
};

// Whether an ISA takes this expert's product in blocks: where rows stay in L2 beside a panel and the next one, they are
// multiplied by whole panels.
template <class Isa>
bool multiplied_in_blocks([[maybe_unused]] const Routing& routing, [[maybe_unused]] const ActiveExpert& active,
                          [[maybe_unused]] std::int64_t contraction) {
  if constexpr (Isa::kBlocked) {
    const SlotGroup& last = routing.groups()[active.last_group - 1];
    const std::int64_t rows = last.first_slot + last.rows - routing.groups()[active.first_group].first_slot;
    const std::int64_t bytes =
        (rows + 2 * kPanelWidth) * contraction * static_cast<std::int64_t>(sizeof(typename Isa::Element));
    return rows >= Isa::kBlockedRows && bytes >= Isa::kBlockedBytes;
  }
  return false;
}

// Panels of few rows are multiplied in runs, and their results used after a run. Between two panels, lines are read
// that the panels have evicted from L1, and the processor's prefetches then fall behind for some pages: gate and
// up of one token in q4_k read 19 GB/s of codes from memory on one thread, 23 in runs of 16, and 28 without anything
// between the panels. Short runs are no better than none where a panel leaves room in L1.
inline constexpr std::int64_t kLeastOfRun = 8;
inline constexpr std::int64_t kMostOfRun = 16;
inline constexpr std::int64_t kRunRows = 4;

// The panels of a product, to be divided among workers: their contraction, whether they have turns, the number that
// must stay together because they share cache lines that one worker must write, and up to how many rows an expert is
// multiplied by runs of panels (`run_rows`).
struct PanelSet {
  std::int64_t num_panels;
  std::int64_t contraction;
  PanelTurns turns;
  std::int64_t together = 1;
  std::int64_t run_rows = 0;
};

// For how many rows `Panels` are multiplied in runs.
template <class Panels>
constexpr std::int64_t run_rows() {
  return std::min<std::int64_t>(Panels::kStreamRows, kRunRows);
}

// The panels of a product: a queue for all workers, or with several NUMA nodes one for each, so that workers read
// weights from the memory beside them. Fewer workers than nodes share one.
//
// Blocks need many panels at a time, because their rows come from L3 once for all of these. But every worker should
// take dozens of times, so that they end at nearly the same time; half as often where it takes runs. Of panels with
// turns, an expert should have enough for the current and the next takes of every worker, so that a fast worker does
// not wait for a slow one.
template <class Isa>
class PanelQueues {
 public:
  PanelQueues(const Routing& routing, const PanelSet& set, int workers, int nodes = 1)
      : workers_(workers), nodes_(workers < nodes ? 1 : nodes) {
    const std::int64_t num_panels = set.num_panels;
    const auto num_active = static_cast<std::int64_t>(routing.active_experts().size());
    const std::int64_t of_expert = num_panels / (set.turns == PanelTurns::kNone ? workers : kTakesOfExpert * workers);
    const std::int64_t most = std::min(of_expert, num_active * num_panels / (kTakes * workers));
    const std::int64_t most_of_run =
        workers == 1 ? num_panels : std::min(of_expert, num_active * num_panels / (kTakes / 2 * workers));
    const auto at_a_time = [&](const ActiveExpert& active) -> std::int64_t {
      if (is_multiplied_by_runs(routing, active, set.run_rows)) {
        const std::int64_t of_run = std::min(most_of_run, kMostOfRun) / set.together * set.together;
        return of_run < kLeastOfRun ? set.together : of_run;
      }
      if constexpr (Isa::kBlocked) {
        if (multiplied_in_blocks<Isa>(routing, active, set.contraction)) {
          return std::clamp(most / set.together * set.together, set.together, Isa::kBlocking.panels);
        }
      }
      return set.together;
    };
    for (int node = 0; node < nodes_; ++node) {
      const Range shard = shard_of(num_panels, node, nodes_, set.together);
      queues_.push_back(std::make_unique<PanelQueue>(routing, shard, set.turns, at_a_time));
    }
  }

  PanelQueue& of(int worker) const {
    return *queues_[static_cast<std::size_t>(nodes_ == 1 ? 0 : node_of(worker, workers_, nodes_))];
  }

 private:
  static constexpr std::int64_t kTakes = 32;
  static constexpr std::int64_t kTakesOfExpert = 3;

  // The sums of several groups would need more memory at hand.
  static bool is_multiplied_by_runs(const Routing& routing, const ActiveExpert& active, std::int64_t run_rows) {
    return active.last_group - active.first_group == 1 && routing.groups()[active.first_group].rows <= run_rows;
  }

  int workers_;
  int nodes_;
  std::vector<std::unique_ptr<PanelQueue>> queues_;
};

// The parts of panels that a worker multiplies, in order: take by take from the queue, and block by block in a take. In
// a block all panels get the first stretch of the contraction, then all the next. Without blocking the order is panel
// by panel.
template <class Isa>
class SweepOrder {
 public:
  SweepOrder() = default;
  SweepOrder(const Routing& routing, PanelQueue& queue, std::int64_t contraction)
      : routing_(&routing), queue_(&queue), contraction_(contraction) {
    take();
  }

  bool done() const { return active_ == routing_->active_experts().size(); }
  std::size_t active() const { return active_; }
  PanelPart part() const { return {expert().expert, panel_, first_k_, std::min(blocking_.contraction, rest_k())}; }
  bool begins_sum() const { return first_k_ == 0; }
  bool ends_sum() const { return rest_k() <= blocking_.contraction; }
  bool ends_panel() const { return ends_sum() && last_group() == last_group_of_expert(); }

  const SlotGroup* begin() const { return routing_->groups().data() + first_group_; }
  const SlotGroup* end() const { return routing_->groups().data() + last_group(); }
  std::int64_t num_groups() const { return last_group() - first_group_; }
  std::int64_t num_panels_of_take() const { return panels_.end - panel_; }  // this one and those that follow
  // The place of the first group's sums among the accumulators; those of the other groups follow.
  std::int64_t first_sum() const { return keeps_sums() ? (panel_ - panels_.begin) * num_groups() : 0; }
  bool keeps_sums() const { return !(ends_sum() && begins_sum()); }

  void advance() {
    if (++panel_ < panels_.end) return;
    panel_ = panels_.begin;
    if (!ends_sum()) {
      first_k_ += blocking_.contraction;
      return;
    }
    first_k_ = 0;
    first_group_ = last_group();
    if (first_group_ == last_group_of_expert()) take();
  }

 private:
  const ActiveExpert& expert() const { return routing_->active_experts()[active_]; }
  std::int64_t rest_k() const { return contraction_ - first_k_; }
  std::int64_t last_group_of_expert() const { return static_cast<std::int64_t>(expert().last_group); }
  std::int64_t last_group() const { return std::min(first_group_ + blocking_.groups, last_group_of_expert()); }

  void take() {
    const PanelQueue::Item item = queue_->take();
    active_ = item.active;
    if (done()) return;
    panels_ = item.panels;
    panel_ = panels_.begin;
    first_group_ = static_cast<std::int64_t>(expert().first_group);
    first_k_ = 0;
    blocking_ = {.panels = 1, .groups = last_group_of_expert() - first_group_, .contraction = contraction_};
    if constexpr (Isa::kBlocked) {
      if (multiplied_in_blocks<Isa>(*routing_, expert(), contraction_)) blocking_ = Isa::kBlocking;
    }
  }

  const Routing* routing_ = nullptr;
  PanelQueue* queue_ = nullptr;
  std::int64_t contraction_ = 0;
  std::size_t active_ = 0;
  Range panels_{};
  Blocking blocking_{};
  std::int64_t panel_ = 0;
  std::int64_t first_group_ = 0;
  std::int64_t first_k_ = 0;
};

// The current part of a worker and, if requested, the next two, which are then taken from the queue.
template <class Isa>
class SweepWindow {
 public:
  explicit SweepWindow(const SweepOrder<Isa>& first) : parts_{first} {}

  const SweepOrder<Isa>& here() const { return parts_[0]; }
  const SweepOrder<Isa>& next(std::size_t ahead) {
    for (; known_ <= ahead && !parts_[known_ - 1].done(); ++known_) {
      parts_[known_] = parts_[known_ - 1];
      parts_[known_].advance();
    }
    return parts_[std::min(ahead, known_ - 1)];
  }
  void advance() {
    next(1);
    std::copy(parts_.begin() + 1, parts_.end(), parts_.begin());
    --known_;
  }

  // The work beside the products of this part: prepare the next one, and nothing after the last.
  template <class Panels>
  typename Panels::Ahead work_ahead(Panels& panels, std::int64_t calls) {
    if (next(1).done()) return {};
    return panels.ahead(next(1).part(), (next(2).done() ? next(1) : next(2)).part(), calls);
  }

 private:
  std::array<SweepOrder<Isa>, 3> parts_;
  std::size_t known_ = 1;
};

// Sums that a worker of `sweep` keeps at hand, in accumulators. The plan counts on the bounds
// (ktc/model/kernels/working_memory.py).
template <class Isa>
constexpr std::int64_t sums_at_hand() {
  constexpr std::int64_t kBytes = sizeof(typename Isa::Accumulator);
  constexpr std::int64_t kTile = Isa::kMaxRows * kPanelWidth;
  if constexpr (Isa::kBlocked) {
    constexpr std::int64_t kBlock = Isa::kBlocking.panels * Isa::kBlocking.groups * kTile;
    static_assert(kBlock * kBytes <= 1 << 20);
    return kBlock;
  }
  constexpr std::int64_t kSums = std::max(kTile, kMostOfRun * kRunRows * kPanelWidth);
  static_assert(kSums * kBytes <= 1 << 14);
  return kSums;
}

// Panels that multiply a group themselves, whole panels at a time: their rows are not what an ISA multiplies.
template <class Panels>
concept MultipliesRows = requires { Panels::kReadsWords; };

// How often a group's product calls `ahead.step()`; `steps` are of one element's depth.
template <class Isa, class Panels>
constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
  if constexpr (MultipliesRows<Panels>)
    return Panels::steps_ahead(steps * ElementTraits<typename Isa::Element>::kDepth);
  return Isa::steps_ahead(rows, steps);
}

// For every active expert and each panel that this worker takes from the queue: multiply all slots and call
// `epilogue(group, part, tile)`, announced by `epilogue.prefetch(group, part)`. Before it, `epilogue.complete(isa,
// group, part, tile)` may add products of its own; `epilogue.begin(part)` and `epilogue.end(part)` enclose the calls of
// a panel. `rows` are packed slots, `panels.contraction()` elements each (see `gather_slots`). `sums` are
// `sums_at_hand()` accumulators of this worker's own.
template <class Isa, class Panels, class Epilogue>
void sweep(const Routing& routing, PanelQueue& queue, Panels panels, const typename Isa::Element* rows,
           typename Isa::Accumulator* sums, const Epilogue& epilogue) {
  constexpr std::int64_t kTile = Isa::kMaxRows * kPanelWidth;
  constexpr int kDepth = ElementTraits<typename Isa::Element>::kDepth;
  const std::int64_t contraction = panels.contraction();
  Isa isa;
  SweepWindow<Isa> window(SweepOrder<Isa>(routing, queue, contraction));
  if (!window.here().done()) panels.start(window.here().part());

  // A group's products are complete; the wait for the turn of its panel comes last.
  const auto finish = [&](const SweepOrder<Isa>& here, const SlotGroup& group, PanelPart part, auto* tile) {
    epilogue.complete(isa, group, part, tile);
    queue.await_turn(part.panel, here.active());
    epilogue(group, part, tile);
  };
  // Products of few rows: those of a take's panels, then their epilogues. A take has one panel of several groups.
  const auto multiply_run = [&](const SweepOrder<Isa>& here, std::int64_t panels_of_run) {
    const PanelPart first = here.part();
    const auto part_of = [&](std::int64_t index) {
      PanelPart part = first;
      part.panel += index;
      return part;
    };
    for (const SlotGroup* group = here.begin(); group != here.end(); ++group) {
      const auto* a = rows + group->first_slot * contraction;
      const std::int64_t sums_of_panel = group->rows * kPanelWidth;
      for (std::int64_t index = 0; index < panels_of_run; ++index) {
        auto* tile = sums + index * sums_of_panel;
        epilogue.prefetch(*group, part_of(index));
        if constexpr (Panels::kMultipliesCodes) {
          panels.multiply_codes(*group, part_of(index), a, tile);
        } else {
          typename Panels::Ahead nothing;
          isa.multiply(group->rows, first.size_k / kDepth, a, panels.current(part_of(index)), tile, nothing);
        }
      }
      for (std::int64_t index = 0; index < panels_of_run; ++index) {
        if (group == here.begin()) epilogue.begin(part_of(index));
        finish(here, *group, part_of(index), sums + index * sums_of_panel);
        if (group + 1 != here.end()) continue;
        epilogue.end(part_of(index));
        queue.finish_turn(part_of(index).panel, here.active());
      }
    }
  };
  for (; !window.here().done(); window.advance()) {
    const SweepOrder<Isa>& here = window.here();
    const PanelPart part = here.part();
    const std::int64_t steps = part.size_k / kDepth;
    const SlotGroup* group = here.begin();
    const std::int64_t num_groups = here.num_groups();
    const SlotGroup* last = here.end() - 1;
    const bool streams = last->first_slot + last->rows - group->first_slot <= Panels::kStreamRows;
    if constexpr (Panels::kStreamRows > 0) {
      if (streams) {
        const std::int64_t of_run = num_groups == 1 && group->rows <= kRunRows ? here.num_panels_of_take() : 1;
        multiply_run(here, of_run);
        panels.advance();
        for (std::int64_t panel = 1; panel < of_run; ++panel, panels.advance()) window.advance();
        continue;
      }
    }
    auto ahead = window.work_ahead(panels, num_groups * steps_ahead<Isa, Panels>(group->rows, steps));
    const auto* packed = panels.current(part);
    auto* tile = sums + here.first_sum() * kTile;
    if (here.ends_sum()) epilogue.begin(part);
    for (; group != here.end(); ++group) {
      if (here.ends_sum()) epilogue.prefetch(*group, part);
      const auto* a = rows + group->first_slot * contraction + part.first_k * group->rows;
      if constexpr (MultipliesRows<Panels>) {
        panels.multiply(*group, a, tile, ahead);
      } else if (here.begins_sum()) {
        isa.multiply(group->rows, steps, a, packed, tile, ahead);
      } else if constexpr (Isa::kBlocked) {
        isa.multiply_add(group->rows, steps, a, packed, tile, ahead);
      }
      if (here.ends_sum()) finish(here, *group, part, tile);
      if (here.keeps_sums()) tile += kTile;
    }
    if (here.ends_sum()) epilogue.end(part);
    if (here.ends_panel()) queue.finish_turn(part.panel, here.active());
    ahead.finish();
    panels.advance();
  }
}

// Packed slots: group after group, [k / depth][row][depth neighbours of k], with the depth in which the ISA reads a
// group of that many rows, so that the micro-kernel reads one stretch. Rows of the source, thousands of bytes apart,
// would fall into the same sets of L1.
template <class Isa, class Function>
void with_row_depth(int rows, Function&& function) {
  if constexpr (Isa::kBlocked) {
    if (Isa::multiplies_tiles(rows)) return function(std::integral_constant<int, Isa::kTileDepth>{});
  }
  function(std::integral_constant<int, ElementTraits<typename Isa::Element>::kDepth>{});
}

// Write 16 elements of a row to its places from `target` on, in a packed group of `num_rows`. Unrolled by hand: the
// compiler would turn a loop into scatters, which take four times as long as the stores they replace.
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

}  // namespace ktc::inline KTC_UNIT
