// The two products of forward, and the rows they read: gate and up of hidden states, and down of the activation's
// result. Backward computes the first of them again where forward kept nothing.
//
// Rows of elements are packed in the order of the micro-kernel and multiplied; integer products quantise theirs first
// (`integer_products.hpp`).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/moe_layer.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/thread_pool.hpp"

namespace ktc {

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
  static constexpr bool kPacksRows = false;

  ElementProducts(const Layer& layer, const Routing& routing, const std::byte* packed, int threads)
      : layer_(layer), routing_(routing), packed_(packed), threads_(threads) {}

  // The panels of both products, for as many workers as there are threads.
  PanelQueues<Isa> first_queues() const { return {routing_, layer_.first_set(), threads_, layer_.nodes}; }
  PanelQueues<Isa> down_queues() const { return {routing_, layer_.down_set(), threads_, layer_.nodes}; }

  template <class Visit>
  void regions(const Visit&) {}

  void read_hidden(Worker, Range groups, const Tokens& hidden_TH, Element* hidden_S) const {
    gather_slots<Isa>(routing_, hidden_TH, layer_.shape.padded_hidden(), groups, hidden_S);
  }
  void read_activated(Worker, Range, const Element*, Element*) const {}

  // The panels that this worker takes from the queue, for all slots.
  template <class Epilogue>
  void first(int, PanelQueue& queue, const Element* hidden_S, Scratch scratch, const Epilogue& epilogue) const {
    sweep<Isa>(routing_, queue, layer_.first_panels(packed_, scratch.panel), hidden_S, scratch.sums, epilogue);
  }
  template <class Epilogue>
  void down(int, PanelQueue& queue, const Element* activated_S, Scratch scratch, const Epilogue& epilogue) const {
    sweep<Isa>(routing_, queue, layer_.down_panels(packed_, scratch.panel), activated_S, scratch.sums, epilogue);
  }

 private:
  const Layer& layer_;
  const Routing& routing_;
  const std::byte* packed_;
  int threads_;
};

}  // namespace ktc
