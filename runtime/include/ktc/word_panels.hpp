// Panels of a file's blocks multiplied as integers, for instruction sets without bf16 products: with few rows as they
// are stored, with more rows as words, which are decoded once into a scratch. Rows are 16-bit fixed point, which
// `ConvertedSlots` writes once for all panels and workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "ktc/coded_panels.hpp"
#include "ktc/concepts.hpp"
#include "ktc/converted_slots.hpp"
#include "ktc/panel_source.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/code_words.hpp"
#include "ktc/weight_format/fixed_point_rows.hpp"
#include "ktc/weight_format/multiply_decoded.hpp"
#include "ktc/weight_format/multiply_word_panel.hpp"
#include "ktc/weight_format/multiply_words.hpp"

namespace ktc::inline KTC_UNIT {

// Blocks whose codes are integers. Codes of other formats are decoded, int4 too: its weights are by definition code x
// scale rounded to bf16, since training quantises to these values.
template <class Isa, class Panel>
concept MultipliedAsWords =
    Isa::kWordRows > 0 && weight_format::StoredInBlocks<Panel>&& weight_format::IntegerCodes<Panel>::kExist;

template <InstructionSet Isa, WeightPanel PanelType>
class WordPanels : public CodedPanels<Isa, PanelType> {
  using Base = CodedPanels<Isa, PanelType>;
  using Words = typename Isa::Words;

 public:
  using Panel = PanelType;
  using Element = typename Isa::Element;
  // Codes with two scales for 32 weights take nearly twice the time where they are not decoded.
  static constexpr int kStreamRows = Isa::kWordRows / weight_format::IntegerCodes<Panel>::kScales;
  static constexpr bool kMultipliesCodes = true;
  static constexpr bool kReadsWords = true;
  static constexpr int kConvertedRows = std::numeric_limits<int>::max();
  using Slots = ConvertedSlots<WordPanels>;

  // `scratch` holds `scratch_size(contraction)` elements.
  WordPanels(const PanelPlaces& places, std::int64_t contraction, Element* scratch)
      : Base(places, contraction), scratch_(reinterpret_cast<std::byte*>(scratch)) {}

  static constexpr std::int64_t scratch_size(std::int64_t contraction) {
    return weight_format::WordPanel<Panel>::bytes(contraction) / static_cast<std::int64_t>(sizeof(Element));
  }

  // A row alone is read by `multiply_codes` only: groups of an expert are balanced.
  static std::int64_t converted_bytes(std::int64_t rows, std::int64_t contraction) {
    return weight_format::fixed_point_bytes(rows, contraction);
  }
  static void convert(const SlotGroup& group, std::int64_t contraction, const Element* a, std::byte* target) {
    weight_format::to_row_words<Words, Panel>(group.rows, contraction, a, target);
  }

  void read(const Slots& slots, const std::byte* memory) { read_ = {&slots, memory}; }

  const Element* current(PanelPart part) {
    weight_format::decode_words<Words, Panel>(this->panel(part.expert, part.panel), this->contraction(), scratch_);
    part_ = part;
    return nullptr;
  }

  // The decoded panel and one group of slots, whose elements are `a`.
  template <class Ahead>
  void multiply(const SlotGroup& group, const Element* a, float* tile, Ahead& ahead) const {
    const auto x = rows(group);
    weight_format::multiply_word_panel<Words, Panel, Isa::kMaxRows>(this->contraction(), x, scratch_, tile, ahead);
    if (!x.finite()) multiply_decoded(x, part_, a, tile);
  }
  // The number of times that `multiply` calls `ahead.step()`.
  static constexpr std::int64_t steps_ahead(std::int64_t contraction) {
    return contraction / 2 / weight_format::kWordPairsAhead * (kPanelWidth / Words::kOutputs / 2);
  }

  // A stored panel to its end and one group of slots. The values before are zeros, which rows that are not finite are
  // multiplied with too.
  void multiply_codes(const SlotGroup& group, PanelPart part, PanelPart next, const Element* a, float* tile) const {
    const auto x = rows(group);
    const std::int64_t size = this->contraction() - part.first_k;
    weight_format::multiply_words<Words, Panel>(size, x.from(part.first_k), this->coded(part, next), tile);
    if (!x.finite()) multiply_decoded(x, part, a, tile);
  }

 private:
  weight_format::FixedPointRows rows(const SlotGroup& group) const {
    return weight_format::fixed_point_rows(read_.of(group), group.rows, this->contraction());
  }
  void multiply_decoded(const weight_format::FixedPointRows& x, PanelPart part, const Element* a, float* tile) const {
    const std::byte* panel = this->panel(part.expert, part.panel);
    weight_format::multiply_decoded<Isa, Panel>(x, this->contraction(), a, panel, tile);
  }

  std::byte* scratch_;
  ReadSlots<WordPanels> read_;
  PanelPart part_{};
};

}  // namespace ktc::inline KTC_UNIT
