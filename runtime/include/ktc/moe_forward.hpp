// out[t] = sum over k of weight[t, k] * down(act(gate x, up x)), for the experts of token t. Each of the three products
// has its bias if the layer has biases, and LoRA if the call has factors for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "ktc/forward_products.hpp"
#include "ktc/huge_pages.hpp"
#include "ktc/integer_products.hpp"
#include "ktc/interface/moe.hpp"
#include "ktc/lora_epilogue.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <class Layer>
using ForwardProducts = std::conditional_t<Layer::kIntegerProducts, IntegerProducts<Layer>, ElementProducts<Layer>>;

// The results of the activation that another engine has count as zeros: what converts rows reads them, and products of
// more rows multiply them.
template <class Element>
void clear_skipped(const Routing& routing, Range groups, std::int64_t row_size, Element* activated_S) {
  if (routing.first_unit() == 0) return;
  for (const ActiveExpert& active : routing.active_experts()) {
    if (active.first_unit == 0) continue;
    const auto end = std::min(groups.end, static_cast<std::int64_t>(active.last_group));
    for (auto index = std::max(groups.begin, static_cast<std::int64_t>(active.first_group)); index < end; ++index) {
      const SlotGroup& group = routing.groups()[static_cast<std::size_t>(index)];
      std::fill_n(activated_S + group.first_slot * row_size, group.rows * active.first_unit, Element{});
    }
  }
}

template <class Layer>
void moe_forward(const Layer& layer, Engine& engine, const ForwardArguments& arguments) {
  using Isa = typename Layer::Isa;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Panels = LoraPanels<Layer>;
  using Products = ForwardProducts<Layer>;
  using Epilogue = FirstEpilogue<Layer, typename Products::ActivatedRows>;
  const auto& shape = layer.shape;
  const Routing routing = layer.route(arguments.top_k_index, arguments.tokens, arguments.partial);
  layer.check_first_unit(routing.first_unit());
  if (routing.first_unit() > 0 &&
      (arguments.saved != nullptr || arguments.lora_first.rank > 0 || arguments.lora_down.rank > 0)) {
    throw std::invalid_argument("an expert is computed in part only without LoRA, and without a backward");
  }
  const std::int64_t slots = routing.num_slots();
  if (slots == 0) {
    auto* out = static_cast<Element*>(arguments.out);
    std::fill(out, out + arguments.tokens * shape.hidden(), Element{});
    return;
  }

  const auto num_groups = static_cast<std::int64_t>(routing.groups().size());
  const MatrixView hidden_TH(static_cast<const Element*>(arguments.hidden_states), arguments.tokens, shape.hidden());
  const MatrixView out_TH(static_cast<Element*>(arguments.out), arguments.tokens, shape.hidden());
  const auto* weight = static_cast<const Accumulator*>(arguments.top_k_weights);
  auto lora_first = LoraProduct<Layer>::of_first(layer, arguments.lora_first, slots);
  auto lora_down = LoraProduct<Layer>::of_down(layer, arguments.lora_down, slots);
  // Products that pack their own rows leave the rows of elements to LoRA, if the call has any. Where inputs are
  // dropped, LoRA has rows of its own: of the first product, then of down.
  const auto reads_rows = [](const auto& product) { return product.active() && !product.drops(); };
  const std::int64_t hidden_size = Products::kPacksRows && !reads_rows(lora_first) ? 0 : slots * shape.padded_hidden();
  const std::int64_t repacked_size =
      Products::kPacksRows && reads_rows(lora_down) ? slots * shape.padded_intermediate() : 0;
  const std::int64_t kept_size = slots * std::max(lora_first.drops() ? shape.padded_hidden() : 0,
                                                  lora_down.drops() ? shape.padded_intermediate() : 0);

  exclusively(engine, [&](const Team& team, Workspace& workspace) {
    LoraScratch<Layer> lora_scratch(layer, lora_first, lora_down, team.threads());
    Products products(layer, routing, arguments.packed, team.threads());
    Region<Element> hidden(hidden_size), activated(slots * shape.padded_intermediate()), repacked(repacked_size),
        kept(kept_size);
    Region<Accumulator> token_sums(TokenSums<Layer>::size(arguments.tokens, shape.padded_hidden())), weights(slots);
    Region<Accumulator> sums_at_hand_W(sums_at_hand<Isa>() * team.threads());
    Region<Element> scratch_W(layer.panel_scratch() * team.threads());
    Region<Element> low_rank_first(slots * lora_first.packed_rank()), low_rank_down(slots * lora_down.packed_rank());
    workspace.lay_out(hidden, activated, repacked, products, token_sums, weights, sums_at_hand_W, scratch_W,
                      low_rank_first, low_rank_down, lora_scratch, lora_first, lora_down, kept);
    Element* hidden_S = hidden.data_or_null();
    Element* activated_S = activated.data();
    Element* repacked_S = repacked.data_or_null();
    Element* kept_S = kept.data_or_null();
    const KeptActivated<Element> kept_activated{lora_down.drops() ? kept_S : nullptr, &lora_down.kept()};
    Accumulator* weight_S = weights.data();
    const TokenSums<Layer> sums(token_sums.data(), shape.padded_hidden());
    LowRank<Layer> first_values{low_rank_first.data(), nullptr};
    LowRank<Layer> down_values{low_rank_down.data(), nullptr};
    for (std::int64_t pair = 0; pair < routing.num_pairs(); ++pair) {
      if (const std::int64_t slot = routing.slot(pair); slot != kComputedElsewhere) weight_S[slot] = weight[pair];
    }

    Element* saved_S = nullptr;
    if (arguments.saved != nullptr) {
      prefer_huge_pages(arguments.saved, SavedSlots<Layer>::bytes(layer, slots, lora_first.rank(), lora_down.rank()));
      const SavedSlots<Layer> saved(layer, arguments.saved, slots, lora_first.rank());
      saved_S = saved.gate_up_S;
      first_values.rows_S = saved.first_rows_S;
      down_values.rows_S = saved.down_rows_S;
    }

    const auto first_queues = products.first_queues();
    const auto down_queues = products.down_queues();
    team.run([&](Worker worker) {
      const auto share = [&](std::int64_t size) { return Range::share(size, worker.index, worker.count); };
      const SweepScratch<Layer> scratch{sums_at_hand_W.data() + worker.index * sums_at_hand<Isa>(),
                                        scratch_W.data() + worker.index * layer.panel_scratch()};
      products.read_hidden(worker, share(num_groups), hidden_TH, hidden_S);
      clear_skipped(routing, share(num_groups), shape.padded_intermediate(), activated_S);
      lora_first.read(routing, worker);
      lora_down.read(routing, worker);
      sums.clear(share(arguments.tokens));
      lora_first.kept().draw(routing, share(num_groups));
      lora_down.kept().draw(routing, share(num_groups));
      if (lora_first.drops())
        gather_kept(lora_first, routing, hidden_TH, shape.padded_hidden(), share(num_groups), kept_S);
      if (lora_first.active()) {
        to_low_rank(lora_first, routing, share(num_groups), lora_first.drops() ? kept_S : hidden_S,
                    shape.padded_hidden(), Panels::ranks_of_a, lora_scratch.low_rank(worker.index), first_values);
      }
      products.first(worker.index, first_queues.of(worker.index), hidden_S, scratch,
                     WithLora(lora_first, first_values, Panels::outputs_of_b, lora_scratch.factors(worker.index),
                              Epilogue(layer, arguments.packed, activated_S, saved_S, kept_activated)),
                     [&](Upcoming panels) { worker.barrier.arrive_and_wait(panels); });
      // A worker that is done with gate and up takes panels of down, and fetches them while it waits for the others.
      const auto complete_activated = [&](Upcoming panels) {
        worker.barrier.arrive_and_wait(panels);
        products.read_activated(worker, share(num_groups), activated_S, repacked_S);
        if (lora_down.active()) {
          const Element* rows_S = lora_down.drops() ? kept_S : Products::kPacksRows ? repacked_S : activated_S;
          to_low_rank(lora_down, routing, share(num_groups), rows_S, shape.padded_intermediate(), Panels::ranks_of_a,
                      lora_scratch.low_rank(worker.index), down_values);
        }
        if (products.reads_activated() || lora_down.active()) worker.barrier.arrive_and_wait();
      };
      products.down(worker.index, down_queues.of(worker.index), activated_S, scratch,
                    WithLora(lora_down, down_values, Panels::outputs_of_b, lora_scratch.factors(worker.index),
                             AddToTokens(layer, routing, sums, weight_S, Layer::kBiased ? arguments.packed : nullptr)),
                    complete_activated);
      worker.barrier.arrive_and_wait();
      sums.write(share(arguments.tokens), out_TH);
    });
  });
}

}  // namespace ktc::inline KTC_UNIT
