// The packed experts of a layer: `FirstPanelType` and `DownPanelType` say what a panel of 32 outputs is made of, of the
// product that reads hidden states (gate and up) and of the one that gives them.
//
// A panel type has `Element`, what is multiplied; `bytes` of a panel, a multiple of 64; `pack` and `unpack` for the
// lanes of one part; `check` for the contraction it has to hold; and, if it is quantised, `pack_codes`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "ktc/element.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/weight_format/layout.hpp"

namespace ktc::weight_format {

template <class FirstPanelType, class DownPanelType = FirstPanelType>
class Packed {
 public:
  using FirstPanel = FirstPanelType;
  using DownPanel = DownPanelType;
  using Element = typename FirstPanel::Element;
  static_assert(std::is_same_v<Element, typename DownPanel::Element>, "both products multiply the same");
  using Accumulator = AccumulatorOf<Element>;

  // Throws std::invalid_argument for a size that the format cannot cut into its groups.
  Packed(std::int64_t hidden, std::int64_t intermediate, Parts parts) : layout_(hidden, intermediate, parts) {
    FirstPanel::check("hidden", hidden);
    DownPanel::check("intermediate", intermediate);
  }

  std::int64_t num_first_panels() const { return layout_.num_first_panels(); }
  std::int64_t num_down_panels() const { return layout_.num_down_panels(); }
  std::int64_t first_contraction() const { return layout_.padded_hidden(); }
  std::int64_t down_contraction() const { return layout_.padded_intermediate(); }

  std::int64_t expert_bytes() const {
    constexpr auto kItem = static_cast<std::int64_t>(sizeof(Accumulator));
    return weights_bytes() +
           (layout_.parts().biases ? (layout_.first_bias_size() + layout_.padded_hidden()) * kItem : 0);
  }

  const std::byte* first(const std::byte* packed, std::int64_t expert) const {
    return packed + expert * expert_bytes();
  }
  const std::byte* down(const std::byte* packed, std::int64_t expert) const {
    return first(packed, expert) + num_first_panels() * FirstPanel::bytes(first_contraction());
  }
  // 32 values for each first panel.
  const Accumulator* first_bias(const std::byte* packed, std::int64_t expert) const {
    return reinterpret_cast<const Accumulator*>(first(packed, expert) + weights_bytes());
  }
  // One value per hidden column, padded with zeros.
  const Accumulator* down_bias(const std::byte* packed, std::int64_t expert) const {
    return first_bias(packed, expert) + layout_.first_bias_size();
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
    with_panel(part, [&]<class Panel>(Panel) { Panel::pack(source, lanes_of(packed, expert, part)); });
  }

  // `codes` as a checkpoint stores them, one byte each, in the shape of the part; `scales` (rows, groups of a row).
  void pack_codes(std::byte* packed, std::int64_t expert, Part part, const MatrixView<const std::uint8_t>& codes,
                  const MatrixView<const float>& scales) const {
    layout_.check(part, codes.rows, codes.columns);
    with_panel(part, [&]<class Panel>(Panel) {
      if constexpr (requires { Panel::kCode; }) {
        if (!is_bias(part)) return Panel::pack_codes(codes, scales, lanes_of(packed, expert, part));
      }
      throw std::invalid_argument("this part is not stored in codes");
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
    with_panel(part, [&]<class Panel>(Panel) {
      Panel::unpack(lanes_of(const_cast<std::byte*>(packed), expert, part),
                    MatrixView(static_cast<Element*>(target), rows, columns));
    });
  }

  // Calls `function` with a value of the panel type that holds `part`.
  template <class Function>
  static auto with_panel(Part part, Function&& function) {
    return is_down(part) ? function(DownPanel{}) : function(FirstPanel{});
  }

 private:
  std::int64_t weights_bytes() const {
    return num_first_panels() * FirstPanel::bytes(first_contraction()) +
           num_down_panels() * DownPanel::bytes(down_contraction());
  }
  PartLanes lanes_of(std::byte* packed, std::int64_t expert, Part part) const {
    const std::byte* panels = is_down(part) ? down(packed, expert) : first(packed, expert);
    return {.panels = const_cast<std::byte*>(panels),
            .num_panels = layout_.num_panels(part),
            .padded_k = layout_.padded_contraction(part),
            .first_lane = layout_.first_lane(part),
            .lanes = layout_.lanes(part)};
  }
  const Accumulator* bias_of(const std::byte* packed, std::int64_t expert, Part part) const {
    return is_down(part) ? down_bias(packed, expert) : first_bias(packed, expert);
  }

  ExpertLayout layout_;
};

}  // namespace ktc::weight_format
