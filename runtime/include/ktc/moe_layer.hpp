// One specialisation of a layer, and the steps that forward and backward both take.
//
// Suffixes: T tokens, S slots (token, k), H hidden, I intermediate; Hp, Ip padded to whole panels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ktc/concepts.hpp"
#include "ktc/decoded_panels.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/lora_dropout.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet IsaType, class FormatType, class ActivationType, bool kHasBiases, class ShapeType>
struct MoeLayer {
  using Isa = IsaType;
  using Format = FormatType;
  using Activation = ActivationType;
  using Element = typename Isa::Element;
  using Accumulator = typename Isa::Accumulator;
  using Lanes = typename Isa::Lanes;
  using FirstSources = PanelSources<Isa, typename Format::FirstPanel>;
  using DownSources = PanelSources<Isa, typename Format::DownPanel>;
  // Forward multiplies codes with rows quantised to integers. Backward and LoRA compute in elements.
  static constexpr bool kIntegerProducts = Format::FirstPanel::kIntegerProducts;
  static_assert(kIntegerProducts == Format::DownPanel::kIntegerProducts, "both products or none");
  static constexpr bool kBiased = kHasBiases;
  static constexpr bool kGated = Activation::kGated;
  // Vectors of a first panel for one half panel of intermediate columns: gate and up, or up alone.
  static constexpr std::int64_t kFirstParts = kGated ? 2 : 1;
  static constexpr std::int64_t kHalvesPerFirstPanel = 2 / kFirstParts;

  explicit MoeLayer(const MoeSizes& sizes)
      : shape(sizes), nodes(sizes.nodes), format(sizes, {.gate = kGated, .biases = kBiased}) {}

  ShapeType shape;
  int nodes;
  Format format;

  // The products of forward, whose panels a node's workers share. Two panels of gate and up write the halves of one
  // cache line of activations.
  PanelSet first_set() const {
    return {.num_panels = format.num_first_panels(),
            .contraction = format.first_contraction(),
            .turns = PanelTurns::kNone,
            .together = kFirstParts,
            .units = kPanelWidth / kFirstParts};
  }
  PanelSet down_set() const { return {format.num_down_panels(), format.down_contraction(), PanelTurns::kByExpert}; }

  Routing route(const std::int64_t* top_k_index, std::int64_t tokens, bool partial = false) const {
    return Routing(top_k_index, tokens, shape.top_k(), shape.num_experts(),
                   {.most = Isa::kMaxRows, .least = Isa::kBlocked ? Isa::kStreamRows + 1 : 0}, partial);
  }
  // Throws std::invalid_argument for a unit from which an expert cannot be computed: panels of gate and up, and the
  // scales of down, are read whole.
  void check_first_unit(std::int64_t unit) const {
    if (unit == 0) return;
    const std::int64_t step = kPanelWidth * span_blocks();
    if (!kIntegerProducts && unit % step == 0 && unit > 0 && unit < shape.intermediate()) return;
    throw std::invalid_argument("this kernel does not compute experts from intermediate unit " + decimal(unit) + " on");
  }
  // Outputs of the first product, padded: of gate and up, or of up alone.
  std::int64_t first_size() const { return kFirstParts * shape.padded_intermediate(); }
  // `scratch` is `panel_scratch()` elements of one worker.
  auto first_panels(const std::byte* packed, Element* scratch) const {
    return typename FirstSources::Stored(format.first_places(packed), format.first_contraction(), scratch);
  }
  auto down_panels(const std::byte* packed, Element* scratch) const {
    return typename DownSources::Stored(format.down_places(packed), format.down_contraction(), scratch);
  }
  std::int64_t panel_scratch() const {
    return std::max(FirstSources::Stored::scratch_size(format.first_contraction()),
                    DownSources::Stored::scratch_size(format.down_contraction()));
  }

  // The same for backward; `scratch` is `transposed_scratch()` elements.
  auto transposed_first_panels(const std::byte* packed, Element* scratch) const {
    return typename FirstSources::Transposed(first_panels(packed, nullptr), format.num_first_panels(), scratch);
  }
  auto transposed_down_panels(const std::byte* packed, Element* scratch) const {
    return typename DownSources::Transposed(down_panels(packed, nullptr), format.num_down_panels(), scratch);
  }
  std::int64_t transposed_scratch() const {
    return std::max(FirstSources::Transposed::scratch_size(format.num_first_panels()),
                    DownSources::Transposed::scratch_size(format.num_down_panels()));
  }

  // Blocks of 32 weights of an output of down that share scales.
  static constexpr std::int64_t span_blocks() {
    using Panel = typename Format::DownPanel;
    if constexpr (requires { Panel::kSpanBlocks; }) {
      return Panel::kSpanBlocks;
    } else if constexpr (requires { Panel::kGroupBlocks; }) {
      return Panel::kGroupBlocks;
    } else {
      return 1;
    }
  }

  // Lanes of the 16-wide half panel that are not padding.
  std::int64_t valid_lanes(std::int64_t half_panel) const {
    return std::min(kHalfPanel, shape.intermediate() - half_panel * kHalfPanel);
  }

  // A padded lane is x * 0, which is NaN where x is infinite; it must not reach the next product.
  void clear_padding(Accumulator* lanes, std::int64_t half_panel) const {
    const std::int64_t valid = std::max<std::int64_t>(0, valid_lanes(half_panel));
    std::fill(lanes + valid, lanes + kHalfPanel, Accumulator{});
  }

  // The values that forward keeps of a slot: gate if the expert has one, then up, Ip elements each, as the activation
  // reads them.
  template <class SavedElement>
  SavedElement* saved(SavedElement* saved_S, std::int64_t slot) const {
    return saved_S + slot * first_size();
  }
  void prefetch_saved(const Element* saved_S, const SlotGroup& group, std::int64_t column, std::int64_t size) const {
    for (int row = 0; row < group.rows; ++row) {
      const Element* kept = saved(saved_S, group.first_slot + row) + column;
      for (std::int64_t part = 0; part < kFirstParts; ++part) {
        prefetch_row(kept + part * shape.padded_intermediate(), size);
      }
    }
  }
};

// Writes 16 elements of each row of a group to their places in a packed group of `contraction` elements per slot.
template <class Layer>
class PackedRows {
 public:
  using Element = typename Layer::Element;

  PackedRows(Element* packed, std::int64_t contraction) : packed_(packed), contraction_(contraction) {}

  void write(const SlotGroup& group, std::int64_t first_k, const Element (*lanes)[kHalfPanel]) const {
    const Element* rows[Layer::Isa::kMaxRows];
    for (int row = 0; row < group.rows; ++row) rows[row] = lanes[row];
    with_row_depth<typename Layer::Isa>(group.rows, [&]<int kRowDepth>(std::integral_constant<int, kRowDepth>) {
      interleave<kRowDepth>(rows, group.rows, first_k, first_k + kHalfPanel, packed_ + group.first_slot * contraction_);
    });
  }

 private:
  Element* packed_;
  std::int64_t contraction_;
};

// Writes the same to the slots' rows of `row_size` elements.
template <class Layer>
class PlainRows {
 public:
  using Element = typename Layer::Element;

  PlainRows(Element* rows, std::int64_t row_size) : rows_(rows), row_size_(row_size) {}

  void write(const SlotGroup& group, std::int64_t first_k, const Element (*lanes)[kHalfPanel]) const {
    for (int row = 0; row < group.rows; ++row) {
      std::memcpy(rows_ + (group.first_slot + row) * row_size_ + first_k, lanes[row], sizeof(lanes[row]));
    }
  }

 private:
  Element* rows_;
  std::int64_t row_size_;
};

// Packed rows of the activation's results that down's A reads, without what is dropped. Null: it reads those of down.
template <class Element>
struct KeptActivated {
  Element* packed_S = nullptr;
  const KeptInputs* inputs = nullptr;
};

// After a panel of the first product: the activation, in the rows that the down product reads. Every target may be
// null.
template <class Layer, class ActivatedRows = PackedRows<Layer>>
class FirstEpilogue {
 public:
  using Element = typename Layer::Element;
  using Lanes = typename Layer::Lanes;
  using Accumulator = typename Layer::Accumulator;

  FirstEpilogue(const Layer& layer, const std::byte* packed, Element* activated_S, Element* saved_S,
                KeptActivated<Element> kept = {})
      : layer_(layer), packed_(packed), activated_S_(activated_S), saved_S_(saved_S), kept_(kept) {}

  void begin(PanelPart) const {}
  void end(PanelPart) const {}
  void prefetch(const SlotGroup& group, PanelPart part) const {
    constexpr std::int64_t kColumns = Layer::kHalvesPerFirstPanel * kHalfPanel;
    if (saved_S_ != nullptr) layer_.prefetch_saved(saved_S_, group, part.panel * kColumns, kColumns);
  }

  void operator()(const SlotGroup& group, PanelPart part, Accumulator* tile) const {
    const Accumulator* bias = nullptr;
    if constexpr (Layer::kBiased) bias = layer_.format.first_bias(packed_, part.expert) + part.panel * kPanelWidth;
    for (std::int64_t half = 0; half < Layer::kHalvesPerFirstPanel; ++half) {
      half_panel(group, part.panel * Layer::kHalvesPerFirstPanel + half, tile + half * kHalfPanel,
                 Layer::kBiased ? bias + half * kHalfPanel : nullptr);
    }
  }

 private:
  void half_panel(const SlotGroup& group, std::int64_t half, Accumulator* tile, const Accumulator* bias) const {
    const std::int64_t padded = layer_.shape.padded_intermediate();
    const bool has_padding = layer_.valid_lanes(half) < kHalfPanel;
    alignas(64) Element activated[Layer::Isa::kMaxRows][kHalfPanel];
    for (int row = 0; row < group.rows; ++row) {
      const auto product = [&](std::int64_t part) {
        Accumulator* sums = tile + row * kPanelWidth + part * kHalfPanel;
        if (has_padding) layer_.clear_padding(sums, half);
        if constexpr (!Layer::kBiased) return Lanes::load(sums);
        return Lanes::load(sums) + Lanes::load(bias + part * kHalfPanel);
      };
      const auto save = [&](const Lanes& lanes, std::int64_t part) {
        if (saved_S_ == nullptr) return;
        lanes.to_elements(layer_.saved(saved_S_, group.first_slot + row) + part * padded + half * kHalfPanel);
      };
      if constexpr (Layer::kGated) {
        const Lanes gate = product(0);
        const Lanes up = product(1);
        save(Layer::Activation::kept_gate(gate), 0);
        save(Layer::Activation::kept_up(up), 1);
        Layer::Activation::value(gate, up).to_elements(activated[row]);
      } else {
        const Lanes up = product(0);
        save(up, 0);
        Layer::Activation::value(up).to_elements(activated[row]);
      }
    }
    if (activated_S_ != nullptr) {
      ActivatedRows(activated_S_, padded).write(group, half * kHalfPanel, activated);
    }
    if (kept_.packed_S != nullptr) {
      for (int row = 0; row < group.rows; ++row) {
        keep_only(kept_.inputs->half(group.first_slot + row, half), activated[row]);
      }
      PackedRows<Layer>(kept_.packed_S, padded).write(group, half * kHalfPanel, activated);
    }
  }

  const Layer& layer_;
  const std::byte* packed_;
  Element* activated_S_;
  Element* saved_S_;
  KeptActivated<Element> kept_;
};

// Sums over the experts of a token, kept in accumulators of (T, Hp) until the last one was added.
template <class Layer>
class TokenSums {
 public:
  using Element = typename Layer::Element;
  using Lanes = typename Layer::Lanes;
  using Accumulator = typename Layer::Accumulator;

  TokenSums(Accumulator* sums, std::int64_t padded_hidden) : sums_(sums), stride_(stride(padded_hidden)) {}

  static std::int64_t size(std::int64_t tokens, std::int64_t padded_hidden) { return tokens * stride(padded_hidden); }

  void clear(Range tokens) const {
    std::fill(sums_ + tokens.begin * stride_, sums_ + tokens.end * stride_, Accumulator{});
  }

  void prefetch(std::int64_t token, std::int64_t panel) const { prefetch_row(at(token, panel), kPanelWidth); }

  void add(std::int64_t token, std::int64_t panel, const Accumulator* lanes, Accumulator weight) const {
    Accumulator* target = at(token, panel);
    for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
      const Lanes sum = Lanes::load(target + half);
      fused_multiply_add(Lanes::load(lanes + half), Lanes(weight), sum).store(target + half);
    }
  }

  void write(Range tokens, const MatrixView<Element>& out) const {
    const std::int64_t whole = out.columns / kHalfPanel * kHalfPanel;
    for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
      const Accumulator* sum = sums_ + token * stride_;
      Element* target = out.row(token);
      for (std::int64_t column = 0; column < whole; column += kHalfPanel) {
        Lanes::load(sum + column).to_elements(target + column);
      }
      for (std::int64_t column = whole; column < out.columns; ++column) target[column] = Element(sum[column]);
    }
  }

 private:
  // One panel more than needed: rows a power of two apart would share one set of L1 and wait for each other's stores.
  static std::int64_t stride(std::int64_t padded_hidden) { return padded_hidden + kPanelWidth; }

  Accumulator* at(std::int64_t token, std::int64_t panel) const {
    return sums_ + token * stride_ + panel * kPanelWidth;
  }

  Accumulator* sums_;
  std::int64_t stride_;
};

// After the last product of forward or backward: add each slot to its token. Forward's carry the routing weight
// (`weight_S` is null in backward), and before it the bias of down where there is one (`packed` is null without),
// unless the expert is computed in part: then another engine adds it.
template <class Layer>
class AddToTokens {
 public:
  using Lanes = typename Layer::Lanes;
  using Accumulator = typename Layer::Accumulator;

  AddToTokens(const Layer& layer, const Routing& routing, const TokenSums<Layer>& sums, const Accumulator* weight_S,
              const std::byte* packed)
      : layer_(layer), routing_(routing), sums_(sums), weight_S_(weight_S), packed_(packed) {}

  void begin(PanelPart) const {}
  void end(PanelPart) const {}
  void prefetch(const SlotGroup& group, PanelPart part) const {
    for (int row = 0; row < group.rows; ++row) sums_.prefetch(routing_.token(group.first_slot + row), part.panel);
  }

  void operator()(const SlotGroup& group, PanelPart part, Accumulator* tile) const {
    if (packed_ != nullptr && !routing_.is_divided(part.expert)) add_bias(group, part, tile);
    for (int row = 0; row < group.rows; ++row) {
      const std::int64_t slot = group.first_slot + row;
      const Accumulator weight = weight_S_ == nullptr ? Accumulator{1} : weight_S_[slot];
      sums_.add(routing_.token(slot), part.panel, tile + row * kPanelWidth, weight);
    }
  }

 private:
  void add_bias(const SlotGroup& group, PanelPart part, Accumulator* tile) const {
    const Accumulator* bias = layer_.format.down_bias(packed_, part.expert) + part.panel * kPanelWidth;
    for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
      const Lanes lanes = Lanes::load(bias + half);
      for (int row = 0; row < group.rows; ++row) {
        Accumulator* sums = tile + row * kPanelWidth + half;
        (Lanes::load(sums) + lanes).store(sums);
      }
    }
  }

  const Layer& layer_;
  const Routing& routing_;
  const TokenSums<Layer>& sums_;
  const Accumulator* weight_S_;
  const std::byte* packed_;
};

}  // namespace ktc::inline KTC_UNIT
