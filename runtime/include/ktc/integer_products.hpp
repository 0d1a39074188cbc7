// Forward's products in integers: weights of 8 bits with a scale per output, rows quantised to 8 bits with a scale per
// slot. A sum of integers is exact, so every ISA has the same. It is multiplied with both scales. Like every other
// product it then goes to LoRA, to the activation and to the tokens.
//
// Tokens are quantised once and then gathered. The activation's result is kept in rows of elements until the row of a
// slot is complete, because the scale is that of its largest value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/forward_products.hpp"
#include "ktc/integer_panels.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/quantise_rows.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// Scales a tile of integer sums to accumulators for the epilogue inside.
template <class Layer, SweepEpilogue<typename Layer::Isa> Inner>
class ScaledSums {
 public:
  using Accumulator = typename Layer::Accumulator;
  using Lanes = typename Layer::Lanes;
  using IntegerIsa = IntegerIsaOf<typename Layer::Isa>;
  using Panels = IntegerPanels<IntegerIsa>;

  // `scale_S` has a scale per slot; `tile` is as large as one of the sweep.
  ScaledSums(const Panels& panels, const float* scale_S, Accumulator* tile, const Inner& inner)
      : panels_(panels), scale_S_(scale_S), tile_(tile), inner_(inner) {}

  void begin(PanelPart part) const { inner_.begin(part); }
  void prefetch(const SlotGroup& group, PanelPart part) const { inner_.prefetch(group, part); }
  void complete(IntegerIsa& isa, const SlotGroup& group, PanelPart part, const std::int32_t* sums) const {
    const float* scales = panels_.scales(part);
    const std::int32_t* offsets = panels_.offsets(part);
    for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
      const Lanes scale = Lanes::load(scales + half);
      for (std::int64_t row = 0; row < group.rows; ++row) {
        const std::int64_t place = row * kPanelWidth + half;
        const Lanes of_row(scale_S_[group.first_slot + row]);
        (Lanes::from_integers(sums + place, offsets + half) * scale * of_row).store(tile_ + place);
      }
    }
    inner_.complete(isa.elements(), group, part, tile_);
  }
  void operator()(const SlotGroup& group, PanelPart part, const std::int32_t*) const { inner_(group, part, tile_); }
  void end(PanelPart part) const { inner_.end(part); }

 private:
  Panels panels_;
  const float* scale_S_;
  Accumulator* tile_;
  Inner inner_;
};

template <class Layer>
class IntegerProducts {
 public:
  using Isa = IntegerIsaOf<typename Layer::Isa>;
  using Panels = IntegerPanels<Isa>;
  using Code = typename Isa::Element;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Lanes = typename Layer::Lanes;
  using Tokens = MatrixView<const Element>;
  using Scratch = SweepScratch<Layer>;
  using ActivatedRows = PlainRows<Layer>;
  static constexpr bool kPacksRows = true;

  IntegerProducts(const Layer& layer, const Routing& routing, const std::byte* packed, int threads)
      : layer_(layer),
        routing_(routing),
        first_(layer.format.first_places(packed), layer.format.first_contraction()),
        down_(layer.format.down_places(packed), layer.format.down_contraction()),
        tokens_(routing.num_tokens()),
        threads_(threads),
        codes_T_(tokens_ * first_.contraction()),
        scale_T_(tokens_),
        codes_S_(routing.num_slots() * row_size()),
        scale_S_(routing.num_slots()),
        rows_W_(kRowsSize * down_.contraction() * threads),
        tile_W_(kTile * threads) {}

  static constexpr bool reads_activated() { return true; }
  PanelQueues<Isa> first_queues() const { return queues(layer_.first_set(), first_); }
  PanelQueues<Isa> down_queues() const { return queues(layer_.down_set(), down_); }

  template <class Visit>
  void regions(const Visit& visit) {
    visit(codes_T_);
    visit(scale_T_);
    visit(codes_S_);
    visit(scale_S_);
    visit(rows_W_);
    visit(tile_W_);
  }

  // Writes the elements to `hidden_S` unless it is null: LoRA reads them.
  void read_hidden(Worker worker, Range groups, const Tokens& hidden_TH, Element* hidden_S) const {
    const std::int64_t contraction = first_.contraction();
    const Range tokens = Range::share(tokens_, worker.index, worker.count);
    for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
      scale_T_.data()[token] =
          quantise_row<Lanes>(hidden_TH.row(token), hidden_TH.columns, codes_T_.data() + token * contraction);
    }
    if (hidden_S != nullptr) {
      gather_slots<typename Layer::Isa>(routing_, hidden_TH, layer_.shape.padded_hidden(), groups, hidden_S);
    }
    worker.barrier.arrive_and_wait();
    const MatrixView<const Code> codes_TH(codes_T_.data(), tokens_, hidden_TH.columns, contraction);
    gather_slots<Isa>(routing_, codes_TH, contraction, groups, codes_S_.data());
    for_slots(groups, [&](std::int64_t slot) { scale_S_.data()[slot] = scale_T_.data()[routing_.token(slot)]; });
  }

  // `activated_S` are plain rows of Ip elements, `packed_S` the same ones packed, if LoRA reads them.
  void read_activated(Worker worker, Range groups, const Element* activated_S, Element* packed_S) const {
    const std::int64_t padded = layer_.shape.padded_intermediate();
    const std::int64_t contraction = down_.contraction();
    Code* own_rows = rows_W_.data() + worker.index * kRowsSize * contraction;
    for (std::int64_t index = groups.begin; index < groups.end; ++index) {
      const SlotGroup& group = routing_.groups()[static_cast<std::size_t>(index)];
      for (int row = 0; row < group.rows; ++row) {
        const std::int64_t slot = group.first_slot + row;
        scale_S_.data()[slot] = quantise_row<Lanes>(activated_S + slot * padded, padded, own_rows + row * contraction);
      }
      pack_group<Isa>(
          group, [&](std::int64_t slot) { return own_rows + (slot - group.first_slot) * contraction; }, padded,
          contraction, codes_S_.data());
      if (packed_S == nullptr) continue;
      pack_group<typename Layer::Isa>(
          group, [&](std::int64_t slot) { return activated_S + slot * padded; }, padded, padded, packed_S);
    }
  }

  template <class Epilogue, class Ready>
  void first(int worker, PanelQueue& queue, const Element*, Scratch scratch, const Epilogue& epilogue,
             const Ready& ready) const {
    multiply(worker, queue, first_, scratch, epilogue, ready);
  }
  template <class Epilogue, class Ready>
  void down(int worker, PanelQueue& queue, const Element*, Scratch scratch, const Epilogue& epilogue,
            const Ready& ready) const {
    multiply(worker, queue, down_, scratch, epilogue, ready);
  }

 private:
  static constexpr std::int64_t kRowsSize = Isa::kMaxRows;  // rows of a group, before they are packed
  static constexpr std::int64_t kTile = Isa::kMaxRows * kPanelWidth;
  static_assert(Isa::kMaxRows == Layer::Isa::kMaxRows, "both multiply the same groups");
  static_assert(sums_at_hand<Isa>() <= sums_at_hand<typename Layer::Isa>());

  // The two products' rows share their memory: those of the first are no longer needed when the others are written.
  std::int64_t row_size() const { return std::max(first_.contraction(), down_.contraction()); }

  // Codes have half the size of elements and another padding, so other experts may be multiplied in blocks.
  PanelQueues<Isa> queues(PanelSet set, const Panels& panels) const {
    set.contraction = panels.contraction();
    set.run_rows = run_rows<Panels>();
    return {routing_, set, threads_, layer_.nodes};
  }

  template <class Function>
  void for_slots(Range groups, const Function& function) const {
    for (std::int64_t index = groups.begin; index < groups.end; ++index) {
      const SlotGroup& group = routing_.groups()[static_cast<std::size_t>(index)];
      for (int row = 0; row < group.rows; ++row) function(group.first_slot + row);
    }
  }

  template <class Epilogue, class Ready>
  void multiply(int worker, PanelQueue& queue, const Panels& panels, Scratch scratch, const Epilogue& epilogue,
                const Ready& ready) const {
    auto* sums = reinterpret_cast<std::int32_t*>(scratch.sums);
    sweep<Isa>(routing_, queue, panels, codes_S_.data(), sums,
               ScaledSums<Layer, Epilogue>(panels, scale_S_.data(), tile_W_.data() + worker * kTile, epilogue), ready);
  }

  const Layer& layer_;
  const Routing& routing_;
  Panels first_;
  Panels down_;
  std::int64_t tokens_;
  int threads_;
  Region<Code> codes_T_;
  Region<float> scale_T_;
  Region<Code> codes_S_;
  Region<float> scale_S_;
  Region<Code> rows_W_;
  Region<Accumulator> tile_W_;
};

}  // namespace ktc::inline KTC_UNIT
