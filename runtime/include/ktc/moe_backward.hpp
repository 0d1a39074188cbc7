// Gradients of hidden states and routing weights, from the one packed copy that forward reads.
//
// With dY the gradient of the output, per slot: d_activated = W_down^T dY; d_weight = <d_activated, activated>;
// dX += W_gate^T d_gate + W_up^T d_up, where d_gate and d_up carry the routing weight. Both products contract along the
// other axis than forward's, so each panel is transposed into a scratch first and then multiplied as in forward.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/moe_kernel.hpp"
#include "ktc/moe_layer.hpp"

namespace ktc {

// After d_activated of 32 intermediate columns: d_gate and d_up for the last product, in the order of the packed
// gate-and-up panels, and this panel's part of the routing weight's gradient.
template <class Layer>
class ActivationGradient {
 public:
  using Element = typename Layer::Element;
  using Lanes = typename Layer::Lanes;
  using Accumulator = typename Layer::Accumulator;

  // `partial_S` is (S, Ip / 32): fixed columns, summed in order afterwards, so that no worker's share shows.
  ActivationGradient(const Layer& layer, const Element* saved_S, const Accumulator* weight_S, Element* d_gate_up_S,
                     Accumulator* partial_S)
      : layer_(layer), saved_S_(saved_S), weight_S_(weight_S), d_gate_up_S_(d_gate_up_S), partial_S_(partial_S) {}

  void prefetch(const SlotGroup& group, std::int64_t panel) const {
    layer_.prefetch_saved(saved_S_, group, panel * kPanelWidth, kPanelWidth);
  }

  void operator()(const SlotGroup& group, std::int64_t panel, Accumulator* tile) const {
    const std::int64_t num_panels = layer_.shape.padded_intermediate() / kPanelWidth;
    Accumulator weight_gradient[Layer::Isa::kMaxRows] = {};
    for (int half = 0; half < 2; ++half) half_panel(group, 2 * panel + half, tile + half * kHalfPanel, weight_gradient);
    for (int row = 0; row < group.rows; ++row) {
      partial_S_[(group.first_slot + row) * num_panels + panel] = weight_gradient[row];
    }
  }

 private:
  void half_panel(const SlotGroup& group, std::int64_t half, Accumulator* tile, Accumulator* weight_gradient) const {
    const std::int64_t padded = layer_.shape.padded_intermediate();
    const bool has_padding = layer_.valid_lanes(half) < kHalfPanel;
    alignas(64) Element d_gate[Layer::Isa::kMaxRows][kHalfPanel];
    alignas(64) Element d_up[Layer::Isa::kMaxRows][kHalfPanel];
    for (int row = 0; row < group.rows; ++row) {
      Accumulator* d_activated = tile + row * kPanelWidth;
      if (has_padding) layer_.clear_padding(d_activated, half);
      const std::int64_t slot = group.first_slot + row;
      const Element* saved = layer_.saved_gate(saved_S_, slot) + half * kHalfPanel;
      const Lanes up = Lanes::from_elements(saved + padded);
      const auto [activated, slope] = Layer::Activation::value_and_slope(Lanes::from_elements(saved));
      const Lanes unweighted = Lanes::load(d_activated);
      const Lanes weighted = unweighted * Lanes(weight_S_[slot]);
      weight_gradient[row] += (unweighted * activated * up).sum();
      (weighted * up * slope).to_elements(d_gate[row]);
      (weighted * activated).to_elements(d_up[row]);
    }
    const PackedRows<Layer> rows(d_gate_up_S_, 2 * padded);
    rows.write(group, half * kPanelWidth, d_gate);
    rows.write(group, half * kPanelWidth + kHalfPanel, d_up);
  }

  const Layer& layer_;
  const Element* saved_S_;
  const Accumulator* weight_S_;
  Element* d_gate_up_S_;
  Accumulator* partial_S_;
};

template <class Layer>
void moe_backward(const Layer& layer, Engine& engine, const BackwardArguments& arguments) {
  using Isa = typename Layer::Isa;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  const auto& shape = layer.shape;
  const Routing routing = layer.route(arguments.top_k_index, arguments.tokens);
  if (arguments.tokens == 0) return;

  const bool recompute = arguments.saved == nullptr;
  const std::int64_t slots = routing.num_slots();
  const auto num_groups = static_cast<std::int64_t>(routing.groups().size());
  const std::int64_t num_i_panels = shape.padded_intermediate() / kPanelWidth;
  const std::int64_t hidden_size = slots * shape.padded_hidden();
  const std::int64_t gate_up_size = slots * 2 * shape.padded_intermediate();
  const std::int64_t sums_size = TokenSums<Layer>::size(arguments.tokens, shape.padded_hidden());
  const std::int64_t scratch_size =
      TransposedPanels<Isa>::scratch_size(std::max(layer.format.num_down_panels(), layer.format.num_gate_up_panels()));
  const MatrixView grad_out_TH(static_cast<const Element*>(arguments.grad_out), arguments.tokens, shape.hidden());
  const MatrixView hidden_TH(static_cast<const Element*>(arguments.hidden_states), arguments.tokens, shape.hidden());
  const MatrixView grad_hidden_TH(static_cast<Element*>(arguments.grad_hidden_states), arguments.tokens,
                                  shape.hidden());
  const auto* weight = static_cast<const Accumulator*>(arguments.top_k_weights);
  auto* grad_weight = static_cast<Accumulator*>(arguments.grad_top_k_weights);

  engine.exclusively([&](ThreadPool& pool, Workspace& workspace) {
    workspace.reserve(Workspace::bytes<Element>(hidden_size) + Workspace::bytes<Element>(gate_up_size) +
                      Workspace::bytes<Accumulator>(sums_size) + Workspace::bytes<Accumulator>(slots) +
                      Workspace::bytes<Accumulator>(slots * num_i_panels) +
                      Workspace::bytes<Element>(recompute ? gate_up_size : 0) +
                      Workspace::bytes<Element>(scratch_size * pool.threads()));
    auto* packed_TH = workspace.take<Element>(hidden_size);  // hidden states where recomputed, then dY
    auto* d_gate_up_S = workspace.take<Element>(gate_up_size);
    const TokenSums<Layer> sums(workspace.take<Accumulator>(sums_size), shape.padded_hidden());
    auto* weight_S = workspace.take<Accumulator>(slots);
    auto* partial_S = workspace.take<Accumulator>(slots * num_i_panels);
    auto* recomputed_S = workspace.take<Element>(recompute ? gate_up_size : 0);
    auto* scratch = workspace.take<Element>(scratch_size * pool.threads());
    for (std::int64_t pair = 0; pair < slots; ++pair) weight_S[routing.slot(pair)] = weight[pair];
    const Element* saved_S = recompute ? recomputed_S : static_cast<const Element*>(arguments.saved);

    pool.run([&](Worker worker) {
      const auto share = [&](std::int64_t size) { return Range::share(size, worker.index, worker.count); };
      const auto transposed = [&](const StoredPanels<Isa>& stored, std::int64_t num_panels) {
        return TransposedPanels<Isa>(stored, num_panels, scratch + worker.index * scratch_size);
      };
      if (recompute) {
        gather_slots<Isa>(routing, hidden_TH, shape.padded_hidden(), share(num_groups), packed_TH);
        worker.barrier.arrive_and_wait();
        sweep<Isa>(routing, share(layer.format.num_gate_up_panels()), layer.gate_up_panels(arguments.packed), packed_TH,
                   GateUpEpilogue<Layer>(layer, nullptr, recomputed_S));
        worker.barrier.arrive_and_wait();
      }
      gather_slots<Isa>(routing, grad_out_TH, shape.padded_hidden(), share(num_groups), packed_TH);
      sums.clear(share(arguments.tokens));
      worker.barrier.arrive_and_wait();

      sweep<Isa>(routing, share(num_i_panels),
                 transposed(layer.down_panels(arguments.packed), layer.format.num_down_panels()), packed_TH,
                 ActivationGradient<Layer>(layer, saved_S, weight_S, d_gate_up_S, partial_S));
      worker.barrier.arrive_and_wait();

      sweep<Isa>(routing, share(layer.format.num_down_panels()),
                 transposed(layer.gate_up_panels(arguments.packed), layer.format.num_gate_up_panels()), d_gate_up_S,
                 AddToTokens<Layer>(routing, sums, nullptr));
      worker.barrier.arrive_and_wait();
      sums.write(share(arguments.tokens), grad_hidden_TH);
      const Range pairs = share(slots);
      for (std::int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        const Accumulator* partial = partial_S + routing.slot(pair) * num_i_panels;
        Accumulator sum = 0;
        for (std::int64_t panel = 0; panel < num_i_panels; ++panel) sum += partial[panel];
        grad_weight[pair] = sum;
      }
    });
  });
}

}  // namespace ktc
