// LoRA in the sweeps of a layer: the low-rank part of each tile, added before its epilogue, and in backward the
// gradients of the factors, from values of the epilogues.
//
// A panel's share of a gradient is summed by the worker that owns the panel, in the order of the slots, and added to
// the whole when the panel ends: no result depends on the number of workers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/lora.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// One worker's scratch for both products of a layer.
template <class Layer>
class LoraScratch {
 public:
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Product = LoraProduct<Layer>;

  LoraScratch(const Layer& layer, const Product& first, const Product& down, int threads)
      : low_rank_size_(std::max({layer.shape.padded_hidden(), layer.shape.padded_intermediate(), layer.first_size()}) *
                       kPanelWidth),
        factors_size_(std::max(first.packed_rank(), down.packed_rank()) * kPanelWidth),
        sums_size_(std::max(first.row_rank(), down.row_rank()) * kHalfPanel * kHalves),
        elements_W_((low_rank_size_ + factors_size_) * (first.active() || down.active() ? threads : 0)),
        sums_W_(sums_size_ * threads) {}

  template <class Visit>
  void regions(const Visit& visit) {
    visit(elements_W_);
    visit(sums_W_);
  }

  // A panel of factors that makes low-rank values, and one that makes outputs of them.
  Element* low_rank(int worker) const { return elements_W_.data() + worker * (low_rank_size_ + factors_size_); }
  Element* factors(int worker) const { return low_rank(worker) + low_rank_size_; }
  Accumulator* sums(int worker) const { return sums_W_.data() + worker * sums_size_; }

 private:
  static constexpr std::int64_t kHalves = 6;  // of a panel: one gradient of A and at most two of B

  std::int64_t low_rank_size_;
  std::int64_t factors_size_;
  std::int64_t sums_size_;
  Region<Element> elements_W_;
  Region<Accumulator> sums_W_;
};

// Adds `values` times the panel that `pack(product, expert, panel, scratch)` makes to each tile, then calls `inner`. A
// panel of the product's inputs gets nothing where those are dropped.
template <class Layer, class Pack, TileEpilogue<typename Layer::Accumulator> Inner>
class WithLora {
 public:
  using Isa = typename Layer::Isa;
  using Lanes = typename Layer::Lanes;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;

  WithLora(const LoraProduct<Layer>& product, const LowRank<Layer>& values, Pack pack, Element* scratch,
           const Inner& inner, bool of_inputs = false)
      : product_(product),
        values_(values),
        pack_(pack),
        scratch_(scratch),
        inner_(inner),
        drops_(of_inputs && product.drops()) {}

  void begin(PanelPart part) const {
    if (product_.active()) pack_(product_, part.expert, part.panel, scratch_);
    inner_.begin(part);
  }
  void prefetch(const SlotGroup& group, PanelPart part) const { inner_.prefetch(group, part); }
  void complete(Isa& isa, const SlotGroup& group, PanelPart part, Accumulator* tile) const {
    if (!product_.active()) return;
    alignas(64) Accumulator low_rank[Isa::kMaxRows * kPanelWidth];
    const std::int64_t rank = product_.packed_rank();
    FetchAhead<Isa> nothing;
    isa.multiply(group.rows, rank / ElementTraits<Element>::kDepth, values_.packed_S + group.first_slot * rank,
                 scratch_, low_rank, nothing);
    if (drops_) drop(group, part, low_rank);
    for (std::int64_t lane = 0; lane < group.rows * kPanelWidth; lane += kHalfPanel) {
      (Lanes::load(tile + lane) + Lanes::load(low_rank + lane)).store(tile + lane);
    }
  }
  void operator()(const SlotGroup& group, PanelPart part, Accumulator* tile) const { inner_(group, part, tile); }
  void end(PanelPart part) const { inner_.end(part); }

 private:
  void drop(const SlotGroup& group, PanelPart part, Accumulator* low_rank) const {
    for (int row = 0; row < group.rows; ++row) {
      for (std::int64_t half = 0; half < 2; ++half) {
        keep_only(product_.kept().half(group.first_slot + row, 2 * part.panel + half),
                  low_rank + row * kPanelWidth + half * kHalfPanel);
      }
    }
  }

  const LoraProduct<Layer>& product_;
  LowRank<Layer> values_;
  Pack pack_;
  Element* scratch_;
  Inner inner_;
  bool drops_;
};

// Sums of outer products of half panels and low-rank rows: (row_rank, 16) for each half panel of a gradient.
template <class Layer>
class LoraSums {
 public:
  using Lanes = typename Layer::Lanes;
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Product = LoraProduct<Layer>;

  LoraSums(const Product& product, Accumulator* sums) : product_(product), sums_(sums) {}

  std::int64_t size(std::int64_t halves) const { return halves * product_.row_rank() * kHalfPanel; }
  void clear(std::int64_t halves) const { std::fill(sums_, sums_ + size(halves), Accumulator{}); }

  // Adds rows of 16 elements, times `row_rank()` factors for each row.
  void add(std::int64_t half, const Element* const* rows, int num_rows, const Accumulator* factors) const {
    const std::int64_t rank = product_.row_rank();
    for (std::int64_t first = 0; first < rank; first += kRankUnit) {
      Accumulator* sums = sums_ + size(half) + first * kHalfPanel;
      const auto loaded = [&](std::int64_t i) { return Lanes::load(sums + i * kHalfPanel); };
      Lanes sum[kRankUnit] = {loaded(0), loaded(1), loaded(2), loaded(3), loaded(4), loaded(5), loaded(6), loaded(7)};
      for (int row = 0; row < num_rows; ++row) {
        const Lanes values = Lanes::from_elements(rows[row]);
        const Accumulator* factor = factors + row * rank + first;
#pragma GCC unroll 8
        for (std::int64_t i = 0; i < kRankUnit; ++i) sum[i] = fused_multiply_add(values, Lanes(factor[i]), sum[i]);
      }
#pragma GCC unroll 8
      for (std::int64_t i = 0; i < kRankUnit; ++i) sum[i].store(sums + i * kHalfPanel);
    }
  }

  // The gradient to which a panel's sums are added when it ends.
  void prefetch_grad_a(PanelPart part) const {
    for (std::int64_t rank = 0; rank < product_.rank(); ++rank) {
      prefetch_row(product_.grad_a(part.expert) + rank * product_.inputs() + part.panel * kPanelWidth, kPanelWidth);
    }
  }
  void prefetch_grad_b(std::int64_t expert, std::int64_t first_half, std::int64_t halves) const {
    for (std::int64_t half = 0; half < halves; ++half) {
      const OutputRows rows = product_.output_rows(first_half + half);
      prefetch_row(product_.grad_b(expert) + rows.first * product_.rank(), rows.count * rows.stride * product_.rank());
    }
  }

  // The product's inputs of a panel: two half panels.
  void add_to_grad_a(PanelPart part) const {
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::int64_t first = part.panel * kPanelWidth + half * kHalfPanel;
      const std::int64_t count = std::clamp<std::int64_t>(product_.inputs() - first, 0, kHalfPanel);
      for (std::int64_t rank = 0; rank < product_.rank(); ++rank) {
        Accumulator* target = product_.grad_a(part.expert) + rank * product_.inputs() + first;
        const Accumulator* sum = sums_ + size(half) + rank * kHalfPanel;
        for (std::int64_t lane = 0; lane < count; ++lane) target[lane] += sum[lane];
      }
    }
  }
  // `halves` half panels of the product's outputs, the first of which has this number.
  void add_to_grad_b(std::int64_t expert, std::int64_t first_half, std::int64_t halves) const {
    for (std::int64_t half = 0; half < halves; ++half) {
      const OutputRows rows = product_.output_rows(first_half + half);
      for (std::int64_t row = 0; row < rows.count; ++row) {
        Accumulator* target = product_.grad_b(expert) + (rows.first + row * rows.stride) * product_.rank();
        const Accumulator* sum = sums_ + size(half) + row;
        for (std::int64_t rank = 0; rank < product_.rank(); ++rank) target[rank] += sum[rank * kHalfPanel];
      }
    }
  }

 private:
  const Product& product_;
  Accumulator* sums_;
};

// Gradients from a panel of 32 intermediate columns: of down's A, and of B of the first product.
template <class Layer>
class LoraColumnGradients {
 public:
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Product = LoraProduct<Layer>;
  static constexpr std::int64_t kFirstHalves = 2 * Layer::kFirstParts;

  // `first_values` are u of the first product, `down_values` v of down with the routing weight.
  LoraColumnGradients(const Product& first, const LowRank<Layer>& first_values, const Product& down,
                      const LowRank<Layer>& down_values, Accumulator* sums)
      : first_(first),
        down_(down),
        first_values_(first_values),
        down_values_(down_values),
        down_sums_(down, sums),
        first_sums_(first, sums + down_sums_.size(2)) {}

  bool active() const { return first_.active() || down_.active(); }
  void begin(PanelPart part) const {
    down_sums_.clear(2);
    first_sums_.clear(kFirstHalves);
    if (down_.active()) down_sums_.prefetch_grad_a(part);
    if (first_.active()) first_sums_.prefetch_grad_b(part.expert, part.panel * kFirstHalves, kFirstHalves);
  }
  // Half a panel of a group, of columns `part.panel`: the results of the activation, and the weighted gradients of its
  // inputs.
  void add(const SlotGroup& group, PanelPart part, std::int64_t half, const Element (*activated)[kHalfPanel],
           const Element (*d_first)[Layer::Isa::kMaxRows][kHalfPanel]) const {
    const Element* rows[Layer::Isa::kMaxRows];
    if (down_.active()) {
      alignas(64) Element kept[Layer::Isa::kMaxRows][kHalfPanel];
      for (int row = 0; row < group.rows; ++row) rows[row] = activated[row];
      if (down_.drops()) {
        for (int row = 0; row < group.rows; ++row) {
          rows[row] = std::copy(activated[row], activated[row] + kHalfPanel, kept[row]) - kHalfPanel;
          keep_only(down_.kept().half(group.first_slot + row, 2 * part.panel + half), kept[row]);
        }
      }
      down_sums_.add(half, rows, group.rows, down_values_.rows(down_, group.first_slot));
    }
    if (!first_.active()) return;
    for (std::int64_t output = 0; output < Layer::kFirstParts; ++output) {
      for (int row = 0; row < group.rows; ++row) rows[row] = d_first[output][row];
      first_sums_.add(half * Layer::kFirstParts + output, rows, group.rows,
                      first_values_.rows(first_, group.first_slot));
    }
  }
  void end(PanelPart part) const {
    if (down_.active()) down_sums_.add_to_grad_a(part);
    if (first_.active()) first_sums_.add_to_grad_b(part.expert, part.panel * kFirstHalves, kFirstHalves);
  }

 private:
  const Product& first_;
  const Product& down_;
  LowRank<Layer> first_values_;
  LowRank<Layer> down_values_;
  LoraSums<Layer> down_sums_;
  LoraSums<Layer> first_sums_;
};

// Gradients from a panel of 32 hidden columns: of A of the first product, from the hidden states, and of down's B, from
// the gradient of the output. An epilogue around that of the last product of backward.
template <class Layer, TileEpilogue<typename Layer::Accumulator> Inner>
class LoraHiddenGradients {
 public:
  using Element = typename Layer::Element;
  using Accumulator = typename Layer::Accumulator;
  using Product = LoraProduct<Layer>;
  using Tokens = MatrixView<const Element>;

  // `first_values` are v of the first product, `down_values` u of down with the routing weight.
  LoraHiddenGradients(const Product& first, const LowRank<Layer>& first_values, const Product& down,
                      const LowRank<Layer>& down_values, const Routing& routing, const Tokens& hidden_TH,
                      const Tokens& grad_out_TH, Accumulator* sums, const Inner& inner)
      : first_(first),
        down_(down),
        first_values_(first_values),
        down_values_(down_values),
        routing_(routing),
        hidden_TH_(hidden_TH),
        grad_out_TH_(grad_out_TH),
        first_sums_(first, sums),
        down_sums_(down, sums + first_sums_.size(2)),
        inner_(inner) {}

  void begin(PanelPart part) const {
    first_sums_.clear(2);
    down_sums_.clear(2);
    if (first_.active()) first_sums_.prefetch_grad_a(part);
    if (down_.active()) down_sums_.prefetch_grad_b(part.expert, 2 * part.panel, 2);
  }
  void prefetch(const SlotGroup& group, PanelPart part) const {
    inner_.prefetch(group, part);
    prefetch_tokens(group, part);
  }
  void operator()(const SlotGroup& group, PanelPart part, Accumulator* tile) const {
    prefetch_tokens(group, part);  // again: the product has evicted them from the few sets of L1 that they share
    inner_(group, part, tile);
    if (first_.active()) {
      const KeptInputs* kept = first_.drops() ? &first_.kept() : nullptr;
      add(group, part, hidden_TH_, first_sums_, first_values_.rows(first_, group.first_slot), kept);
    }
    if (down_.active()) add(group, part, grad_out_TH_, down_sums_, down_values_.rows(down_, group.first_slot), nullptr);
  }
  void end(PanelPart part) const {
    if (first_.active()) first_sums_.add_to_grad_a(part);
    if (down_.active()) down_sums_.add_to_grad_b(part.expert, 2 * part.panel, 2);
  }

 private:
  void prefetch_tokens(const SlotGroup& group, PanelPart part) const {
    if (first_.active()) prefetch_rows(group, part, hidden_TH_);
    if (down_.active()) prefetch_rows(group, part, grad_out_TH_);
  }
  void prefetch_rows(const SlotGroup& group, PanelPart part, const Tokens& tokens) const {
    for (int row = 0; row < group.rows; ++row) {
      prefetch_row(tokens.row(routing_.token(group.first_slot + row)) + part.panel * kPanelWidth, 1);
    }
  }

  // Rows without what is dropped where there is `kept`.
  void add(const SlotGroup& group, PanelPart part, const Tokens& tokens, const LoraSums<Layer>& sums,
           const Accumulator* factors, const KeptInputs* kept) const {
    const Element* rows[Layer::Isa::kMaxRows];
    alignas(64) Element copied[Layer::Isa::kMaxRows][kHalfPanel];
    for (std::int64_t half = 0; half < 2; ++half) {
      const std::int64_t first = part.panel * kPanelWidth + half * kHalfPanel;
      const std::int64_t count = std::min(kHalfPanel, tokens.columns - first);
      if (count <= 0) return;
      for (int row = 0; row < group.rows; ++row) {
        rows[row] = tokens.row(routing_.token(group.first_slot + row)) + first;
        if (count == kHalfPanel && kept == nullptr) continue;
        std::fill(std::copy(rows[row], rows[row] + count, copied[row]), copied[row] + kHalfPanel, Element{});
        rows[row] = copied[row];
        if (kept != nullptr) keep_only(kept->half(group.first_slot + row, 2 * part.panel + half), copied[row]);
      }
      sums.add(half, rows, group.rows, factors);
    }
  }

  const Product& first_;
  const Product& down_;
  LowRank<Layer> first_values_;
  LowRank<Layer> down_values_;
  const Routing& routing_;
  Tokens hidden_TH_;
  Tokens grad_out_TH_;
  LoraSums<Layer> first_sums_;
  LoraSums<Layer> down_sums_;
  Inner inner_;
};

}  // namespace ktc::inline KTC_UNIT
