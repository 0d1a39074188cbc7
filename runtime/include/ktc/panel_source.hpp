// The source of a product's weight panels: as stored, or transposed.
//
// Both return the parts of panels in the order of a sweep, and prepare the next part while the current one is
// multiplied. For that the micro-kernel calls `Ahead` at each of its steps.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/concepts.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc::inline KTC_UNIT {

// One matrix per expert, as it is packed.
template <InstructionSet Isa>
class StoredPanels {
 public:
  using Element = typename Isa::Element;
  using Ahead = FetchAhead<Isa>;
  static constexpr int kStreamRows = Isa::kStreamRows;
  static constexpr bool kMultipliesCodes = false;
  static constexpr bool kReadsWords = false;
  static constexpr int kConvertedRows = 0;

  // The last argument is the scratch that decoded panels take.
  StoredPanels(const PanelPlaces& places, std::int64_t contraction, Element*)
      : places_(places), contraction_(contraction) {}

  static constexpr std::int64_t scratch_size(std::int64_t) { return 0; }

  std::int64_t contraction() const { return contraction_; }
  std::int64_t panel_size() const { return contraction_ * kPanelWidth; }
  const PanelPlaces& places() const { return places_; }
  const Element* panel(std::int64_t expert, std::int64_t index) const {
    return reinterpret_cast<const Element*>(places_.panel(expert, index));
  }

  const std::byte* stretch(PanelPart part) const { return reinterpret_cast<const std::byte*>(at(part)); }

  void start(PanelPart) const {}
  const Element* current(PanelPart part) const { return at(part); }
  Ahead ahead(PanelPart next, PanelPart, std::int64_t calls) const {
    return Ahead(at(next), next.size_k * kPanelWidth * static_cast<std::int64_t>(sizeof(Element)), calls);
  }
  void advance() const {}

 private:
  const Element* at(PanelPart part) const { return panel(part.expert, part.panel) + part.first_k * kPanelWidth; }

  PanelPlaces places_;
  std::int64_t contraction_;
};

// Rebuilds a panel of the transposed weights, piece by piece, over `calls` of `step`. Between two products the same
// work would wait for memory, which with few tokens per expert takes most of the time.
//
// Blocks are fetched a few at a time. Stored panels are often a multiple of 64 KB apart, so that the blocks of one
// transposed panel share 32 sets of L2, which hold 16 of them.
template <InstructionSet Isa>
class TransposeAhead {
 public:
  using Element = typename Isa::Element;

  // A change of shard between one panel and the next: when `target` reaches `at`, the block of the next panel, the
  // source is `jump` elements away. A table of them ends with one that is never reached.
  struct Crossing {
    const Element* at;
    std::int64_t jump;
  };

  TransposeAhead() = default;
  // The panel gathers one block from each of `blocks` stored panels, `stride` elements apart except at `crossings`. The
  // panel after it begins at `after`.
  TransposeAhead(const Element* source, std::int64_t stride, std::int64_t blocks, const Crossing* crossings,
                 const Element* after, Element* target, std::int64_t calls)
      : source_(source),
        target_(target),
        fetched_(source + kBlocksAhead * stride),
        after_(after),
        crossing_(crossings),
        stride_(stride),
        fetches_left_(blocks - kBlocksAhead),
        parts_left_(blocks * kBlockParts),
        parts_per_step_(parts_left_ / calls),
        steps_with_more_(parts_left_ % calls) {
    if (fetches_left_ <= 0) fetched_ = after_;
  }

  // The first steps have one part more than the others. An alternation would be mispredicted.
  [[gnu::always_inline]] void step() {
    const std::int64_t parts = std::min(parts_per_step_ + (steps_with_more_ > 0 ? 1 : 0), parts_left_);
    --steps_with_more_;
    parts_left_ -= parts;
    for (std::int64_t i = 0; i < parts; ++i) transpose_part();
  }
  void finish() {
    for (; parts_left_ > 0; --parts_left_) transpose_part();
  }

 private:
  static constexpr std::int64_t kBlocksAhead = 8;
  // A step of tiles is long enough for two pieces. With four, GCC 13 keeps operands of few rows on the stack.
  static constexpr unsigned kPartPieces = Isa::kBlocked ? 2 : 1;
  static constexpr unsigned kBlockParts = weight_format::kBlockPieces / kPartPieces;
  static constexpr std::int64_t kPartBytes = weight_format::kBlock * sizeof(Element) / kBlockParts;

  [[gnu::always_inline]] void transpose_part() {
    const char* later = reinterpret_cast<const char*>(fetched_) + part_ * kPartBytes;
    for (std::int64_t line = 0; line < kPartBytes; line += kCacheLine) {
      __builtin_prefetch(later + line, 0, kPanelLocality<Isa>);
    }
#pragma GCC unroll 4
    for (unsigned piece = 0; piece < kPartPieces; ++piece) {
      Isa::transpose_piece(source_, target_, part_ * kPartPieces | piece);
    }
    if (++part_ < kBlockParts) return;
    part_ = 0;
    source_ += stride_;
    target_ += weight_format::kBlock;
    fetched_ = --fetches_left_ == 0 ? after_ : fetched_ + stride_;
    if (target_ == crossing_->at) [[unlikely]] {  // without a call, which would spill the micro-kernel's sums
      source_ += crossing_->jump;
      if (fetches_left_ > 0) fetched_ += crossing_->jump;  // its fetches beyond the shard were useless
      ++crossing_;
    }
  }

  const Element* source_ = nullptr;
  Element* target_ = nullptr;
  const Element* fetched_ = nullptr;
  const Element* after_ = nullptr;
  const Crossing* crossing_ = nullptr;
  std::int64_t stride_ = 0;
  std::int64_t fetches_left_ = 0;
  std::int64_t parts_left_ = 0;
  std::int64_t parts_per_step_ = 0;
  std::int64_t steps_with_more_ = 0;
  unsigned part_ = 0;
};

// The same matrices transposed, in two scratch panels that stay in L2: one is read, the other written.
template <InstructionSet Isa>
class TransposedPanels {
 public:
  using Element = typename Isa::Element;
  using Ahead = TransposeAhead<Isa>;
  static constexpr int kStreamRows = 0;
  static constexpr bool kMultipliesCodes = false;
  static constexpr bool kReadsWords = false;
  static constexpr int kConvertedRows = 0;

  // `scratch` holds `scratch_size(num_panels)` elements.
  TransposedPanels(const StoredPanels<Isa>& stored, std::int64_t num_panels, Element* scratch)
      : stored_(stored),
        num_panels_(num_panels),
        read_(scratch),
        written_(scratch + num_panels * weight_format::kBlock) {}

  static constexpr std::int64_t scratch_size(std::int64_t num_panels) { return 2 * num_panels * weight_format::kBlock; }

  std::int64_t contraction() const { return num_panels_ * kPanelWidth; }

  void start(PanelPart part) { gather(part, part, read_, 1).finish(); }
  const Element* current(PanelPart) const { return read_; }
  // Only one may be in use: they share the table of crossings.
  Ahead ahead(PanelPart next, PanelPart after_next, std::int64_t calls) {
    return gather(next, after_next, written_, calls);
  }
  void advance() { std::swap(read_, written_); }

 private:
  const Element* at(PanelPart part) const {
    return stored_.panel(part.expert, part.first_k / kPanelWidth) + part.panel * weight_format::kBlock;
  }

  Ahead gather(PanelPart part, PanelPart after, Element* target, std::int64_t calls) {
    const std::int64_t first = part.first_k / kPanelWidth, blocks = part.size_k / kPanelWidth;
    auto* crossing = crossings_.data();
    stored_.places().for_ends(first, first + blocks, [&](std::int64_t panel) {
      const Element* expected = stored_.panel(part.expert, panel - 1) + stored_.panel_size();
      const auto jump = reinterpret_cast<std::intptr_t>(stored_.panel(part.expert, panel)) -
                        reinterpret_cast<std::intptr_t>(expected);
      *crossing++ = {target + (panel - first) * weight_format::kBlock,
                     jump / static_cast<std::intptr_t>(sizeof(Element))};
    });
    *crossing = {nullptr, 0};
    return Ahead(at(part), stored_.panel_size(), blocks, crossings_.data(), at(after), target, calls);
  }

  StoredPanels<Isa> stored_;
  std::int64_t num_panels_;
  Element* read_;
  Element* written_;
  std::array<typename Ahead::Crossing, kMaxNodes> crossings_;
};

}  // namespace ktc::inline KTC_UNIT
