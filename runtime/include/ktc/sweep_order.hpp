// The order of a sweep: the queues from which workers take panels, and the parts of panels that a worker multiplies.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ktc/concepts.hpp"
#include "ktc/numa.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/panel_queue.hpp"
#include "ktc/routing.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Whether this expert's product is computed in blocks. Where its rows stay in L2 beside a panel and the next one, they
// are multiplied by whole panels.
template <MicroKernel Kernel>
bool multiplied_in_blocks([[maybe_unused]] const Routing& routing, [[maybe_unused]] const ActiveExpert& active,
                          [[maybe_unused]] std::int64_t contraction) {
  if constexpr (Kernel::kBlocked) {
    const SlotGroup& last = routing.groups()[active.last_group - 1];
    const std::int64_t rows = last.first_slot + last.rows - routing.groups()[active.first_group].first_slot;
    const std::int64_t bytes =
        (rows + 2 * kPanelWidth) * contraction * static_cast<std::int64_t>(sizeof(typename Kernel::Element));
    return rows >= Kernel::kBlockedRows && bytes >= Kernel::kBlockedBytes;
  }
  return false;
}

// Panels that few rows are multiplied with are taken in runs, whose results are used after the run. The work between
// two panels reads lines that the panels have evicted from L1, and the prefetches of the processor then fall behind for
// some pages. Gate and up of one token in q4_k, on one thread, read 19 GB/s of codes panel by panel, 23 in runs of 16,
// and 28 without any work between panels. Where a panel leaves room in L1, short runs are no better than none.
inline constexpr std::int64_t kLeastOfRun = 8;
inline constexpr std::int64_t kMostOfRun = 16;
inline constexpr std::int64_t kRunRows = 4;

// The panels of a product, to be divided among workers. `together` of them share cache lines of results, which one
// worker must write. An expert of up to `run_rows` rows is multiplied by runs of panels.
struct PanelSet {
  std::int64_t num_panels;
  std::int64_t contraction;
  PanelTurns turns;
  std::int64_t together = 1;
  std::int64_t run_rows = 0;
  std::int64_t units = 0;  // see `PanelQueue`
};

// Up to how many rows of an expert `Panels` are multiplied in runs.
template <class Panels>
constexpr std::int64_t run_rows() {
  return std::min<std::int64_t>(Panels::kStreamRows, kRunRows);
}

// The panels of a product: one queue for all workers, or one per NUMA node, so that workers read weights from their own
// node. Fewer workers than nodes share one queue.
//
// Blocks need many panels at a time, because their rows come from L3 once for all of these. But every worker should
// take panels dozens of times, so that workers end at nearly the same time; half as often where it takes runs. Where
// panels have turns, an expert should have enough of them for the current and the next takes of every worker. A fast
// worker then does not wait for a slow one.
template <MicroKernel Kernel>
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
      if constexpr (Kernel::kBlocked) {
        if (multiplied_in_blocks<Kernel>(routing, active, set.contraction)) {
          return std::clamp(most / set.together * set.together, set.together, Kernel::kBlocking.panels);
        }
      }
      return set.together;
    };
    for (int node = 0; node < nodes_; ++node) {
      const Range shard = shard_of(num_panels, node, nodes_, set.together);
      queues_.push_back(std::make_unique<PanelQueue>(routing, shard, set.turns, set.units, at_a_time));
    }
  }

  PanelQueue& of(int worker) const {
    return *queues_[static_cast<std::size_t>(nodes_ == 1 ? 0 : node_of(worker, workers_, nodes_))];
  }

 private:
  static constexpr std::int64_t kTakes = 32;
  static constexpr std::int64_t kTakesOfExpert = 3;

  // Only one group: the sums of several would need more memory at hand.
  static bool is_multiplied_by_runs(const Routing& routing, const ActiveExpert& active, std::int64_t run_rows) {
    return active.last_group - active.first_group == 1 && routing.groups()[active.first_group].rows <= run_rows;
  }

  int workers_;
  int nodes_;
  std::vector<std::unique_ptr<PanelQueue>> queues_;
};

// The parts of panels that a worker multiplies, in order: take by take from the queue, and block by block in a take. In
// a block, all panels are multiplied over the first values of k, then all over the next. Without blocking the order is
// panel by panel.
template <MicroKernel Kernel>
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
  bool begins_sum() const { return first_k_ == begin_k_; }
  bool ends_sum() const { return rest_k() <= blocking_.contraction; }
  bool ends_panel() const { return ends_sum() && last_group() == last_group_of_expert(); }

  const SlotGroup* begin() const { return routing_->groups().data() + first_group_; }
  const SlotGroup* end() const { return routing_->groups().data() + last_group(); }
  std::int64_t num_groups() const { return last_group() - first_group_; }
  std::int64_t num_panels_of_take() const { return panels_.end - panel_; }  // this one and those that follow
  // Where the first group's sums begin among the accumulators, in tiles. Those of the other groups follow.
  std::int64_t first_sum() const { return keeps_sums() ? (panel_ - panels_.begin) * num_groups() : 0; }
  bool keeps_sums() const { return !(ends_sum() && begins_sum()); }

  void advance() {
    if (++panel_ < panels_.end) return;
    panel_ = panels_.begin;
    if (!ends_sum()) {
      first_k_ += blocking_.contraction;
      return;
    }
    first_k_ = begin_k_;
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
    first_k_ = begin_k_ = item.first_k;
    blocking_ = {.panels = 1, .groups = last_group_of_expert() - first_group_, .contraction = rest_k()};
    if constexpr (Kernel::kBlocked) {
      if (multiplied_in_blocks<Kernel>(*routing_, expert(), contraction_)) blocking_ = Kernel::kBlocking;
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
  std::int64_t begin_k_ = 0;  // of the expert
  std::int64_t first_k_ = 0;
};

// The current part of a worker, and the next two once they are requested, which takes them from the queue.
template <MicroKernel Kernel>
class SweepWindow {
 public:
  explicit SweepWindow(const SweepOrder<Kernel>& first) : parts_{first} {}

  const SweepOrder<Kernel>& here() const { return parts_[0]; }
  const SweepOrder<Kernel>& next(std::size_t ahead) {
    for (; known_ <= ahead && !parts_[known_ - 1].done(); ++known_) {
      parts_[known_] = parts_[known_ - 1];
      parts_[known_].advance();
    }
    return parts_[std::min(ahead, known_ - 1)];
  }
  // The index, for `done` and `part`, of the part after the next `panels` panels, which are all of this take or one.
  std::size_t following(std::int64_t panels) {
    const auto count = static_cast<std::size_t>(panels);
    if (count < parts_.size()) {
      next(count);
      return std::min(count, known_ - 1);
    }
    SweepOrder<Kernel> order = parts_[known_ - 1];
    for (; known_ <= count; ++known_) order.advance();
    known_ = 2;
    parts_[1] = order;
    return 1;
  }
  bool done(std::size_t index) const { return parts_[index].done(); }
  PanelPart part(std::size_t index) const { return parts_[index].part(); }

  void advance() {
    next(1);
    std::copy(parts_.begin() + 1, parts_.end(), parts_.begin());
    --known_;
  }

  // The work beside the products of this part: to prepare the next one. None after the last.
  template <class Panels>
  typename Panels::Ahead work_ahead(Panels& panels, std::int64_t calls) {
    if (next(1).done()) return {};
    return panels.ahead(next(1).part(), (next(2).done() ? next(1) : next(2)).part(), calls);
  }

 private:
  std::array<SweepOrder<Kernel>, 3> parts_;
  std::size_t known_ = 1;
};

}  // namespace ktc::inline KTC_UNIT
