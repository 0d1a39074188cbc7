// The router's choice, sorted by expert: a slot is one (token, k) pair, and each expert owns a contiguous run of slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ktc/interface/moe.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Slots of one expert that the micro-kernel computes together.
struct SlotGroup {
  std::int64_t first_slot;
  int rows;
};

struct ActiveExpert {
  std::int64_t expert;
  std::vector<SlotGroup>::size_type first_group;
  std::vector<SlotGroup>::size_type last_group;  // exclusive
  std::int64_t first_unit = 0;                   // of the intermediate size: see `kFirstUnitBit`
};

// How an expert's slots are grouped: at most `most` in a group. Without `least`, groups differ by one row at most,
// since the time of a group grows with its rows: 13 rows are 7 + 6, not 12 + 1. With `least`, all groups but the last
// are full, and the last has at least that many rows: half empty tiles take as long as full ones.
struct GroupRows {
  int most;
  int least = 0;
};

class Routing {
 public:
  // `index` is (tokens, top_k). Slots of an expert keep the order of their tokens. A `partial` routing has no slots for
  // pairs that are `kComputedElsewhere`, and one of its experts may begin with a later unit.
  Routing(const std::int64_t* index, std::int64_t tokens, std::int64_t top_k, std::int64_t num_experts,
          GroupRows group_rows, bool partial = false)
      : num_tokens_(tokens), slot_(static_cast<std::size_t>(tokens * top_k), kComputedElsewhere) {
    std::vector<std::int64_t> next = first_slots(index, tokens * top_k, num_experts, partial);
    token_.resize(static_cast<std::size_t>(next[num_experts]));
    add_groups(next, num_experts, group_rows);
    for (ActiveExpert& active : active_) {
      if (active.expert == divided_) active.first_unit = first_unit_;
    }
    for (std::int64_t pair = 0; pair < num_pairs(); ++pair) {
      if (partial && index[pair] == kComputedElsewhere) continue;
      const std::int64_t slot = next[expert_of(index[pair], partial)]++;
      slot_[pair] = slot;
      token_[slot] = pair / top_k;
    }
  }

  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t num_pairs() const { return static_cast<std::int64_t>(slot_.size()); }
  std::int64_t num_slots() const { return static_cast<std::int64_t>(token_.size()); }
  std::int64_t token(std::int64_t slot) const { return token_[slot]; }
  // `kComputedElsewhere` for a pair without one.
  std::int64_t slot(std::int64_t pair) const { return slot_[pair]; }
  const std::vector<SlotGroup>& groups() const { return groups_; }
  const std::vector<ActiveExpert>& active_experts() const { return active_; }
  // The first unit of the expert that is computed in part, 0 without one.
  std::int64_t first_unit() const { return first_unit_; }
  bool is_divided(std::int64_t expert) const { return expert == divided_; }

 private:
  static std::int64_t expert_of(std::int64_t choice, bool partial) {
    return partial && choice >= 0 ? choice & ((std::int64_t{1} << kFirstUnitBit) - 1) : choice;
  }
  // Refuses an index out of range before anything is read with it. Element E is the number of slots.
  std::vector<std::int64_t> first_slots(const std::int64_t* index, std::int64_t pairs, std::int64_t num_experts,
                                        bool partial) {
    std::vector<std::int64_t> first(num_experts + 1, 0);
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      if (partial && index[pair] == kComputedElsewhere) continue;
      const std::int64_t expert = expert_of(index[pair], partial);
      if (expert < 0 || expert >= num_experts) {
        throw std::out_of_range("`top_k_index` names expert " + decimal(expert) + "; this layer has experts 0 to " +
                                decimal(num_experts - 1));
      }
      if (expert != index[pair]) divide(expert, index[pair] >> kFirstUnitBit);
      ++first[expert + 1];
    }
    if (divided_ >= 0) {
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        if (index[pair] == divided_) throw std::invalid_argument("a choice does not say that its expert is divided");
      }
    }
    for (std::int64_t expert = 0; expert < num_experts; ++expert) first[expert + 1] += first[expert];
    return first;
  }

  void divide(std::int64_t expert, std::int64_t first_unit) {
    if (divided_ >= 0 && (divided_ != expert || first_unit_ != first_unit)) {
      throw std::invalid_argument("a call divides one expert, at one unit");
    }
    divided_ = expert;
    first_unit_ = first_unit;
  }

  void add_groups(const std::vector<std::int64_t>& first_slot, std::int64_t num_experts, GroupRows group_rows) {
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
      const std::int64_t rows = first_slot[expert + 1] - first_slot[expert];
      if (rows == 0) continue;
      const std::int64_t count = (rows + group_rows.most - 1) / group_rows.most;
      active_.push_back({expert, groups_.size(), groups_.size() + count});
      std::int64_t slot = first_slot[expert];
      for (std::int64_t group = 0; group < count; ++group) {
        const std::int64_t left = first_slot[expert + 1] - slot, groups_left = count - group;
        std::int64_t size = (left + groups_left - 1) / groups_left;
        if (group_rows.least > 0 && groups_left > 1)
          size = std::min<std::int64_t>(group_rows.most, left - group_rows.least);
        groups_.push_back({slot, static_cast<int>(size)});
        slot += size;
      }
    }
  }

  std::int64_t num_tokens_;
  std::int64_t divided_ = -1;  // an expert
  std::int64_t first_unit_ = 0;
  std::vector<std::int64_t> token_;  // by slot
  std::vector<std::int64_t> slot_;   // by (token, k) pair
  std::vector<SlotGroup> groups_;
  std::vector<ActiveExpert> active_;
};

}  // namespace ktc::inline KTC_UNIT
