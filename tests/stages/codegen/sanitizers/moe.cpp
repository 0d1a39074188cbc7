// Calls of fused-MoE kernels: forward and backward with everything that they can write.
#define KTC_UNIT stress_moe

#include "ktc/interface/moe.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>

#include "calls.hpp"
#include "ktc/huge_pages.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/layout.hpp"
#include "memory.hpp"

namespace stress {
namespace {

using namespace ktc;
using weight_format::Part;

constexpr Part kParts[] = {Part::kGate, Part::kUp, Part::kDown, Part::kGateBias, Part::kUpBias, Part::kDownBias};

struct Case {
  MoeSizes sizes;  // hidden and intermediate become whole numbers of blocks
  std::int64_t tokens;
  std::int64_t experts_used;  // the others get no token
  std::int64_t rank;          // of LoRA on both products, 0 without
  bool infinite = false;      // there is one in the first token
  int most_nodes = 1;         // for which the weights are cut
};

// Experts, hidden, intermediate, top_k; tokens, experts that are used, rank.
constexpr Case kCases[] = {
    {{5, 70, 37, 2}, 29, 5, 5, false, 3},
    {{1, 33, 1, 1}, 1, 1, 0},
    {{1, 1, 33, 1}, 3, 1, 1},
    {{3, 17, 9, 3}, 5, 3, 2},
    {{4, 64, 96, 4}, 2, 4, 9},
    {{3, 160, 224, 2}, 6, 2, 0, true},
    {{3, 160, 224, 2}, 7, 2, 5},
    {{3, 96, 160, 2}, 40, 3, 4, true},
    {{3, 160, 224, 1}, 100, 2, 128},
    {{8, 64, 64, 1}, 130, 1, 0, false, 2},
    {{5, 70, 37, 2}, 0, 5, 3},
};

// The case with whole numbers of blocks. Where these are large, there are fewer experts and tokens.
Case whole(Case which, const Facts& facts) {
  MoeSizes& sizes = which.sizes;
  sizes.hidden = round_up(sizes.hidden, facts.whole_hidden);
  sizes.intermediate = round_up(sizes.intermediate, facts.whole_intermediate);
  if (facts.whole_hidden > 128) {
    sizes.num_experts = std::min<std::int64_t>(sizes.num_experts, 2);
    which.tokens = std::min<std::int64_t>(which.tokens, 40);
    which.rank = std::min<std::int64_t>(which.rank, 9);
  }
  sizes.top_k = std::min(sizes.top_k, sizes.num_experts);
  which.experts_used = std::min(which.experts_used, sizes.num_experts);
  return which;
}

// The packed weights of a layer, cut for some nodes.
class Weights {
 public:
  Weights(const KernelEntry& entry, const Facts& facts, const MoeSizes& sizes)
      : facts_(facts), sizes_(sizes), kernel_(entry.make(sizes)), packed_(storage()) {
    std::mt19937 random(1);
    for (std::int64_t expert = 0; expert < sizes.num_experts; ++expert) {
      for (const Part part : kParts) {
        const bool is_absent = (is_gate(part) && !facts.gated) || (is_bias(part) && !facts.biased);
        if (!is_absent) pack(expert, part, random);
      }
    }
    if (sizes.nodes > 1) go_through_whole_experts();
  }

  const MoeKernel& kernel() const { return *kernel_; }
  const std::byte* packed() const { return packed_.get(); }

 private:
  Bytes storage() const { return aligned(kernel_->packed_bytes(), sizes_.nodes > 1 ? kHugePage : 64); }

  void pack(std::int64_t expert, Part part, std::mt19937& random) {
    const std::int64_t outputs = is_down(part) ? sizes_.hidden : sizes_.intermediate;
    const std::int64_t inputs = sizes_.hidden + sizes_.intermediate - outputs;
    const std::int64_t rows = is_bias(part) ? 1 : outputs, columns = is_bias(part) ? outputs : inputs;
    const StoredBlocks& stored = is_down(part) ? facts_.down : facts_.first;
    const char* type = is_bias(part) ? nullptr : kernel_->blocks(part);
    if (type != nullptr) {
      const auto blocks = random_blocks(random, stored, rows * columns);
      const std::int64_t row_bytes = columns / stored.weights * stored.bytes;
      kernel_->pack_blocks({packed_.get(), expert, part, rows, row_bytes}, blocks.data(), type);
    } else {
      const auto values = random_values<bf16>(random, rows * columns, 0.1F);
      pack_values(expert, part, values, rows, columns);
      if (expert == 0 && !is_bias(part) && kernel_->coding(part).name != nullptr) {
        pack_codes(expert, part, random, rows, columns);
      }
    }
    std::vector<double> back(static_cast<std::size_t>(rows * columns));  // room for any element
    kernel_->unpack({packed_.get(), expert, part, rows, columns}, back.data());
  }

  // From each type of source in turn.
  void pack_values(std::int64_t expert, Part part, const std::vector<bf16>& values, std::int64_t rows,
                   std::int64_t columns) {
    const std::vector<float> singles(values.begin(), values.end());
    const std::vector<double> doubles(values.begin(), values.end());
    const auto from = [&](const void* source, SourceType type) {
      kernel_->pack({packed_.get(), expert, part, rows, columns}, source, type);
    };
    if (expert % 3 == 0) from(values.data(), SourceType::kBf16);
    if (expert % 3 == 1) from(singles.data(), SourceType::kFp32);
    if (expert % 3 == 2) from(doubles.data(), SourceType::kFp64);
  }

  void pack_codes(std::int64_t expert, Part part, std::mt19937& random, std::int64_t rows, std::int64_t columns) {
    const std::int64_t group = kernel_->coding(part).group, groups = group == 0 ? 1 : (columns + group - 1) / group;
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * columns));
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random() % 8);
    const std::vector<float> scales(static_cast<std::size_t>(rows * groups), 0.03125F);
    kernel_->pack_codes({packed_.get(), expert, part, rows, columns}, codes.data(), scales.data(), groups);
  }

  // The shards again, from experts as a kernel for one node has them.
  void go_through_whole_experts() {
    Bytes again = storage();
    const Bytes whole = aligned(kernel_->expert_bytes());
    kernel_->bind(again.get(), std::vector<int>(static_cast<std::size_t>(sizes_.nodes), 0));
    for (std::int64_t expert = 0; expert < sizes_.num_experts; ++expert) {
      kernel_->join(packed_.get(), expert, whole.get());
      kernel_->shard(whole.get(), expert, again.get());
    }
    packed_ = std::move(again);
  }

  Facts facts_;
  MoeSizes sizes_;
  std::unique_ptr<MoeKernel> kernel_;
  Bytes packed_;
};

// A layer and one batch. Nothing of it changes after it was made.
template <class Element>
class Layer {
  using Accumulator = AccumulatorOf<Element>;

  struct Factors {
    std::vector<Accumulator> a, b;
  };

 public:
  Layer(const KernelEntry& entry, const Facts& facts, const Case& which)
      : facts_(facts), which_(which), sizes_(which.sizes) {
    for (int nodes = 1; nodes <= which.most_nodes; ++nodes) {
      MoeSizes cut = sizes_;
      cut.nodes = nodes;
      weights_.push_back(std::make_unique<Weights>(entry, facts, cut));
    }
    std::mt19937 random(2);
    hidden_ = random_values<Element>(random, which.tokens * sizes_.hidden, 1);
    if (which.infinite) hidden_[3] = Element(std::numeric_limits<float>::infinity());
    grad_ = random_values<Element>(random, which.tokens * sizes_.hidden, 1);
    routing_weights_ = random_values<Accumulator>(random, which.tokens * sizes_.top_k, 1);
    const std::int64_t used = which.experts_used;
    for (std::int64_t token = 0; token < which.tokens; ++token) {
      const auto first = static_cast<std::int64_t>(random() % static_cast<unsigned>(used));
      for (std::int64_t k = 0; k < sizes_.top_k; ++k) index_.push_back((first + k) % used);
    }
    first_ = factors(random, sizes_.hidden, sizes_.intermediate * parts());
    down_ = factors(random, sizes_.intermediate, sizes_.hidden);
  }

  // Activations are kept in even ways and computed again in odd ones, with weights cut for one node, two, ...
  int ways() const { return 2 * which_.most_nodes; }

  Written run(Engine& engine, int way) const {
    Outputs outputs(*this);
    const Weights& weights = *weights_[static_cast<std::size_t>(way / 2)];
    const MoeKernel& kernel = weights.kernel();
    const std::size_t saved_bytes = kernel.saved_bytes(which_.tokens, which_.rank, which_.rank);
    const Bytes saved = way % 2 == 1 ? nullptr : aligned(saved_bytes);
    kernel.forward(engine, forward_arguments(weights, outputs, index_, saved.get()));
    kernel.backward(engine, backward_arguments(weights, outputs, index_, saved.get()));
    return outputs.written();
  }

  // Whether numbers of experts that the layer does not have are refused before anything is written.
  bool refuses(Engine& engine) const {
    if (index_.empty()) return true;
    using Limits = std::numeric_limits<std::int64_t>;
    for (const std::int64_t hostile : {std::int64_t{-1}, sizes_.num_experts, Limits::min(), Limits::max()}) {
      for (const std::size_t place : {std::size_t{0}, index_.size() - 1}) {
        std::vector<std::int64_t> index = index_;
        index[place] = hostile;
        const Weights& weights = *weights_.front();
        Outputs outputs(*this);
        const Written before = outputs.written();
        const auto is_refused = [](const auto& call) {
          try {
            call();
          } catch (const std::out_of_range&) {
            return true;
          }
          return false;
        };
        const auto forward = forward_arguments(weights, outputs, index, nullptr);
        const auto backward = backward_arguments(weights, outputs, index, nullptr);
        if (!is_refused([&] { weights.kernel().forward(engine, forward); })) return false;
        if (!is_refused([&] { weights.kernel().backward(engine, backward); })) return false;
        if (outputs.written() != before) return false;
      }
    }
    return true;
  }

 private:
  // Everything that forward and backward write.
  struct Outputs {
    explicit Outputs(const Layer& layer)
        : intermediate(layer.sizes_.intermediate),
          out(layer.hidden_.size()),
          grad_hidden(layer.hidden_.size()),
          grad_weight(layer.routing_weights_.size()),
          grad_first{zeros(layer.first_.a), zeros(layer.first_.b)},
          grad_down{zeros(layer.down_.a), zeros(layer.down_.b)},
          d_first(layer.index_.size() * static_cast<std::size_t>(layer.parts() * padded())),
          activated(layer.index_.size() * static_cast<std::size_t>(padded())) {}

    static std::vector<Accumulator> zeros(const std::vector<Accumulator>& like) {
      return std::vector<Accumulator>(like.size());
    }
    std::int64_t padded() const { return round_up(intermediate, kPanelWidth); }

    Written written() const {
      Written bytes;
      append(bytes, out), append(bytes, grad_hidden), append(bytes, grad_weight);
      for (const Factors* each : {&grad_first, &grad_down}) append(bytes, each->a), append(bytes, each->b);
      for (const auto* rows : {&d_first, &activated}) {  // values past the intermediate size are not defined
        for (std::size_t begin = 0; begin < rows->size(); begin += static_cast<std::size_t>(padded())) {
          const auto at = rows->begin() + static_cast<std::ptrdiff_t>(begin);
          append(bytes, std::vector<Element>(at, at + static_cast<std::ptrdiff_t>(intermediate)));
        }
      }
      return bytes;
    }

    std::int64_t intermediate;
    std::vector<Element> out, grad_hidden;
    std::vector<Accumulator> grad_weight;
    Factors grad_first, grad_down;
    std::vector<Element> d_first, activated;
  };

  std::int64_t parts() const { return facts_.gated ? 2 : 1; }

  ForwardArguments forward_arguments(const Weights& weights, Outputs& outputs, const std::vector<std::int64_t>& index,
                                     void* saved) const {
    return {.packed = weights.packed(),
            .hidden_states = hidden_.data(),
            .top_k_index = index.data(),
            .top_k_weights = routing_weights_.data(),
            .out = outputs.out.data(),
            .saved = saved,
            .tokens = which_.tokens,
            .lora_first = lora(first_, outputs.grad_first, true, sizes_.intermediate * parts()),
            .lora_down = lora(down_, outputs.grad_down, false, sizes_.hidden)};
  }

  BackwardArguments backward_arguments(const Weights& weights, Outputs& outputs, const std::vector<std::int64_t>& index,
                                       const void* saved) const {
    return {.packed = weights.packed(),
            .top_k_index = index.data(),
            .top_k_weights = routing_weights_.data(),
            .saved = saved,
            .hidden_states = hidden_.data(),
            .grad_out = grad_.data(),
            .grad_hidden_states = outputs.grad_hidden.data(),
            .grad_top_k_weights = outputs.grad_weight.data(),
            .tokens = which_.tokens,
            .lora_first = lora(first_, outputs.grad_first, true, sizes_.intermediate * parts()),
            .lora_down = lora(down_, outputs.grad_down, false, sizes_.hidden),
            .rows = {.d_first = outputs.d_first.data(), .activated = outputs.activated.data()}};
  }

  Factors factors(std::mt19937& random, std::int64_t inputs, std::int64_t outputs) const {
    const std::int64_t ranks = sizes_.num_experts * which_.rank;
    return {random_values<Accumulator>(random, ranks * inputs, 0.1F),
            random_values<Accumulator>(random, ranks * outputs, 0.1F)};
  }

  // B is (E, rank, outputs) in memory where the rank is even, and so is its gradient.
  LoraFactors lora(const Factors& factors, Factors& gradients, bool interleaved, std::int64_t outputs) const {
    const std::int64_t rank = which_.rank;
    if (rank == 0) return {};
    const FactorStrides turned{.expert = outputs * rank, .output = 1, .rank = outputs};
    const FactorStrides strides = rank % 2 == 0 ? turned : FactorStrides{};
    return {.a = factors.a.data(),
            .b = factors.b.data(),
            .grad_a = gradients.a.data(),
            .grad_b = gradients.b.data(),
            .rank = rank,
            .scale = 0.5,
            .interleaved = interleaved,
            .dropped = rank % 2 == 1 ? 20000 : 0,
            .seed = 7,
            .b_strides = strides,
            .grad_b_strides = strides};
  }

  Facts facts_;
  Case which_;
  MoeSizes sizes_;
  std::vector<std::unique_ptr<Weights>> weights_;  // cut for one node, two, ...
  std::vector<Element> hidden_, grad_;
  std::vector<std::int64_t> index_;
  std::vector<Accumulator> routing_weights_;
  Factors first_, down_;
};

template <class Element>
Call call_of(const KernelEntry& entry, const Facts& facts, const Case& which) {
  const auto layer = std::make_shared<Layer<Element>>(entry, facts, which);
  const MoeSizes& sizes = which.sizes;
  return {.name = "H" + std::to_string(sizes.hidden) + " I" + std::to_string(sizes.intermediate) + " T" +
                  std::to_string(which.tokens) + " r" + std::to_string(which.rank),
          .ways = layer->ways(),
          .run = [layer](Engine& engine, int way) { return layer->run(engine, way); },
          .refuses = [layer](Engine& engine) { return layer->refuses(engine); }};
}

}  // namespace

std::vector<Call> calls_of(const KernelEntry& entry, const Facts& facts) {
  std::vector<Call> calls;
  for (const Case& which : kCases) {
    calls.push_back(with_element(facts.element, [&]<class Element>(Element) -> Call {
      if constexpr (std::is_same_v<Element, weight_format::fp16>) {
        throw std::invalid_argument("no experts compute in fp16");
      } else {
        return call_of<Element>(entry, facts, whole(which, facts));
      }
    }));
  }
  return calls;
}

}  // namespace stress
