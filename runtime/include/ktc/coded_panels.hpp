// Panels of codes beside scales, as they are packed. The codes of the next one are fetched into L2 while the current
// one is multiplied.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/panel_source.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, WeightPanel PanelType>
class CodedPanels {
 public:
  using Panel = PanelType;
  using Ahead = FetchAhead<Isa>;

  CodedPanels(const PanelPlaces& places, std::int64_t contraction) : places_(places), contraction_(contraction) {}

  std::int64_t contraction() const { return contraction_; }
  const PanelPlaces& places() const { return places_; }
  const std::byte* panel(std::int64_t expert, std::int64_t index) const { return places_.panel(expert, index); }

  CodedPanel coded(PanelPart part, PanelPart next) const { return {stretch(part), stretch(next)}; }

  void start(PanelPart) const {}
  Ahead ahead(PanelPart next, PanelPart, std::int64_t calls) const {
    const std::byte* codes = panel(next.expert, next.panel);
    const std::int64_t block = next.first_k / kPanelWidth;
    const std::int64_t begin = Panel::scales_at(block);
    const std::int64_t end = Panel::codes_at(block + next.size_k / kPanelWidth - 1) + Panel::kBlockBytes;
    return Ahead(codes + begin, end - begin, calls);
  }
  void advance() const {}

  // Where the part of a panel begins, which is the scales of a span.
  const std::byte* stretch(PanelPart part) const {
    return panel(part.expert, part.panel) + Panel::scales_at(part.first_k / kPanelWidth);
  }

 private:
  PanelPlaces places_;
  std::int64_t contraction_;
};

}  // namespace ktc::inline KTC_UNIT
