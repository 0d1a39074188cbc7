// The places of the panels of one product. Each NUMA node has one shard, a stretch of memory with the panels of the
// node's columns, of all experts one after the other. On one node that is expert after expert.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

inline constexpr int kMaxNodes = 16;

// The panels of one node, of `size` panels of which `together` stay together; the workers of that node share them.
inline Range shard_of(std::int64_t size, int node, int nodes, std::int64_t together) {
  const Range sets = Range::share((size + together - 1) / together, node, nodes);
  return {sets.begin * together, std::min(sets.end * together, size)};
}

class PanelPlaces {
 public:
  struct Shard {
    const std::byte* origin;    // where panel 0 of expert 0 would be if this shard had it
    std::int64_t expert_bytes;  // from an expert's panels to the next one's
    std::int64_t end;           // its last panel, exclusive
  };

  explicit PanelPlaces(std::int64_t panel_bytes) : panel_bytes_(panel_bytes) {}
  // The shards in the order of their panels; `first` points to the first of them, of expert 0.
  void add(const std::byte* first, std::int64_t expert_bytes, Range panels) {
    shards_[static_cast<std::size_t>(count_++)] = {first - panels.begin * panel_bytes_, expert_bytes, panels.end};
  }

  std::int64_t panel_bytes() const { return panel_bytes_; }
  const Shard& shard_with(std::int64_t panel) const {
    int shard = 0;
    while (shard + 1 < count_ && panel >= shards_[static_cast<std::size_t>(shard)].end) ++shard;
    return shards_[static_cast<std::size_t>(shard)];
  }
  // `body(panel)` for the first panel of each shard that begins inside (first, last).
  template <class Body>
  void for_ends(std::int64_t first, std::int64_t last, const Body& body) const {
    std::int64_t before = first;
    for (int shard = 0; shard + 1 < count_; ++shard) {
      const std::int64_t end = shards_[static_cast<std::size_t>(shard)].end;
      if (end > before && end < last) body(end);
      before = std::max(before, end);
    }
  }
  const std::byte* panel(std::int64_t expert, std::int64_t index) const {
    const Shard& shard = shard_with(index);
    return shard.origin + expert * shard.expert_bytes + index * panel_bytes_;
  }

 private:
  std::array<Shard, kMaxNodes> shards_;
  int count_ = 0;
  std::int64_t panel_bytes_;
};

}  // namespace ktc::inline KTC_UNIT
