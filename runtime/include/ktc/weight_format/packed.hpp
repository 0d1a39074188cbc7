// The packed experts of a layer: `FirstPanelType` and `DownPanelType` are the types of a panel of 32 outputs, of the
// product that reads hidden states (gate and up) and of the one that computes them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/panel_places.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/layout.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

template <WeightPanel FirstPanelType, WeightPanel DownPanelType = FirstPanelType>
class Packed {
 public:
  using FirstPanel = FirstPanelType;
  using DownPanel = DownPanelType;
  using Element = typename FirstPanel::Element;
  static_assert(std::is_same_v<Element, typename DownPanel::Element>, "both products multiply the same");
  using Accumulator = AccumulatorOf<Element>;

  // Throws std::invalid_argument for a size that the format cannot cut into its groups.
  Packed(const MoeSizes& sizes, Parts parts)
      : layout_(sizes.hidden, sizes.intermediate, parts), num_experts_(sizes.num_experts), nodes_(sizes.nodes) {
    FirstPanel::check("hidden", sizes.hidden);
    DownPanel::check("intermediate", sizes.intermediate);
    if (nodes_ < 1 || nodes_ > kMaxNodes) {
      throw std::invalid_argument("weights are cut for 1 to " + decimal(kMaxNodes) + " NUMA nodes, found " +
                                  decimal(nodes_));
    }
  }

  std::int64_t num_first_panels() const { return layout_.num_first_panels(); }
  std::int64_t num_down_panels() const { return layout_.num_down_panels(); }
  std::int64_t first_contraction() const { return layout_.padded_hidden(); }
  std::int64_t down_contraction() const { return layout_.padded_intermediate(); }

  // Of one expert on all nodes.
  std::int64_t expert_bytes() const { return weights_bytes() + bias_bytes(); }
  // A shard holds of each expert [its first panels][its down panels], and the first shard [biases] too; each begins on
  // a huge page of its own. On one node there is only one shard, without padding.
  std::int64_t packed_bytes() const { return shard_begin(nodes_); }
  std::int64_t shard_begin(int node) const {
    std::int64_t begin = 0;
    for (int before = 0; before < node; ++before) {
      begin += round_up(num_experts_ * slice_bytes(before), nodes_ == 1 ? 1 : kShardAlignment);
    }
    return begin;
  }

  PanelPlaces first_places(const std::byte* packed) const {
    PanelPlaces places(FirstPanel::bytes(first_contraction()));
    for (int node = 0; node < nodes_; ++node) {
      places.add(packed + shard_begin(node), slice_bytes(node), panels_of(Part::kUp, node));
    }
    return places;
  }
  PanelPlaces down_places(const std::byte* packed) const {
    PanelPlaces places(DownPanel::bytes(down_contraction()));
    for (int node = 0; node < nodes_; ++node) {
      places.add(packed + shard_begin(node) + first_slice_bytes(node), slice_bytes(node), panels_of(Part::kDown, node));
    }
    return places;
  }
  // 32 values for each first panel.
  const Accumulator* first_bias(const std::byte* packed, std::int64_t expert) const {
    return reinterpret_cast<const Accumulator*>(packed + (expert + 1) * slice_bytes(0) - bias_bytes());
  }
  // One value per hidden column, padded with zeros.
  const Accumulator* down_bias(const std::byte* packed, std::int64_t expert) const {
    return first_bias(packed, expert) + layout_.first_bias_size();
  }

  // Copy one expert between `whole`, its `expert_bytes()` as one node has them, and the shards at `packed`.
  void shard(const std::byte* whole, std::int64_t expert, std::byte* packed) const {
    for_pieces(expert, [&](std::int64_t in_whole, std::int64_t in_packed, std::int64_t bytes) {
      std::memcpy(packed + in_packed, whole + in_whole, static_cast<std::size_t>(bytes));
    });
  }
  void join(const std::byte* packed, std::int64_t expert, std::byte* whole) const {
    for_pieces(expert, [&](std::int64_t in_whole, std::int64_t in_packed, std::int64_t bytes) {
      std::memcpy(whole + in_whole, packed + in_packed, static_cast<std::size_t>(bytes));
    });
  }

  // `source` is (I, H) for gate and up, (H, I) for down, and one row for a bias.
  template <class Source>
  void pack(std::byte* packed, std::int64_t expert, Part part, const MatrixView<const Source>& source) const {
    layout_.check(part, source.rows, source.columns);
    if (is_bias(part)) {
      auto* target = const_cast<Accumulator*>(bias_of(packed, expert, part));
      for (std::int64_t i = 0; i < source.columns; ++i) {
        target[layout_.bias_place(part, i)] = Accumulator(source.data[i]);
      }
      return;
    }
    with_panel(part, [&]<class Panel>(Panel) {
      if constexpr (requires { requires Panel::kMatrixScale; }) {
        const float shared = Panel::matrix_scale(source);
        for_shards(packed, expert, part,
                   [&](const PartLanes& lanes, Range rows) { Panel::pack(rows_of(source, rows), lanes, shared); });
        return;
      }
      for_shards(packed, expert, part,
                 [&](const PartLanes& lanes, Range rows) { Panel::pack(rows_of(source, rows), lanes); });
    });
  }

  // `codes` as a checkpoint stores them, one byte each, in the shape of the part; `scales` (rows, groups of a row).
  void pack_codes(std::byte* packed, std::int64_t expert, Part part, const MatrixView<const std::uint8_t>& codes,
                  const MatrixView<const float>& scales) const {
    layout_.check(part, codes.rows, codes.columns);
    with_panel(part, [&]<class Panel>(Panel) {
      if constexpr (Panel::kCode != nullptr) {
        if (!is_bias(part)) {
          return for_shards(packed, expert, part, [&](const PartLanes& lanes, Range rows) {
            Panel::pack_codes(rows_of(codes, rows), rows_of(scales, rows), lanes);
          });
        }
      }
      throw std::invalid_argument("this part is not stored in codes");
    });
  }

  // `blocks` of the format `type`, as a GGUF file stores them: (rows, bytes of a row).
  void pack_blocks(std::byte* packed, std::int64_t expert, Part part, std::string_view type,
                   const MatrixView<const std::uint8_t>& blocks) const {
    with_panel(part, [&]<class Panel>(Panel) {
      if constexpr (Panel::kStored != nullptr) {
        if (!is_bias(part) && type == Panel::kStored) {
          const auto columns = blocks.columns / Panel::Format::kStoredBytes * Panel::Format::kWeights;
          const bool whole = blocks.columns % Panel::Format::kStoredBytes == 0;
          layout_.check(part, blocks.rows, whole ? columns : -1);
          return for_shards(packed, expert, part, [&](const PartLanes& lanes, Range rows) {
            Panel::pack_blocks(rows_of(blocks, rows), lanes);
          });
        }
      }
      throw std::invalid_argument("this part is not stored in blocks of " + std::string(type));
    });
  }

  // The inverse, dequantised; a bias comes back as accumulators.
  void unpack(const std::byte* packed, std::int64_t expert, Part part, void* target, std::int64_t rows,
              std::int64_t columns) const {
    layout_.check(part, rows, columns);
    if (is_bias(part)) {
      const Accumulator* bias = bias_of(packed, expert, part);
      for (std::int64_t i = 0; i < columns; ++i) {
        static_cast<Accumulator*>(target)[i] = bias[layout_.bias_place(part, i)];
      }
      return;
    }
    const MatrixView all(static_cast<Element*>(target), rows, columns);
    with_panel(part, [&]<class Panel>(Panel) {
      for_shards(const_cast<std::byte*>(packed), expert, part,
                 [&](const PartLanes& lanes, Range rows) { Panel::unpack(lanes, rows_of(all, rows)); });
    });
  }

  // Calls `function` with a value of the panel type that holds `part`.
  template <class Function>
  static auto with_panel(Part part, Function&& function) {
    return is_down(part) ? function(DownPanel{}) : function(FirstPanel{});
  }

 private:
  static constexpr std::int64_t kShardAlignment = std::int64_t{2} << 20;

  std::int64_t weights_bytes() const {
    return num_first_panels() * FirstPanel::bytes(first_contraction()) +
           num_down_panels() * DownPanel::bytes(down_contraction());
  }
  std::int64_t bias_bytes() const {
    constexpr auto kItem = static_cast<std::int64_t>(sizeof(Accumulator));
    return layout_.parts().biases ? (layout_.first_bias_size() + layout_.padded_hidden()) * kItem : 0;
  }
  // Two panels of gate and up make one of what the activation writes.
  Range panels_of(Part part, int node) const {
    const std::int64_t together = !is_down(part) && layout_.parts().gate ? 2 : 1;
    return shard_of(layout_.num_panels(part), node, nodes_, together);
  }
  // Of one expert in a node's shard.
  std::int64_t first_slice_bytes(int node) const {
    return panels_of(Part::kUp, node).size() * FirstPanel::bytes(first_contraction());
  }
  std::int64_t slice_bytes(int node) const {
    return first_slice_bytes(node) + panels_of(Part::kDown, node).size() * DownPanel::bytes(down_contraction()) +
           (node == 0 ? bias_bytes() : 0);
  }

  // `body(lanes, rows)` for every shard that has panels of a part: its lanes there, and the rows that they hold.
  template <class Body>
  void for_shards(std::byte* packed, std::int64_t expert, Part part, const Body& body) const {
    const PanelPlaces places = is_down(part) ? down_places(packed) : first_places(packed);
    const std::int64_t num_rows = layout_.outputs(part), lanes = layout_.lanes(part);
    for (int node = 0; node < nodes_; ++node) {
      const Range panels = panels_of(part, node);
      if (panels.size() == 0) continue;
      body(PartLanes{.panels = const_cast<std::byte*>(places.panel(expert, panels.begin)),
                     .num_panels = panels.size(),
                     .padded_k = layout_.padded_contraction(part),
                     .first_lane = layout_.first_lane(part),
                     .lanes = lanes},
           Range{std::min(panels.begin * lanes, num_rows), std::min(panels.end * lanes, num_rows)});
    }
  }
  template <class T>
  static MatrixView<T> rows_of(const MatrixView<T>& matrix, Range rows) {
    return {matrix.row(rows.begin), rows.size(), matrix.columns, matrix.row_stride};
  }

  // `body(in_whole, in_packed, bytes)` for every stretch of one expert that stays together.
  template <class Body>
  void for_pieces(std::int64_t expert, const Body& body) const {
    std::int64_t first = 0, down = num_first_panels() * FirstPanel::bytes(first_contraction());
    for (int node = 0; node < nodes_; ++node) {
      const std::int64_t slice = shard_begin(node) + expert * slice_bytes(node);
      const std::int64_t first_bytes = first_slice_bytes(node);
      const std::int64_t down_bytes = slice_bytes(node) - first_bytes - (node == 0 ? bias_bytes() : 0);
      body(first, slice, first_bytes);
      body(down, slice + first_bytes, down_bytes);
      if (node == 0) body(weights_bytes(), slice + first_bytes + down_bytes, bias_bytes());
      first += first_bytes;
      down += down_bytes;
    }
  }

  const Accumulator* bias_of(const std::byte* packed, std::int64_t expert, Part part) const {
    return is_down(part) ? down_bias(packed, expert) : first_bias(packed, expert);
  }

  ExpertLayout layout_;
  std::int64_t num_experts_;
  int nodes_;
};

}  // namespace ktc::weight_format::inline KTC_UNIT
