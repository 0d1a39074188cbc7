// The two products of forward, and the rows they read: gate and up of hidden states, and down of the activation's
// result. Backward computes the first of them again where forward kept nothing.
//
// Rows of elements are packed in the order of the micro-kernel and multiplied, or converted too where panels read them
// so (`converted_slots.hpp`); integer products quantise theirs first (`integer_products.hpp`).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/converted_slots.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// The scratch of one worker for a sweep: `sums_at_hand()` accumulators, and `panel_scratch()` elements.
template <class Layer>
struct SweepScratch {
  typename Layer::Accumulator* sums;
  typename Layer::Element* panel;
};

// The packed rows are the products' own operands: the caller holds them, Hp or Ip elements per slot.
template <class Layer>
class ElementProducts {
 public:
  using Isa = typename Layer::Isa;
  using Element = typename Layer::Element;
  using Tokens = MatrixView<const Element>;
  using Scratch = SweepScratch<Layer>;
  using ActivatedRows = PackedRows<Layer>;  // how the first product's epilogue writes for down
  using FirstPanels = typename Layer::FirstSources::Stored;
  using DownPanels = typename Layer::DownSources::Stored;
  static constexpr bool kPacksRows = false;

  ElementProducts(const Layer& layer, const Routing& routing, const std::byte* packed, int threads)
      : layer_(layer),
        routing_(routing),
        packed_(packed),
        threads_(threads),
        first_slots_(routing, layer.format.first_contraction()),
        down_slots_(routing, layer.format.down_contraction()),
        converted_(std::max(first_slots_.bytes(), down_slots_.bytes())) {}

  // Whether `read_activated` writes what `down` reads.
  bool reads_activated() const { return down_slots_.any(); }

  // The panels of both products, for as many workers as there are threads.
  PanelQueues<Isa> first_queues() const { return queues(layer_.first_set(), run_rows<FirstPanels>()); }
  PanelQueues<Isa> down_queues() const { return queues(layer_.down_set(), run_rows<DownPanels>()); }

  template <class Visit>
  void regions(const Visit& visit) {
    visit(converted_);
  }

  void read_hidden(Worker, Range groups, const Tokens& hidden_TH, Element* hidden_S) const {
    gather_slots<Isa>(routing_, hidden_TH, layer_.shape.padded_hidden(), groups, hidden_S);
    first_slots_.convert(groups, hidden_S, converted_.data());
  }
  void read_activated(Worker, Range groups, const Element* activated_S, Element*) const {
    down_slots_.convert(groups, activated_S, converted_.data());
  }

  // The panels that this worker takes from the queue, for all slots. `ready` as `Sweep::run` has it.
  template <class Epilogue, class Ready>
  void first(int, PanelQueue& queue, const Element* hidden_S, Scratch scratch, const Epilogue& epilogue,
             const Ready& ready) const {
    multiply(queue, layer_.first_panels(packed_, scratch.panel), first_slots_, hidden_S, scratch, epilogue, ready);
  }
  template <class Epilogue, class Ready>
  void down(int, PanelQueue& queue, const Element* activated_S, Scratch scratch, const Epilogue& epilogue,
            const Ready& ready) const {
    multiply(queue, layer_.down_panels(packed_, scratch.panel), down_slots_, activated_S, scratch, epilogue, ready);
  }

 private:
  PanelQueues<Isa> queues(PanelSet set, std::int64_t run_rows) const {
    set.run_rows = run_rows;
    return {routing_, set, threads_, layer_.nodes};
  }
  template <class Panels, class Epilogue, class Ready>
  void multiply(PanelQueue& queue, Panels panels, [[maybe_unused]] const ConvertedSlots<Panels>& slots,
                const Element* rows_S, Scratch scratch, const Epilogue& epilogue, const Ready& ready) const {
    if constexpr (Panels::kConvertedRows > 0) panels.read(slots, converted_.data());
    sweep<Isa>(routing_, queue, panels, rows_S, scratch.sums, epilogue, ready);
  }

  const Layer& layer_;
  const Routing& routing_;
  const std::byte* packed_;
  int threads_;
  ConvertedSlots<FirstPanels> first_slots_;
  ConvertedSlots<DownPanels> down_slots_;
  Region<std::byte> converted_;  // rows of one product, then of the other
};

}  // namespace ktc::inline KTC_UNIT
