// Assigns the panels of a sweep to workers: a free worker takes the next few, expert by expert. The cores of a shared
// machine differ in speed, by a factor of four where one has a busy neighbour. Fixed shares would wait for the slowest.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ktc/routing.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Whether the experts add to a panel's columns one after the other, in their order, or each expert has its own columns.
enum class PanelTurns { kNone, kByExpert };

class PanelQueue {
 public:
  struct Item {
    std::size_t active;  // index of an active expert; their number when nothing is left
    Range panels;
    std::int64_t first_k;  // of their contraction
  };

  // `at_a_time(active)` returns the number of an expert's panels that are taken together. A panel of gate and up has
  // the outputs of `units` intermediate units: of an expert that is computed in part, the first panels are left out.
  // For down, whose contraction the units are, `units` is 0, and all panels begin at a later value of k.
  template <class AtATime>
  PanelQueue(const Routing& routing, Range panels, PanelTurns turns, std::int64_t units, const AtATime& at_a_time)
      : panels_(panels), finished_(static_cast<std::size_t>(turns == PanelTurns::kNone ? 0 : panels.size())) {
    std::int64_t items = 0;
    for (const ActiveExpert& active : routing.active_experts()) {
      at_a_time_.push_back(at_a_time(active));
      const std::int64_t skipped = units == 0 ? 0 : active.first_unit / units;
      first_panel_.push_back(std::clamp(skipped, panels.begin, panels.end));
      first_k_.push_back(units == 0 ? active.first_unit : 0);
      items += (panels.end - first_panel_.back() + at_a_time_.back() - 1) / at_a_time_.back();
      last_item_.push_back(items);
    }
  }

  Item take() {
    const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    const auto last = std::upper_bound(last_item_.begin(), last_item_.end(), item);
    const auto active = static_cast<std::size_t>(last - last_item_.begin());
    if (last == last_item_.end()) return {active, {0, 0}, 0};
    const std::int64_t first = first_panel_[active] + (item - (active == 0 ? 0 : *(last - 1))) * at_a_time_[active];
    return {active, {first, std::min(first + at_a_time_[active], panels_.end)}, first_k_[active]};
  }

  // Waits until the active experts before this one are finished with a panel. They were taken earlier, so no deadlock
  // is possible: the first of all unfinished takes waits for nothing.
  void await_turn(std::int64_t panel, std::size_t active) const {
    if (finished_.empty()) return;
    const auto& finished = finished_[static_cast<std::size_t>(panel - panels_.begin)];
    for (;;) {
      const std::uint32_t seen = finished.load(std::memory_order_acquire);
      if (seen == active) return;
      wait_while_equal(finished, seen);
    }
  }
  void finish_turn(std::int64_t panel, std::size_t active) {
    if (finished_.empty()) return;
    auto& finished = finished_[static_cast<std::size_t>(panel - panels_.begin)];
    finished.store(static_cast<std::uint32_t>(active + 1), std::memory_order_release);
    finished.notify_all();
  }

 private:
  Range panels_;
  std::vector<std::int64_t> at_a_time_;               // by active expert
  std::vector<std::int64_t> first_panel_;             // likewise
  std::vector<std::int64_t> first_k_;                 // likewise
  std::vector<std::int64_t> last_item_;               // exclusive, likewise
  std::vector<std::atomic<std::uint32_t>> finished_;  // by panel: the number of experts added
  alignas(64) std::atomic<std::int64_t> next_{0};
};

}  // namespace ktc::inline KTC_UNIT
