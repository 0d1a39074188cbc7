// Panels of quantised weights, decoded into a scratch that stays in L2, as stored or transposed, and then multiplied
// like unquantised ones. A panel is decoded as a whole, not piece by piece beside products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/code_products.hpp"
#include "ktc/coded_panels.hpp"
#include "ktc/concepts.hpp"
#include "ktc/converted_slots.hpp"
#include "ktc/panel_source.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/decode_blocks.hpp"
#include "ktc/weight_format/decode_int8.hpp"
#include "ktc/weight_format/packed.hpp"
#include "ktc/weight_format/quantised.hpp"
#include "ktc/word_panels.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, WeightPanel PanelType>
class DecodedPanels : public CodedPanels<Isa, PanelType> {
  using Base = CodedPanels<Isa, PanelType>;

 public:
  using Panel = PanelType;
  using Element = typename Isa::Element;
  using Products = CodeProducts<Isa, Panel>;
  static constexpr int kStreamRows = Products::kRows;
  static constexpr bool kMultipliesCodes = kStreamRows > 0;
  static constexpr bool kReadsWords = false;
  static constexpr int kConvertedRows = Products::kConverts ? kStreamRows : 0;
  using Slots = ConvertedSlots<DecodedPanels>;

  // `scratch` holds `scratch_size(contraction)` elements.
  DecodedPanels(const PanelPlaces& places, std::int64_t contraction, Element* scratch)
      : Base(places, contraction), scratch_(scratch) {}

  static constexpr std::int64_t scratch_size(std::int64_t contraction) { return contraction * kPanelWidth; }

  const Element* current(PanelPart part) {
    const std::int64_t block = part.first_k / kPanelWidth;
    weight_format::decode_blocks<typename Isa::Lanes, Panel>(this->panel(part.expert, part.panel), block,
                                                             block + part.size_k / kPanelWidth, scratch_);
    return scratch_;
  }

  // One group of a call's slots in the form that `multiply_codes` reads.
  static std::int64_t converted_bytes(std::int64_t rows, std::int64_t contraction) {
    return Products::bytes(rows, contraction);
  }
  static void convert(const SlotGroup& group, std::int64_t contraction, const Element* a, std::byte* target) {
    Products::convert(group.rows, contraction, a, target);
  }
  void read(const Slots& slots, const std::byte* memory) { read_ = {&slots, memory}; }

  // A panel to its end and one group of an expert with up to `kStreamRows` rows, without decoding.
  void multiply_codes(const SlotGroup& group, PanelPart part, PanelPart next, const Element* a,
                      typename Isa::Accumulator* tile) const {
    const std::byte* converted = nullptr;
    if constexpr (kConvertedRows > 0) converted = read_.of(group);
    const Range k{part.first_k, this->contraction()};
    Products::multiply(group.rows, k, a, converted, this->coded(part, next), tile);
  }

 private:
  Element* scratch_;
  ReadSlots<DecodedPanels> read_;
};

// Fetches one block from each of several panels, line by line, evenly over `calls` of `step`. A block at once would
// fill a core's queue of misses.
class FetchBlocksAhead {
 public:
  FetchBlocksAhead() = default;
  // Scales and codes are whole lines.
  FetchBlocksAhead(const std::byte* scales, std::int64_t scale_bytes, const std::byte* codes, std::int64_t code_bytes,
                   std::int64_t stride, std::int64_t blocks, std::int64_t calls)
      : scales_(scales),
        codes_(codes),
        scale_bytes_(scale_bytes),
        block_bytes_(scale_bytes + code_bytes),
        stride_(stride),
        lines_left_(blocks * block_bytes_ / kCacheLine),
        lines_per_step_((lines_left_ + calls - 1) / calls) {}

  [[gnu::always_inline]] void step() {
    const std::int64_t lines = std::min(lines_per_step_, lines_left_);
    lines_left_ -= lines;
    for (std::int64_t line = 0; line < lines; ++line) {
      __builtin_prefetch(at_ < scale_bytes_ ? scales_ + at_ : codes_ + at_ - scale_bytes_, 0, 2);
      at_ += kCacheLine;
      if (at_ < block_bytes_) continue;
      at_ = 0;
      scales_ += stride_;
      codes_ += stride_;
    }
  }
  void finish() const {}

 private:
  const std::byte* scales_ = nullptr;
  const std::byte* codes_ = nullptr;
  std::int64_t scale_bytes_ = 0;
  std::int64_t block_bytes_ = 0;
  std::int64_t stride_ = 0;
  std::int64_t at_ = 0;  // in the block
  std::int64_t lines_left_ = 0;
  std::int64_t lines_per_step_ = 0;
};

// The same matrices transposed: one block of each stored panel is decoded into L1 and transposed into the scratch.
template <InstructionSet Isa, WeightPanel Panel>
class DecodedTransposedPanels {
 public:
  using Element = typename Isa::Element;
  using Ahead = FetchBlocksAhead;
  static constexpr int kStreamRows = 0;
  static constexpr bool kMultipliesCodes = false;
  static constexpr bool kReadsWords = false;
  static constexpr int kConvertedRows = 0;

  // `scratch` holds `scratch_size(num_panels)` elements.
  DecodedTransposedPanels(const CodedPanels<Isa, Panel>& stored, std::int64_t num_panels, Element* scratch)
      : stored_(stored), num_panels_(num_panels), scratch_(scratch) {}

  static constexpr std::int64_t scratch_size(std::int64_t num_panels) { return num_panels * weight_format::kBlock; }

  std::int64_t contraction() const { return num_panels_ * kPanelWidth; }

  void start(PanelPart) const {}
  const Element* current(PanelPart part) const {
    alignas(64) Element block[weight_format::kBlock];
    const std::int64_t first = part.first_k / kPanelWidth;
    Element* target = scratch_;
    for (std::int64_t source = first; source < first + part.size_k / kPanelWidth; ++source) {
      weight_format::decode_blocks<typename Isa::Lanes, Panel>(stored_.panel(part.expert, source), part.panel,
                                                               part.panel + 1, block);
      for (unsigned piece = 0; piece < weight_format::kBlockPieces; ++piece) Isa::transpose_piece(block, target, piece);
      target += weight_format::kBlock;
    }
    return scratch_;
  }
  Ahead ahead(PanelPart next, PanelPart, std::int64_t calls) const {
    const std::int64_t first = next.first_k / kPanelWidth;
    const std::byte* from = stored_.panel(next.expert, first);
    // Blocks of other nodes are in other shards and are not fetched ahead.
    const std::int64_t blocks = std::min(next.size_k / kPanelWidth, stored_.places().shard_with(first).end - first);
    return Ahead(from + Panel::scales_at(next.panel), Panel::kScaleBytes, from + Panel::codes_at(next.panel),
                 Panel::kBlockBytes, Panel::bytes(stored_.contraction()), blocks, calls);
  }
  void advance() const {}

 private:
  CodedPanels<Isa, Panel> stored_;
  std::int64_t num_panels_;
  Element* scratch_;
};

// The panel source of products with panels of one type.
template <InstructionSet Isa, WeightPanel Panel>
struct PanelSources {
  using Stored = StoredPanels<Isa>;
  using Transposed = TransposedPanels<Isa>;
};
template <InstructionSet Isa, WeightPanel Panel>
  requires(Panel::kDecoded && !MultipliedAsWords<Isa, Panel>)
struct PanelSources<Isa, Panel> {
  using Stored = DecodedPanels<Isa, Panel>;
  using Transposed = DecodedTransposedPanels<Isa, Panel>;
};
template <InstructionSet Isa, WeightPanel Panel>
  requires MultipliedAsWords<Isa, Panel>
struct PanelSources<Isa, Panel> {
  using Stored = WordPanels<Isa, Panel>;
  using Transposed = DecodedTransposedPanels<Isa, Panel>;
};

}  // namespace ktc::inline KTC_UNIT
