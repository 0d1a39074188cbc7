// The panel source of integer products: the packed codes themselves, with scales and offsets beside them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/panel_source.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/int8.hpp"

namespace ktc::inline KTC_UNIT {

template <IntegerKernel Kernel>
class IntegerPanels {
 public:
  using Panel = weight_format::Int8Panel;
  using Ahead = FetchAhead<Kernel>;
  static constexpr int kStreamRows = Kernel::kStreamRows;
  static constexpr bool kMultipliesCodes = false;
  static constexpr bool kReadsWords = false;
  static constexpr int kConvertedRows = 0;

  IntegerPanels(const PanelPlaces& places, std::int64_t padded_k)
      : places_(places), contraction_(Panel::contraction(padded_k)) {}

  // The size of a packed row, with the padding of the codes.
  std::int64_t contraction() const { return contraction_; }

  const PanelPlaces& places() const { return places_; }

  const float* scales(PanelPart part) const { return reinterpret_cast<const float*>(panel(part)); }
  const std::int32_t* offsets(PanelPart part) const {
    return reinterpret_cast<const std::int32_t*>(panel(part) + Panel::kOffsetsAt);
  }

  const std::byte* stretch(PanelPart part) const { return panel(part); }

  void start(PanelPart) const {}
  const std::int8_t* current(PanelPart part) const {
    return reinterpret_cast<const std::int8_t*>(panel(part) + Panel::codes_at(part.first_k / kPanelWidth));
  }
  Ahead ahead(PanelPart next, PanelPart, std::int64_t calls) const {
    const std::int64_t begin = next.first_k == 0 ? 0 : Panel::codes_at(next.first_k / kPanelWidth);
    const std::int64_t end = Panel::codes_at((next.first_k + next.size_k) / kPanelWidth);
    return Ahead(panel(next) + begin, end - begin, calls);
  }
  void advance() const {}

 private:
  const std::byte* panel(PanelPart part) const { return places_.panel(part.expert, part.panel); }

  PanelPlaces places_;
  std::int64_t contraction_;
};

}  // namespace ktc::inline KTC_UNIT
