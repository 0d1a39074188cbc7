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

// The groups of up to `Panels::kConvertedRows` rows, and where each begins among their slots. Others are not converted.
template <class Panels>
class ConvertedSlots {
 public:
  ConvertedSlots(const Routing& routing, std::int64_t contraction) : routing_(&routing), contraction_(contraction) {
    if constexpr (Panels::kConvertedRows > 0) {
      for (const SlotGroup& group : routing.groups()) {
        first_.push_back(count_);
        if (group.rows <= Panels::kConvertedRows) count_ += group.rows;
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
        const SlotGroup& group = routing_->groups()[static_cast<std::size_t>(index)];
        if (group.rows > Panels::kConvertedRows) continue;
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
