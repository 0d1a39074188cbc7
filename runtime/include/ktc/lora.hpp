// LoRA on a product of the experts: y = (W + s B A) x, of which only u = s A x is computed, `rank` values per slot.
//
// Master weights are accumulators (fp32), rounded to elements where they are multiplied. With d the gradient of the
// output, backward computes v = s B^T d, dx += A^T v, and, summed over the slots of an expert, dA = v x^T and dB = d
// u^T. Low-rank values are stored twice: packed as the micro-kernel reads them, and as plain rows for the gradients.
// Where inputs are dropped, A reads m x and gives m A^T v, with m from `lora_dropout.hpp`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ktc/interface/moe.hpp"
#include "ktc/lora_dropout.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/routing.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/thread_pool.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/panel.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// Rows of the plain low-rank values and of gradients' tiles are this much or a multiple: they live in registers.
inline constexpr std::int64_t kRankUnit = 8;
inline constexpr std::int64_t kMaxRank = 128;
// Packed values are contracted over: tiles take 32 neighbours at once, other instruction sets 16.
template <class Isa>
inline constexpr std::int64_t kPackedRankUnit = Isa::kBlocked ? kPanelWidth : kHalfPanel;

// Outputs of a product, half a panel at a time, as rows of B.
struct OutputRows {
  std::int64_t first;
  std::int64_t stride;
  std::int64_t count;
};

// One product's factors for all experts: A (E, rank, inputs) and B (E, outputs, rank).
template <class Layer>
class LoraProduct {
 public:
  using Accumulator = typename Layer::Accumulator;

  static LoraProduct of_first(const Layer& layer, const LoraFactors& factors, std::int64_t slots) {
    const std::int64_t size = layer.shape.intermediate();
    const bool interleaved = Layer::kGated && factors.interleaved;
    return LoraProduct(factors, layer.shape.num_experts(), layer.shape.hidden(), size, Layer::kFirstParts,
                       interleaved ? 1 : size, interleaved ? 2 : 1,
                       KeptInputs(factors, DroppedProduct::kFirst, layer.shape.hidden(), slots));
  }
  static LoraProduct of_down(const Layer& layer, const LoraFactors& factors, std::int64_t slots) {
    return LoraProduct(factors, layer.shape.num_experts(), layer.shape.intermediate(), layer.shape.hidden(), 1, 0, 1,
                       KeptInputs(factors, DroppedProduct::kDown, layer.shape.intermediate(), slots));
  }

  bool active() const { return rank_ > 0; }
  std::int64_t rank() const { return rank_; }
  // Of the packed values, and of the plain rows.
  std::int64_t packed_rank() const { return round_up(rank_, kPackedRankUnit<typename Layer::Isa>); }
  std::int64_t row_rank() const { return round_up(rank_, kRankUnit); }
  Accumulator scale() const { return scale_; }
  std::int64_t inputs() const { return inputs_; }
  bool drops() const { return active() && kept_.drops(); }
  const KeptInputs& kept() const { return kept_; }
  // Half panels of each part of the outputs, gate and up or one, in a panel.
  std::int64_t halves_per_panel() const { return 2 / parts_; }

  const Accumulator* a(std::int64_t expert) const { return a_ + expert * a_size(); }
  const Accumulator* b(std::int64_t expert) const { return (copies_b() ? copied_b_.data() : b_) + expert * b_size(); }
  Accumulator* grad_a(std::int64_t expert) const { return grad_a_ + expert * a_size(); }
  Accumulator* grad_b(std::int64_t expert) const {
    return (copies_grad_b() ? copied_grad_b_.data() : grad_b_) + expert * b_size();
  }

  // Copies of B and its gradient, expert after expert, where the caller stores them in another order: a panel reads a
  // stretch of one expert, and PEFT stores those of all experts side by side.
  template <class Visit>
  void regions(const Visit& visit) {
    visit(copied_b_);
    visit(copied_grad_b_);
    kept_.regions(visit);
  }
  // A worker's share of the factors of experts with tokens, and zeros for their gradients.
  void read(const Routing& routing, Worker worker) const {
    const Range share = Range::share(b_size(), worker.index, worker.count);
    if (copies_b()) {
      in_stretches(routing, share, b_strides_,
                   [&](std::int64_t expert, std::int64_t index, const std::int64_t* offsets, std::int64_t count) {
                     const Accumulator* source = b_ + expert * b_strides_.expert;
                     Accumulator* target = copied_b_.data() + expert * b_size() + index;
                     for (std::int64_t i = 0; i < count; ++i) target[i] = source[offsets[i]];
                   });
    }
    if (!copies_grad_b()) return;
    for (const ActiveExpert& active : routing.active_experts()) {
      std::fill(grad_b(active.expert) + share.begin, grad_b(active.expert) + share.end, Accumulator{});
    }
  }
  // Copies a worker's share of the finished gradients to the caller's memory.
  void write(const Routing& routing, Worker worker) const {
    if (!copies_grad_b()) return;
    const Range share = Range::share(b_size(), worker.index, worker.count);
    in_stretches(routing, share, grad_b_strides_,
                 [&](std::int64_t expert, std::int64_t index, const std::int64_t* offsets, std::int64_t count) {
                   const Accumulator* source = grad_b(expert) + index;
                   Accumulator* target = grad_b_ + expert * grad_b_strides_.expert;
                   for (std::int64_t i = 0; i < count; ++i) target[offsets[i]] = source[i];
                 });
  }

  // Half panels of outputs, without those that are only padding.
  std::int64_t output_halves() const { return round_up(size_, kHalfPanel) / kHalfPanel * parts_; }
  // The half panel of outputs with this number, in the order in which the product's panels have them.
  OutputRows output_rows(std::int64_t half_panel) const {
    const std::int64_t first = half_panel / parts_ * kHalfPanel;
    const std::int64_t count = std::clamp<std::int64_t>(size_ - first, 0, kHalfPanel);
    return {half_panel % parts_ * part_stride_ + first * row_stride_, row_stride_, count};
  }

 private:
  LoraProduct(const LoraFactors& factors, std::int64_t num_experts, std::int64_t inputs, std::int64_t size,
              std::int64_t parts, std::int64_t part_stride, std::int64_t row_stride, const KeptInputs& kept)
      : a_(static_cast<const Accumulator*>(factors.a)),
        b_(static_cast<const Accumulator*>(factors.b)),
        grad_a_(static_cast<Accumulator*>(factors.grad_a)),
        grad_b_(static_cast<Accumulator*>(factors.grad_b)),
        b_strides_(factors.b_strides),
        grad_b_strides_(factors.grad_b_strides),
        rank_(factors.rank),
        scale_(static_cast<Accumulator>(factors.scale)),
        num_experts_(num_experts),
        inputs_(inputs),
        size_(size),
        parts_(parts),
        part_stride_(part_stride),
        row_stride_(row_stride),
        copied_b_(copy_size(b_, b_strides_)),
        copied_grad_b_(copy_size(grad_b_, grad_b_strides_)),
        kept_(kept) {}

  bool copies_b() const { return copied_b_.count() > 0; }
  bool copies_grad_b() const { return copied_grad_b_.count() > 0; }
  bool expert_major(const FactorStrides& strides) const {
    const bool unset = strides.expert == 0 && strides.output == 0 && strides.rank == 0;
    return unset || (strides.expert == b_size() && strides.output == rank_ && strides.rank == 1);
  }
  std::int64_t copy_size(const Accumulator* values, const FactorStrides& strides) const {
    return values == nullptr || expert_major(strides) ? 0 : num_experts_ * b_size();
  }

  // Calls `move(expert, index, offsets, count)` for stretches of an expert's factors: `count` of them from `index` on,
  // which are stored at `offsets` from the expert's first. Experts take turns at each stretch: stored values of
  // different experts are neighbours, and their lines stay in L1 until all experts have used them.
  template <class Move>
  void in_stretches(const Routing& routing, Range share, const FactorStrides& strides, const Move& move) const {
    std::int64_t offsets[kHalfPanel];
    for (std::int64_t index = share.begin; index < share.end; index += kHalfPanel) {
      const std::int64_t count = std::min(kHalfPanel, share.end - index);
      for (std::int64_t i = 0; i < count; ++i) {
        offsets[i] = (index + i) / rank_ * strides.output + (index + i) % rank_ * strides.rank;
      }
      for (const ActiveExpert& active : routing.active_experts()) move(active.expert, index, offsets, count);
    }
  }

  std::int64_t a_size() const { return rank_ * inputs_; }
  std::int64_t b_size() const { return size_ * parts_ * rank_; }

  const Accumulator* a_;
  const Accumulator* b_;
  Accumulator* grad_a_;
  Accumulator* grad_b_;
  FactorStrides b_strides_;
  FactorStrides grad_b_strides_;
  std::int64_t rank_;
  Accumulator scale_;
  std::int64_t num_experts_;
  std::int64_t inputs_;
  std::int64_t size_;
  std::int64_t parts_;
  std::int64_t part_stride_;
  std::int64_t row_stride_;
  Region<Accumulator> copied_b_;
  Region<Accumulator> copied_grad_b_;
  KeptInputs kept_;
};

// Panels of factors, packed again for each expert: an optimiser changes them at every step, so a packed copy would not
// pay.
template <class Layer>
class LoraPanels {
 public:
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Lanes = typename Layer::Lanes;
  using Product = LoraProduct<Layer>;

  // Ranks [32 panel, 32 panel + 32) of A as outputs; contracts over the product's inputs, padded. The padding of
  // `target` is zero before.
  static void ranks_of_a(const Product& product, std::int64_t expert, std::int64_t panel, Element* target) {
    const std::int64_t first = panel * kPanelWidth;
    const std::int64_t ranks = std::min(kPanelWidth, product.rank() - first);
    alignas(64) Element values[kPanelWidth];
    for (std::int64_t lane = 0; lane < ranks; ++lane) {
      const Accumulator* row = product.a(expert) + (first + lane) * product.inputs();
      for (std::int64_t k = 0; k < product.inputs(); k += kHalfPanel) {
        const std::int64_t count = std::min(kHalfPanel, product.inputs() - k);
        round(row + k, count, values);
        put_along_k(values, count, lane, k, target);
      }
    }
  }

  // The same ranks of B^T; contracts over the product's outputs, in the order of its panels.
  static void ranks_of_b(const Product& product, std::int64_t expert, std::int64_t panel, Element* target) {
    const std::int64_t first = panel * kPanelWidth;
    const std::int64_t ranks = std::min(kPanelWidth, product.rank() - first);
    alignas(64) Element values[kHalfPanel * kMaxRank];
    for (std::int64_t half = 0; half < product.output_halves(); ++half) {
      const std::int64_t count = round_rows_of_b(product, expert, half, values);
      put_along_lanes(values + first, product.rank(), count, ranks, half * kHalfPanel, target);
    }
  }

  // A panel of the product's outputs; contracts over the ranks, padded.
  static void outputs_of_b(const Product& product, std::int64_t expert, std::int64_t panel, Element* target) {
    alignas(64) Element values[kHalfPanel * kMaxRank];
    std::fill(target, target + product.packed_rank() * kPanelWidth, Element{});
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::int64_t count = round_rows_of_b(product, expert, 2 * panel + half, values);
      for (std::int64_t row = 0; row < count; ++row) {
        put_along_k(values + row * product.rank(), product.rank(), half * kHalfPanel + row, 0, target);
      }
    }
  }

  // A panel of the product's inputs, as outputs of A^T; contracts over the ranks, padded.
  static void inputs_of_a(const Product& product, std::int64_t expert, std::int64_t panel, Element* target) {
    const std::int64_t first = panel * kPanelWidth;
    const std::int64_t columns = std::min(kPanelWidth, product.inputs() - first);
    alignas(64) Element values[kDepth * kPanelWidth];
    std::fill(target, target + product.packed_rank() * kPanelWidth, Element{});
    for (std::int64_t k = 0; k < product.rank(); k += kDepth) {
      const std::int64_t count = std::min<std::int64_t>(kDepth, product.rank() - k);
      for (std::int64_t i = 0; i < count; ++i) {
        const Accumulator* row = product.a(expert) + (k + i) * product.inputs() + first;
        prefetch_row(row + kPanelWidth, kPanelWidth);  // for the next panel
        round(row, columns, values + i * kPanelWidth);
      }
      put_along_lanes(values, kPanelWidth, count, columns, k, target);
    }
  }

 private:
  static constexpr std::int64_t kDepth = ElementTraits<Element>::kDepth;

  // Rounds master weights to elements.
  static void round(const Accumulator* source, std::int64_t count, Element* target) {
    const std::int64_t whole = count / kHalfPanel * kHalfPanel;
    for (std::int64_t i = 0; i < whole; i += kHalfPanel) Lanes::load(source + i).to_elements(target + i);
    for (std::int64_t i = whole; i < count; ++i) target[i] = Element(source[i]);
  }

  // The rows of B for half a panel of outputs, one after the other; returns their number.
  static std::int64_t round_rows_of_b(const Product& product, std::int64_t expert, std::int64_t half, Element* target) {
    const OutputRows rows = product.output_rows(half);
    const std::int64_t rank = product.rank();
    const Accumulator* source = product.b(expert) + rows.first * rank;
    const std::int64_t stretch = kHalfPanel * rows.stride * rank;
    prefetch_row(source + product.halves_per_panel() * stretch, stretch);  // for the next panel
    if (rows.stride == 1) {
      round(source, rows.count * rank, target);
    } else {
      for (std::int64_t row = 0; row < rows.count; ++row) {
        round(source + row * rows.stride * rank, rank, target + row * rank);
      }
    }
    return rows.count;
  }

  // One output's stretch of the contraction, which begins at `first_k`.
  static void put_along_k(const Element* values, std::int64_t count, std::int64_t lane, std::int64_t first_k,
                          Element* target) {
    Element* place = target + weight_format::panel_offset<Element>(lane, first_k);
    const std::int64_t whole = count / kDepth * kDepth;
    for (std::int64_t k = 0; k < whole; k += kDepth) {
      std::memcpy(place + k * kPanelWidth, values + k, kDepth * sizeof(Element));
    }
    for (std::int64_t k = whole; k < count; ++k) place[whole * kPanelWidth + k - whole] = values[k];
  }

  // `count` neighbours of k, from `first_k` on, of the first `lanes` outputs: `values` has a row for each k.
  static void put_along_lanes(const Element* values, std::int64_t stride, std::int64_t count, std::int64_t lanes,
                              std::int64_t first_k, Element* target) {
    const std::int64_t whole = count / kDepth * kDepth;
    for (std::int64_t k = 0; k < whole; k += kDepth) {
      Element* place = target + weight_format::panel_offset<Element>(0, first_k + k);
      const Element* rows = values + k * stride;
      for (std::int64_t lane = 0; lane < lanes; ++lane) {
        for (std::int64_t i = 0; i < kDepth; ++i) place[lane * kDepth + i] = rows[i * stride + lane];
      }
    }
    for (std::int64_t k = whole; k < count; ++k) {
      Element* place = target + weight_format::panel_offset<Element>(0, first_k + k);
      for (std::int64_t lane = 0; lane < lanes; ++lane) place[lane * kDepth] = values[k * stride + lane];
    }
  }
};

// The low-rank values of all slots. Either form may be absent (null).
template <class Layer>
struct LowRank {
  typename Layer::Element* packed_S;    // groups as `gather_slots` packs them, `packed_rank()` per slot
  typename Layer::Accumulator* rows_S;  // `row_rank()` per slot

  const typename Layer::Accumulator* rows(const LoraProduct<Layer>& product, std::int64_t slot) const {
    return rows_S + slot * product.row_rank();
  }
};

// Packed rows of `padded` elements of some groups' slots, from the rows of their tokens (T, K) without what the product
// drops.
template <class Layer>
void gather_kept(const LoraProduct<Layer>& product, const Routing& routing,
                 const MatrixView<const typename Layer::Element>& tokens, std::int64_t padded, Range groups,
                 typename Layer::Element* target) {
  using Element = typename Layer::Element;
  alignas(64) Element lanes[Layer::Isa::kMaxRows][kHalfPanel];
  const PackedRows<Layer> rows(target, padded);
  for (std::int64_t index = groups.begin; index < groups.end; ++index) {
    const SlotGroup& group = routing.groups()[static_cast<std::size_t>(index)];
    for (std::int64_t half = 0; half * kHalfPanel < padded; ++half) {
      const std::int64_t first = half * kHalfPanel;
      const std::int64_t count = std::clamp<std::int64_t>(tokens.columns - first, 0, kHalfPanel);
      for (int row = 0; row < group.rows; ++row) {
        const std::int64_t slot = group.first_slot + row;
        const Element* source = tokens.row(routing.token(slot)) + first;
        std::fill(std::copy(source, source + count, lanes[row]), lanes[row] + kHalfPanel, Element{});
        keep_only(product.kept().half(slot, half), lanes[row]);
      }
      rows.write(group, first, lanes);
    }
  }
}

// The values that forward keeps for backward: gate and up of each slot, then the low-rank rows of both products.
template <class Layer>
class SavedSlots {
 public:
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;

  SavedSlots(const Layer& layer, void* begin, std::int64_t slots, std::int64_t first_rank)
      : gate_up_S(static_cast<Element*>(begin)),
        first_rows_S(reinterpret_cast<Accumulator*>(gate_up_S + padded_size(layer, slots))),
        down_rows_S(first_rows_S + slots * round_up(first_rank, kRankUnit)) {}

  static std::size_t bytes(const Layer& layer, std::int64_t slots, std::int64_t first_rank, std::int64_t down_rank) {
    const std::int64_t rows = slots * (round_up(first_rank, kRankUnit) + round_up(down_rank, kRankUnit));
    return static_cast<std::size_t>(padded_size(layer, slots)) * sizeof(Element) +
           static_cast<std::size_t>(rows) * sizeof(Accumulator);
  }

  Element* gate_up_S;
  Accumulator* first_rows_S;
  Accumulator* down_rows_S;

 private:
  // A slot's gate and up are whole panels, so the rows after them are aligned.
  static std::int64_t padded_size(const Layer& layer, std::int64_t slots) { return slots * layer.first_size(); }
};

// u = s P x for every slot of `groups`: packed rows of `contraction` elements times the panels that `pack(product,
// expert, panel, scratch)` makes of the factors. `scratch` holds one panel.
template <class Layer, class Pack>
void to_low_rank(const LoraProduct<Layer>& product, const Routing& routing, Range groups,
                 const typename Layer::Element* packed_S, std::int64_t contraction, const Pack& pack,
                 typename Layer::Element* scratch, const LowRank<Layer>& target) {
  using Isa = typename Layer::Isa;
  using Lanes = typename Layer::Lanes;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  alignas(64) Accumulator tile[Isa::kMaxRows * kPanelWidth];
  alignas(64) Element packed[Isa::kMaxRows][kHalfPanel];
  const std::int64_t steps = contraction / ElementTraits<Element>::kDepth;
  const Lanes scale(product.scale());
  Isa isa;

  const auto put = [&](const SlotGroup& group, std::int64_t first_rank) {
    const std::int64_t valid = std::clamp<std::int64_t>(product.rank() - first_rank, 0, kHalfPanel);
    for (int row = 0; row < group.rows; ++row) {
      Accumulator* values = tile + row * kPanelWidth + first_rank % kPanelWidth;
      (Lanes::load(values) * scale).store(values);
      std::fill(values + valid, values + kHalfPanel, Accumulator{});  // 0 * x is NaN where x is infinite
      Lanes::load(values).to_elements(packed[row]);
      if (target.rows_S == nullptr) continue;
      Accumulator* plain = target.rows_S + (group.first_slot + row) * product.row_rank() + first_rank;
      std::copy(values, values + std::clamp<std::int64_t>(product.row_rank() - first_rank, 0, kHalfPanel), plain);
    }
    if (target.packed_S != nullptr) {
      PackedRows<Layer>(target.packed_S, product.packed_rank()).write(group, first_rank, packed);
    }
  };

  for (std::int64_t panel = 0; panel * kPanelWidth < product.rank(); ++panel) {
    std::fill(scratch, scratch + contraction * kPanelWidth, Element{});  // no expert writes where the padding is
    for (const ActiveExpert& active : routing.active_experts()) {
      const auto first = std::max(groups.begin, static_cast<std::int64_t>(active.first_group));
      const auto last = std::min(groups.end, static_cast<std::int64_t>(active.last_group));
      if (first >= last) continue;
      pack(product, active.expert, panel, scratch);
      for (std::int64_t index = first; index < last; ++index) {
        const SlotGroup& group = routing.groups()[static_cast<std::size_t>(index)];
        FetchAhead<Isa> nothing;
        isa.multiply(group.rows, steps, packed_S + group.first_slot * contraction, scratch, tile, nothing);
        for (std::int64_t half = 0; half < kPanelWidth; half += kHalfPanel) {
          if (panel * kPanelWidth + half < product.packed_rank()) put(group, panel * kPanelWidth + half);
        }
      }
    }
  }
}

}  // namespace ktc::inline KTC_UNIT
