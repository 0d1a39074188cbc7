// Unquantised expert weights: multiplied as stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/packed.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

template <class ElementType>
struct DensePanel {
  using Element = ElementType;
  static constexpr const char* kCode = nullptr;
  static constexpr std::int64_t kGroup = 0;
  static constexpr const char* kStored = nullptr;
  static constexpr bool kIntegerProducts = false;
  static constexpr bool kDecoded = false;

  static std::int64_t bytes(std::int64_t padded_k) {
    return padded_k * kPanelWidth * static_cast<std::int64_t>(sizeof(Element));
  }
  static void check(const char*, std::int64_t) {}

  template <class Source>
  static void pack(const MatrixView<const Source>& source, const PartLanes& part) {
    for (std::int64_t panel = 0; panel < part.num_panels; ++panel) {
      pack_lanes(source, panel * part.lanes, part.lanes, part.first_lane, part.padded_k, at(part, panel));
    }
  }
  static void unpack(const PartLanes& part, const MatrixView<Element>& target) {
    for (std::int64_t panel = 0; panel < part.num_panels; ++panel) {
      unpack_lanes(at(part, panel), part.first_lane, part.lanes, panel * part.lanes, target);
    }
  }

 private:
  static Element* at(const PartLanes& part, std::int64_t panel) {
    return reinterpret_cast<Element*>(part.panels + panel * bytes(part.padded_k));
  }
};

using Bf16Panel = DensePanel<bf16>;
using Fp32Panel = DensePanel<float>;
using Fp64Panel = DensePanel<double>;

using Bf16 = Packed<Bf16Panel>;

}  // namespace ktc::weight_format::inline KTC_UNIT
