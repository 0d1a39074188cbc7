// The sizes of a layer: each one a compile-time constant or known when the kernel is made.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ktc/interface/moe.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

inline constexpr std::int64_t kDynamic = -1;

// Outputs of one weight panel: two 512-bit vectors of fp32. Every padded dimension is a multiple of it.
inline constexpr std::int64_t kPanelWidth = 32;
// Lanes of gate, then of up, in a gate/up panel; also the unit the element-wise parts work in.
inline constexpr std::int64_t kHalfPanel = kPanelWidth / 2;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <std::int64_t Constant>
struct Dim {
  constexpr Dim(std::int64_t size, const char* name) {
    if (size == Constant) return;
    throw std::invalid_argument(std::string("this kernel was built for ") + name + " = " + decimal(Constant) +
                                ", found " + decimal(size));
  }
  static constexpr std::int64_t value() { return Constant; }
};

template <>
struct Dim<kDynamic> {
  constexpr Dim(std::int64_t size, const char* name) : size_(size) {
    if (size > 0) return;
    throw std::invalid_argument(std::string(name) + " must be positive, found " + decimal(size));
  }
  constexpr std::int64_t value() const { return size_; }

 private:
  std::int64_t size_;
};

template <std::int64_t Hidden, std::int64_t Intermediate, std::int64_t NumExperts, std::int64_t TopK>
class MoeShape {
 public:
  explicit constexpr MoeShape(const MoeSizes& sizes)
      : hidden_(sizes.hidden, "hidden"),
        intermediate_(sizes.intermediate, "intermediate"),
        num_experts_(sizes.num_experts, "num_experts"),
        top_k_(sizes.top_k, "top_k") {}

  constexpr std::int64_t hidden() const { return hidden_.value(); }
  constexpr std::int64_t intermediate() const { return intermediate_.value(); }
  constexpr std::int64_t num_experts() const { return num_experts_.value(); }
  constexpr std::int64_t top_k() const { return top_k_.value(); }

  constexpr std::int64_t padded_hidden() const { return round_up(hidden(), kPanelWidth); }
  constexpr std::int64_t padded_intermediate() const { return round_up(intermediate(), kPanelWidth); }

 private:
  [[no_unique_address]] Dim<Hidden> hidden_;
  [[no_unique_address]] Dim<Intermediate> intermediate_;
  [[no_unique_address]] Dim<NumExperts> num_experts_;
  [[no_unique_address]] Dim<TopK> top_k_;
};

}  // namespace ktc::inline KTC_UNIT
