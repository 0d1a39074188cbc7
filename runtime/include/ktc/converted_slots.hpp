// Slots in the form in which panels of codes read few rows, where that is not the packed elements: converted once for
// all panels and workers. The rows of many workers and experts would otherwise be converted by each of them: with 16
// threads and one token that was a tenth of a layer in four bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ktc/routing.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The groups of experts with up to `Panels::kConvertedRows` rows, and where each begins among their slots. Others are
// not converted: panels of experts with more rows are decoded, and nothing would read the copy.
template <class Panels>
class ConvertedSlots {
 public:
  ConvertedSlots(const Routing& routing, std::int64_t contraction) : routing_(&routing), contraction_(contraction) {
    if constexpr (Panels::kConvertedRows > 0) {
      first_.assign(routing.groups().size(), kNotConverted);
      for (const ActiveExpert& active : routing.active_experts()) {
        if (num_rows(active) > Panels::kConvertedRows) continue;
        for (std::size_t index = active.first_group; index < active.last_group; ++index) {
          first_[index] = count_;
          count_ += routing.groups()[index].rows;
        }
      }
    }
  }

  bool any() const { return count_ > 0; }
  std::int64_t bytes() const {
    if constexpr (Panels::kConvertedRows > 0) return Panels::converted_bytes(count_, contraction_);
    return 0;
  }

  // Packed slots of elements (`gather_slots`) into memory of `bytes()`.
  template <class Element>
  void convert([[maybe_unused]] Range groups, [[maybe_unused]] const Element* slots,
               [[maybe_unused]] std::byte* target) const {
    if constexpr (Panels::kConvertedRows > 0) {
      for (std::int64_t index = groups.begin; index < groups.end; ++index) {
        if (first_[static_cast<std::size_t>(index)] == kNotConverted) continue;
        const SlotGroup& group = routing_->groups()[static_cast<std::size_t>(index)];
        Panels::convert(group, contraction_, slots + group.first_slot * contraction_, target + place(group));
      }
    }
  }

  // Where the rows of a converted group are.
  std::int64_t place(const SlotGroup& group) const {
    const auto index = static_cast<std::size_t>(&group - routing_->groups().data());
    return Panels::converted_bytes(first_[index], contraction_);
  }

 private:
  static constexpr std::int64_t kNotConverted = -1;

  std::int64_t num_rows(const ActiveExpert& active) const {
    const SlotGroup& last = routing_->groups()[active.last_group - 1];
    return last.first_slot + last.rows - routing_->groups()[active.first_group].first_slot;
  }

  const Routing* routing_;
  std::int64_t contraction_;
  std::vector<std::int64_t> first_;
  std::int64_t count_ = 0;
};

// The same beside their memory, as a source of panels keeps them.
template <class Panels>
struct ReadSlots {
  const ConvertedSlots<Panels>* slots = nullptr;
  const std::byte* memory = nullptr;

  const std::byte* of(const SlotGroup& group) const { return memory + slots->place(group); }
};

}  // namespace ktc::inline KTC_UNIT
