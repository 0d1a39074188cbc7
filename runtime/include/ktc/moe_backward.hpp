// Gradients of hidden states, routing weights and LoRA's factors, from the one packed copy that forward reads.
//
// With dY the gradient of the output, per slot: d_activated = W_down^T dY; d_weight = <d_activated, activated>, and
// <dY, b_down> more where down has a bias; dX += W_gate^T d_gate + W_up^T d_up, where d_gate and d_up carry the routing
// weight. Both products contract along the other axis than forward's, so each panel is transposed into a scratch first
// and then multiplied as in forward.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "ktc/concepts.hpp"
#include "ktc/interface/moe.hpp"
#include "ktc/lora_backward.hpp"
#include "ktc/moe_forward.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// The parts of each routing weight's gradient: (S, Ip / 32 and one for the bias of down). Fixed columns, summed in
// order afterwards, so the result does not depend on the workers' shares.
template <class Layer>
class WeightGradients {
 public:
  using Accumulator = typename Layer::Accumulator;

  WeightGradients(Accumulator* partial_S, std::int64_t num_parts) : partial_S_(partial_S), num_parts_(num_parts) {}

  static std::int64_t num_parts(const Layer& layer) {
    return layer.shape.padded_intermediate() / kPanelWidth + (Layer::kBiased ? 1 : 0);
  }
  std::int64_t of_bias() const { return num_parts_ - 1; }

  void put(std::int64_t slot, std::int64_t part, Accumulator value) const {
    partial_S_[slot * num_parts_ + part] = value;
  }
  Accumulator total(std::int64_t slot) const {
    Accumulator sum = 0;
    for (std::int64_t part = 0; part < num_parts_; ++part) sum += partial_S_[slot * num_parts_ + part];
    return sum;
  }

 private:
  Accumulator* partial_S_;
  std::int64_t num_parts_;
};

// After d_activated of 32 intermediate columns: d_gate and d_up for the last product, in the order of the packed first
// panels, and this panel's part of the routing weight's gradient.
template <class Layer>
class ActivationGradient {
 public:
  using Element = typename Layer::Element;
  using Lanes = typename Layer::Lanes;
  using Accumulator = typename Layer::Accumulator;

  ActivationGradient(const Layer& layer, const Element* saved_S, const Accumulator* weight_S, Element* d_first_S,
                     const WeightGradients<Layer>& weight_gradients, const LoraColumnGradients<Layer>& lora,
                     const WeightGradientRows& rows)
      : layer_(layer),
        saved_S_(saved_S),
        weight_S_(weight_S),
        d_first_S_(d_first_S),
        weight_gradients_(weight_gradients),
        lora_(lora),
        d_first_rows_(static_cast<Element*>(rows.d_first)),
        activated_rows_(static_cast<Element*>(rows.activated)) {}

  void begin(PanelPart part) const {
    if (lora_.active()) lora_.begin(part);
  }
  void end(PanelPart part) const {
    if (lora_.active()) lora_.end(part);
  }

  void prefetch(const SlotGroup& group, PanelPart part) const {
    layer_.prefetch_saved(saved_S_, group, part.panel * kPanelWidth, kPanelWidth);
  }

  void operator()(const SlotGroup& group, PanelPart part, Accumulator* tile) const {
    Accumulator d_weight[Layer::Isa::kMaxRows] = {};
    for (int half = 0; half < 2; ++half) half_panel(group, part, half, tile + half * kHalfPanel, d_weight);
    for (int row = 0; row < group.rows; ++row) {
      weight_gradients_.put(group.first_slot + row, part.panel, d_weight[row]);
    }
  }

 private:
  void half_panel(const SlotGroup& group, PanelPart part, int side, Accumulator* tile, Accumulator* d_weight) const {
    const std::int64_t half = 2 * part.panel + side;
    const std::int64_t padded = layer_.shape.padded_intermediate();
    const bool has_padding = layer_.valid_lanes(half) < kHalfPanel;
    const bool needs_activated = lora_.active() || activated_rows_ != nullptr;
    alignas(64) Element activated[Layer::Isa::kMaxRows][kHalfPanel];
    alignas(64) Element d_first[Layer::kFirstParts][Layer::Isa::kMaxRows][kHalfPanel];
    for (int row = 0; row < group.rows; ++row) {
      Accumulator* d_activated = tile + row * kPanelWidth;
      if (has_padding) layer_.clear_padding(d_activated, half);
      const std::int64_t slot = group.first_slot + row;
      const Element* saved = layer_.saved(saved_S_, slot) + half * kHalfPanel;
      const Lanes unweighted = Lanes::load(d_activated);
      const Lanes weight(weight_S_[slot]);
      const Lanes first = Lanes::from_elements(saved);
      if constexpr (Layer::kGated) {
        const Lanes up = Lanes::from_elements(saved + padded);
        const auto gradients = Layer::Activation::gradients(first, up, unweighted, weight);
        d_weight[row] += gradients.d_weight.sum();
        if (needs_activated) gradients.activated.to_elements(activated[row]);
        gradients.d_gate.to_elements(d_first[0][row]);
        gradients.d_up.to_elements(d_first[1][row]);
      } else {
        const auto gradients = Layer::Activation::gradients(first, unweighted, weight);
        d_weight[row] += gradients.d_weight.sum();
        if (needs_activated) gradients.activated.to_elements(activated[row]);
        gradients.d_up.to_elements(d_first[0][row]);
      }
    }
    if (lora_.active()) lora_.add(group, part, side, activated, d_first);
    if (activated_rows_ != nullptr) {
      PlainRows<Layer>(activated_rows_, padded).write(group, half * kHalfPanel, activated);
    }
    if (d_first_rows_ != nullptr) {
      const PlainRows<Layer> plain(d_first_rows_, layer_.first_size());
      for (std::int64_t output = 0; output < Layer::kFirstParts; ++output) {
        plain.write(group, output * padded + half * kHalfPanel, d_first[output]);
      }
    }
    const PackedRows<Layer> rows(d_first_S_, layer_.first_size());
    for (std::int64_t output = 0; output < Layer::kFirstParts; ++output) {
      rows.write(group, (half * Layer::kFirstParts + output) * kHalfPanel, d_first[output]);
    }
  }

  const Layer& layer_;
  const Element* saved_S_;
  const Accumulator* weight_S_;
  Element* d_first_S_;
  WeightGradients<Layer> weight_gradients_;
  LoraColumnGradients<Layer> lora_;
  Element* d_first_rows_;
  Element* activated_rows_;
};

// <dY, b_down> of each slot in `groups`: the bias's part of the routing weight's gradient.
template <class Layer>
void add_bias_to_weight_gradients(const Layer& layer, const std::byte* packed, const Routing& routing, Range groups,
                                  const MatrixView<const typename Layer::Element>& grad_out_TH,
                                  const WeightGradients<Layer>& weight_gradients) {
  using Lanes = typename Layer::Lanes;
  using Accumulator = typename Layer::Accumulator;
  const std::int64_t whole = grad_out_TH.columns / kHalfPanel * kHalfPanel;
  for (const ActiveExpert& active : routing.active_experts()) {
    const Accumulator* bias = layer.format.down_bias(packed, active.expert);
    const std::int64_t last = std::min(groups.end, static_cast<std::int64_t>(active.last_group));
    for (auto index = std::max(groups.begin, static_cast<std::int64_t>(active.first_group)); index < last; ++index) {
      const SlotGroup& group = routing.groups()[static_cast<std::size_t>(index)];
      for (std::int64_t slot = group.first_slot; slot < group.first_slot + group.rows; ++slot) {
        const auto* grad = grad_out_TH.row(routing.token(slot));
        Lanes sums(0);
        for (std::int64_t column = 0; column < whole; column += kHalfPanel) {
          sums = fused_multiply_add(Lanes::from_elements(grad + column), Lanes::load(bias + column), sums);
        }
        Accumulator sum = sums.sum();
        for (std::int64_t column = whole; column < grad_out_TH.columns; ++column) {
          sum += static_cast<Accumulator>(grad[column]) * bias[column];
        }
        weight_gradients.put(slot, weight_gradients.of_bias(), sum);
      }
    }
  }
}

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
  const std::int64_t first_size = slots * layer.first_size();
  const std::int64_t scratch_size = std::max(layer.panel_scratch(), layer.transposed_scratch());
  const MatrixView grad_out_TH(static_cast<const Element*>(arguments.grad_out), arguments.tokens, shape.hidden());
  const MatrixView hidden_TH(static_cast<const Element*>(arguments.hidden_states), arguments.tokens, shape.hidden());
  const MatrixView grad_hidden_TH(static_cast<Element*>(arguments.grad_hidden_states), arguments.tokens,
                                  shape.hidden());
  const auto* weight = static_cast<const Accumulator*>(arguments.top_k_weights);
  auto* grad_weight = static_cast<Accumulator*>(arguments.grad_top_k_weights);

  exclusively(engine, [&](const Team& team, Workspace& workspace) {
    LoraBackward<Layer> lora(layer, routing, arguments, team.threads());
    std::optional<ForwardProducts<Layer>> products;
    if (recompute) products.emplace(layer, routing, arguments.packed, team.threads());
    Region<Element> packed(slots * shape.padded_hidden());  // hidden states where recomputed, then dY
    Region<Element> d_first(first_size), recomputed(recompute ? first_size : 0);
    Region<Accumulator> token_sums(TokenSums<Layer>::size(arguments.tokens, shape.padded_hidden())), weights(slots);
    Region<Accumulator> weight_parts(slots * WeightGradients<Layer>::num_parts(layer));
    Region<Element> scratch_W(scratch_size * team.threads());
    Region<Accumulator> sums_at_hand_W(sums_at_hand<Isa>() * team.threads());
    workspace.lay_out(packed, d_first, token_sums, weights, weight_parts, recomputed, scratch_W, sums_at_hand_W, lora,
                      products);
    Element* packed_S = packed.data();
    Element* d_first_S = d_first.data();
    Element* recomputed_S = recomputed.data();
    Accumulator* weight_S = weights.data();
    const TokenSums<Layer> sums(token_sums.data(), shape.padded_hidden());
    const WeightGradients<Layer> weight_gradients(weight_parts.data(), WeightGradients<Layer>::num_parts(layer));
    for (std::int64_t pair = 0; pair < slots; ++pair) weight_S[routing.slot(pair)] = weight[pair];
    const Element* saved_S = recompute ? recomputed_S : static_cast<const Element*>(arguments.saved);

    std::optional<PanelQueues<typename ForwardProducts<Layer>::Isa>> first_queues;
    if (recompute) first_queues.emplace(products->first_queues());
    const PanelQueues<Isa> activated_queue(routing, {num_i_panels, shape.padded_hidden(), PanelTurns::kNone},
                                           team.threads());
    const PanelQueues<Isa> hidden_queue(
        routing, {layer.format.num_down_panels(), layer.first_size(), PanelTurns::kByExpert}, team.threads());
    team.run([&](Worker worker) {
      const auto share = [&](std::int64_t size) { return Range::share(size, worker.index, worker.count); };
      Accumulator* at_hand = sums_at_hand_W.data() + worker.index * sums_at_hand<Isa>();
      Element* own_scratch = scratch_W.data() + worker.index * scratch_size;
      lora.read_factors(worker);
      lora.draw(share(num_groups));
      if (lora.down() && !recompute) worker.barrier.arrive_and_wait();
      if (recompute) {
        const bool reads_elements = !ForwardProducts<Layer>::kPacksRows || lora.first();
        products->read_hidden(worker, share(num_groups), hidden_TH, reads_elements ? packed_S : nullptr);
        if (lora.first()) lora.recompute_first(worker.index, share(num_groups), hidden_TH, packed_S);
        auto* activated_S = lora.down() ? d_first_S : nullptr;  // there is space: gradients come later
        const KeptInputs* kept = lora.kept_of_down();
        const FirstEpilogue<Layer> epilogue(layer, arguments.packed, kept == nullptr ? activated_S : nullptr,
                                            recomputed_S, {kept == nullptr ? nullptr : activated_S, kept});
        products->first(worker.index, first_queues->of(worker.index), packed_S, {at_hand, own_scratch},
                        lora.around_first(worker.index, epilogue),
                        [&](Upcoming panels) { worker.barrier.arrive_and_wait(panels); });
        worker.barrier.arrive_and_wait();
        if (lora.down()) lora.recompute_down(worker.index, share(num_groups), activated_S);
      }
      gather_slots<Isa>(routing, grad_out_TH, shape.padded_hidden(), share(num_groups), packed_S);
      sums.clear(share(arguments.tokens));
      if (lora.down()) lora.begin_down(worker.index, share(num_groups), packed_S, weight_S);
      if constexpr (Layer::kBiased) {
        add_bias_to_weight_gradients(layer, arguments.packed, routing, share(num_groups), grad_out_TH,
                                     weight_gradients);
      }
      worker.barrier.arrive_and_wait();

      sweep<Isa>(routing, activated_queue.of(worker.index), layer.transposed_down_panels(arguments.packed, own_scratch),
                 packed_S, at_hand,
                 lora.around_down(worker.index,
                                  ActivationGradient<Layer>(layer, saved_S, weight_S, d_first_S, weight_gradients,
                                                            lora.column_gradients(worker.index), arguments.rows)));
      worker.barrier.arrive_and_wait();
      if (lora.first()) {
        lora.begin_hidden(worker.index, share(num_groups), d_first_S);
        worker.barrier.arrive_and_wait();
      }

      sweep<Isa>(routing, hidden_queue.of(worker.index), layer.transposed_first_panels(arguments.packed, own_scratch),
                 d_first_S, at_hand,
                 lora.around_hidden(worker.index, hidden_TH, grad_out_TH,
                                    AddToTokens<Layer>(layer, routing, sums, nullptr, nullptr)));
      worker.barrier.arrive_and_wait();
      sums.write(share(arguments.tokens), grad_hidden_TH);
      lora.write_gradients(worker);
      const Range pairs = share(slots);
      for (std::int64_t pair = pairs.begin; pair < pairs.end; ++pair) {
        grad_weight[pair] = weight_gradients.total(routing.slot(pair));
      }
    });
  });
}

}  // namespace ktc::inline KTC_UNIT
