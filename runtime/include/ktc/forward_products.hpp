// The two products of forward, and the rows they read: gate and up of hidden states, and down of the activation's
// result. Backward computes the first of them again where forward kept nothing.
//
// Rows of elements are packed in the order of the micro-kernel and multiplied, or written as words too where panels
// read these (`word_panels.hpp`); integer products quantise theirs first (`integer_products.hpp`).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/moe_layer.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/unit.hpp"
#include "ktc/word_panels.hpp"
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
  static constexpr bool kReadsActivated = DownPanels::kReadsWords;

  ElementProducts(const Layer& layer, const Routing& routing, const std::byte* packed, int threads)
      : layer_(layer),
        routing_(routing),
        packed_(packed),
        threads_(threads),
        words_S_(std::max(word_bytes<FirstPanels>(routing.num_slots(), layer.format.first_contraction()),
                          word_bytes<DownPanels>(routing.num_slots(), layer.format.down_contraction()))) {}

  // The panels of both products, for as many workers as there are threads.
  PanelQueues<Isa> first_queues() const { return queues(layer_.first_set(), run_rows<FirstPanels>()); }
  PanelQueues<Isa> down_queues() const { return queues(layer_.down_set(), run_rows<DownPanels>()); }

  template <class Visit>
  void regions(const Visit& visit) {
    visit(words_S_);
  }

  void read_hidden(Worker, Range groups, const Tokens& hidden_TH, Element* hidden_S) const {
    gather_slots<Isa>(routing_, hidden_TH, layer_.shape.padded_hidden(), groups, hidden_S);
    rows_to_words<FirstPanels>(routing_, groups, layer_.format.first_contraction(), hidden_S, words_S_.data());
  }
  void read_activated(Worker, Range groups, const Element* activated_S, Element*) const {
    rows_to_words<DownPanels>(routing_, groups, layer_.format.down_contraction(), activated_S, words_S_.data());
  }

  // The panels that this worker takes from the queue, for all slots.
  template <class Epilogue>
  void first(int, PanelQueue& queue, const Element* hidden_S, Scratch scratch, const Epilogue& epilogue) const {
    multiply(queue, layer_.first_panels(packed_, scratch.panel), hidden_S, scratch, epilogue);
  }
  template <class Epilogue>
  void down(int, PanelQueue& queue, const Element* activated_S, Scratch scratch, const Epilogue& epilogue) const {
    multiply(queue, layer_.down_panels(packed_, scratch.panel), activated_S, scratch, epilogue);
  }

 private:
  PanelQueues<Isa> queues(PanelSet set, std::int64_t run_rows) const {
    set.run_rows = run_rows;
    return {routing_, set, threads_, layer_.nodes};
  }
  template <class Panels, class Epilogue>
  void multiply(PanelQueue& queue, Panels panels, const Element* rows_S, Scratch scratch,
                const Epilogue& epilogue) const {
    if constexpr (Panels::kReadsWords) panels.read(words_S_.data());
    sweep<Isa>(routing_, queue, panels, rows_S, scratch.sums, epilogue);
  }

  const Layer& layer_;
  const Routing& routing_;
  const std::byte* packed_;
  int threads_;
  Region<std::byte> words_S_;  // of the rows of one product, then of the other's
};

}  // namespace ktc::inline KTC_UNIT
