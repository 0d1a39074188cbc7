// The steps that LoRA takes in a layer's backward, beside and around those of the base weights.
#pragma once

#include <cstdint>

#include "ktc/interface/moe.hpp"
#include "ktc/lora.hpp"
#include "ktc/lora_epilogue.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// u and v of both products, with their operands. Nothing is allocated or done for a product without LoRA.
template <class Layer>
class LoraBackward {
 public:
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Product = LoraProduct<Layer>;
  using Panels = LoraPanels<Layer>;
  using Values = LowRank<Layer>;
  using Tokens = MatrixView<const Element>;

  LoraBackward(const Layer& layer, const Routing& routing, const BackwardArguments& arguments, int threads)
      : layer_(layer),
        routing_(routing),
        first_(Product::of_first(layer, arguments.lora_first, routing.num_slots())),
        down_(Product::of_down(layer, arguments.lora_down, routing.num_slots())),
        scratch_(layer, first_, down_, threads),
        u_first_packed_S_(arguments.saved == nullptr ? packed_size(first_) : 0),
        u_first_S_(arguments.saved == nullptr ? rows_size(first_) : 0),
        v_first_packed_S_(packed_size(first_)),
        v_first_S_(rows_size(first_)),
        v_down_packed_S_(packed_size(down_)),
        v_down_S_(rows_size(down_)),
        u_down_S_(rows_size(down_)),
        kept_hidden_S_(arguments.saved == nullptr && first_.drops() ? routing.num_slots() * layer.shape.padded_hidden()
                                                                    : 0) {
    if (arguments.saved == nullptr) return;
    const SavedSlots<Layer> saved(layer_, const_cast<void*>(arguments.saved), routing.num_slots(), first_.rank());
    saved_u_first_S_ = saved.first_rows_S;
    saved_u_down_S_ = saved.down_rows_S;
  }

  bool first() const { return first_.active(); }
  bool down() const { return down_.active(); }

  template <class Visit>
  void regions(const Visit& visit) {
    for (Region<Element>* packed : {&u_first_packed_S_, &v_first_packed_S_, &v_down_packed_S_}) visit(*packed);
    for (Region<Accumulator>* rows : {&u_first_S_, &v_first_S_, &v_down_S_, &u_down_S_}) visit(*rows);
    visit(kept_hidden_S_);
    scratch_.regions(visit);
    first_.regions(visit);
    down_.regions(visit);
  }

  // Before and after everything else, with a barrier between.
  void read_factors(Worker worker) const {
    first_.read(routing_, worker);
    down_.read(routing_, worker);
  }
  // Which inputs of some groups are dropped: others read it after a barrier.
  void draw(Range groups) const {
    first_.kept().draw(routing_, groups);
    down_.kept().draw(routing_, groups);
  }
  void write_gradients(Worker worker) const {
    first_.write(routing_, worker);
    down_.write(routing_, worker);
  }

  // For gate and up computed again: u of the first product from its packed inputs, and likewise that of down, from
  // which the caller has dropped some.
  void recompute_first(int worker, Range groups, const Tokens& hidden_TH, const Element* hidden_S) const {
    if (first_.drops()) {
      gather_kept(first_, routing_, hidden_TH, layer_.shape.padded_hidden(), groups, kept_hidden_S_.data());
      hidden_S = kept_hidden_S_.data();
    }
    to_low_rank(first_, routing_, groups, hidden_S, layer_.shape.padded_hidden(), Panels::ranks_of_a,
                scratch_.low_rank(worker), u_first());
  }
  const KeptInputs* kept_of_down() const { return down_.drops() ? &down_.kept() : nullptr; }
  void recompute_down(int worker, Range groups, const Element* activated_S) const {
    to_low_rank(down_, routing_, groups, activated_S, layer_.shape.padded_intermediate(), Panels::ranks_of_a,
                scratch_.low_rank(worker), u_down());
  }
  template <class Inner>
  auto around_first(int worker, const Inner& inner) const {
    return WithLora(first_, u_first(), Panels::outputs_of_b, scratch_.factors(worker), inner);
  }

  // v of down from the packed gradient of the output. Rows are multiplied by their routing weight, because gradients
  // are made of them.
  void begin_down(int worker, Range groups, const Element* grad_out_S, const Accumulator* weight_S) const {
    to_low_rank(down_, routing_, groups, grad_out_S, layer_.shape.padded_hidden(), Panels::ranks_of_b,
                scratch_.low_rank(worker), v_down());
    weigh(groups, v_down_S_.data(), weight_S, v_down_S_.data());
    weigh(groups, saved_u_down_S_ == nullptr ? u_down_S_.data() : saved_u_down_S_, weight_S, u_down_S_.data());
  }
  // Around the epilogue of the product with W_down^T, which adds to `column_gradients`.
  template <class Inner>
  auto around_down(int worker, const Inner& inner) const {
    return WithLora(down_, v_down(), Panels::inputs_of_a, scratch_.factors(worker), inner, true);
  }
  LoraColumnGradients<Layer> column_gradients(int worker) const {
    return {first_, u_first(), down_, v_down(), scratch_.sums(worker)};
  }

  // v of the first product from the packed gradients of gate and up, which carry the routing weight.
  void begin_hidden(int worker, Range groups, const Element* d_first_S) const {
    to_low_rank(first_, routing_, groups, d_first_S, layer_.first_size(), Panels::ranks_of_b, scratch_.low_rank(worker),
                v_first());
  }
  // Around the epilogue of the product with the first weights transposed.
  template <class Inner>
  auto around_hidden(int worker, const Tokens& hidden_TH, const Tokens& grad_out_TH, const Inner& inner) const {
    const LoraHiddenGradients<Layer, Inner> gradients(first_, v_first(), down_, u_down(), routing_, hidden_TH,
                                                      grad_out_TH, scratch_.sums(worker), inner);
    return WithLora(first_, v_first(), Panels::inputs_of_a, scratch_.factors(worker), gradients, true);
  }

 private:
  std::int64_t packed_size(const Product& product) const { return routing_.num_slots() * product.packed_rank(); }
  std::int64_t rows_size(const Product& product) const { return routing_.num_slots() * product.row_rank(); }

  Values u_first() const {
    return {u_first_packed_S_.data(), saved_u_first_S_ == nullptr ? u_first_S_.data() : saved_u_first_S_};
  }
  Values v_first() const { return {v_first_packed_S_.data(), v_first_S_.data()}; }
  Values v_down() const { return {v_down_packed_S_.data(), v_down_S_.data()}; }
  Values u_down() const { return {nullptr, u_down_S_.data()}; }

  // Rows of down's values, times the routing weight of their slot.
  void weigh(Range groups, const Accumulator* rows_S, const Accumulator* weight_S, Accumulator* target_S) const {
    const std::int64_t rank = down_.row_rank();
    for (std::int64_t index = groups.begin; index < groups.end; ++index) {
      const SlotGroup& group = routing_.groups()[static_cast<std::size_t>(index)];
      for (std::int64_t slot = group.first_slot; slot < group.first_slot + group.rows; ++slot) {
        for (std::int64_t i = slot * rank; i < (slot + 1) * rank; ++i) target_S[i] = rows_S[i] * weight_S[slot];
      }
    }
  }

  const Layer& layer_;
  const Routing& routing_;
  Product first_;
  Product down_;
  LoraScratch<Layer> scratch_;
  Region<Element> u_first_packed_S_;
  Region<Accumulator> u_first_S_;
  Region<Element> v_first_packed_S_;
  Region<Accumulator> v_first_S_;
  Region<Element> v_down_packed_S_;
  Region<Accumulator> v_down_S_;
  Region<Accumulator> u_down_S_;
  Region<Element> kept_hidden_S_;
  // The u that forward kept; null where it is computed again.
  Accumulator* saved_u_first_S_ = nullptr;
  const Accumulator* saved_u_down_S_ = nullptr;
};

}  // namespace ktc::inline KTC_UNIT
