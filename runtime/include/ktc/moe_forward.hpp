// out[t] = sum over k of weight[t, k] * down(act(gate x, up x)), for the experts that token t was sent to; each of
// the three products has its bias where the layer has biases.
#pragma once

#include <cstdint>

#include "ktc/moe_kernel.hpp"
#include "ktc/moe_layer.hpp"

namespace ktc {

template <class Layer>
void moe_forward(const Layer& layer, Engine& engine, const ForwardArguments& arguments) {
  using Isa = typename Layer::Isa;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  const auto& shape = layer.shape;
  const Routing routing = layer.route(arguments.top_k_index, arguments.tokens);
  if (arguments.tokens == 0) return;

  const auto num_groups = static_cast<std::int64_t>(routing.groups().size());
  const std::int64_t hidden_size = routing.num_slots() * shape.padded_hidden();
  const std::int64_t activated_size = routing.num_slots() * shape.padded_intermediate();
  const std::int64_t sums_size = TokenSums<Layer>::size(arguments.tokens, shape.padded_hidden());
  const MatrixView hidden_TH(static_cast<const Element*>(arguments.hidden_states), arguments.tokens, shape.hidden());
  const MatrixView out_TH(static_cast<Element*>(arguments.out), arguments.tokens, shape.hidden());
  const auto* weight = static_cast<const Accumulator*>(arguments.top_k_weights);

  engine.exclusively([&](ThreadPool& pool, Workspace& workspace) {
    workspace.reserve(Workspace::bytes<Element>(hidden_size) + Workspace::bytes<Element>(activated_size) +
                      Workspace::bytes<Accumulator>(sums_size) + Workspace::bytes<Accumulator>(routing.num_slots()) +
                      Workspace::bytes<Accumulator>(sums_at_hand<Isa>() * pool.threads()) +
                      Workspace::bytes<Element>(layer.panel_scratch() * pool.threads()));
    auto* hidden_S = workspace.take<Element>(hidden_size);
    auto* activated_S = workspace.take<Element>(activated_size);
    const TokenSums<Layer> sums(workspace.take<Accumulator>(sums_size), shape.padded_hidden());
    auto* weight_S = workspace.take<Accumulator>(routing.num_slots());
    auto* sums_at_hand_W = workspace.take<Accumulator>(sums_at_hand<Isa>() * pool.threads());
    auto* scratch_W = workspace.take<Element>(layer.panel_scratch() * pool.threads());
    for (std::int64_t pair = 0; pair < routing.num_slots(); ++pair) weight_S[routing.slot(pair)] = weight[pair];

    if (arguments.saved != nullptr) {
      prefer_huge_pages(arguments.saved,
                        static_cast<std::size_t>(routing.num_slots() * layer.first_size()) * sizeof(Element));
    }

    pool.run([&](Worker worker) {
      const auto share = [&](std::int64_t size) { return Range::share(size, worker.index, worker.count); };
      Accumulator* at_hand = sums_at_hand_W + worker.index * sums_at_hand<Isa>();
      Element* scratch = scratch_W + worker.index * layer.panel_scratch();
      gather_slots<Isa>(routing, hidden_TH, shape.padded_hidden(), share(num_groups), hidden_S);
      sums.clear(share(arguments.tokens));
      worker.barrier.arrive_and_wait();

      sweep<Isa>(routing, share(layer.format.num_first_panels()), layer.first_panels(arguments.packed, scratch),
                 hidden_S, at_hand,
                 FirstEpilogue(layer, arguments.packed, activated_S, static_cast<Element*>(arguments.saved)));
      worker.barrier.arrive_and_wait();

      sweep<Isa>(routing, share(layer.format.num_down_panels()), layer.down_panels(arguments.packed, scratch),
                 activated_S, at_hand,
                 AddToTokens(layer, routing, sums, weight_S, Layer::kBiased ? arguments.packed : nullptr));
      worker.barrier.arrive_and_wait();
      sums.write(share(arguments.tokens), out_TH);
    });
  });
}

}  // namespace ktc
