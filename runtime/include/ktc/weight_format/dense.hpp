// Unquantised expert weights: what is stored is what is multiplied.
//
// An expert is [first panels][H/32 down panels][biases]. A first panel, of the product that reads hidden states, holds
// 16 outputs of gate and the same 16 of up, so that the activation of both is at hand when one product ends; 32 of up
// where there is no gate. Biases are kept as accumulators, in the order of the panels' outputs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ktc/weight_format/panel.hpp"

namespace ktc::weight_format {

enum class Part { kGate, kUp, kDown, kGateBias, kUpBias, kDownBias };

// Which parts an expert has beside up and down.
struct Parts {
  bool gate;
  bool biases;
};

template <class ElementType>
class Dense {
 public:
  using Element = ElementType;
  using Accumulator = AccumulatorOf<Element>;

  Dense(std::int64_t hidden, std::int64_t intermediate, Parts parts)
      : hidden_(hidden), intermediate_(intermediate), parts_(parts) {}

  std::int64_t num_first_panels() const { return padded_intermediate() / columns_per_first_panel(); }
  std::int64_t num_down_panels() const { return padded_hidden() / kPanelWidth; }
  std::int64_t first_panel_size() const { return padded_hidden() * kPanelWidth; }
  std::int64_t down_panel_size() const { return padded_intermediate() * kPanelWidth; }
  std::int64_t expert_size() const {  // in elements
    constexpr std::int64_t kElements = sizeof(Accumulator) / sizeof(Element);
    return weights_size() + (parts_.biases ? (first_bias_size() + padded_hidden()) * kElements : 0);
  }

  const Element* first(const std::byte* packed, std::int64_t expert) const {
    return reinterpret_cast<const Element*>(packed) + expert * expert_size();
  }
  const Element* down(const std::byte* packed, std::int64_t expert) const {
    return first(packed, expert) + num_first_panels() * first_panel_size();
  }
  // 32 values for each first panel.
  const Accumulator* first_bias(const std::byte* packed, std::int64_t expert) const {
    return reinterpret_cast<const Accumulator*>(first(packed, expert) + weights_size());
  }
  // One value per hidden column, padded with zeros.
  const Accumulator* down_bias(const std::byte* packed, std::int64_t expert) const {
    return first_bias(packed, expert) + first_bias_size();
  }

  // `source` is (I, H) for gate and up, (H, I) for down, and one row for a bias.
  template <class Source>
  void pack(std::byte* packed, std::int64_t expert, Part part, const MatrixView<const Source>& source) const {
    check(part, source.rows, source.columns);
    if (is_bias(part)) {
      auto* target = const_cast<Accumulator*>(bias_of(packed, expert, part));
      for (std::int64_t i = 0; i < source.columns; ++i) target[bias_place(part, i)] = Accumulator(source.data[i]);
      return;
    }
    for (std::int64_t panel = 0; panel < num_panels(part); ++panel) {
      pack_lanes(source, panel * lanes(part), lanes(part), first_lane(part), padded_contraction(part),
                 const_cast<Element*>(panel_of(packed, expert, part, panel)));
    }
  }

  // The inverse; a bias comes back as accumulators.
  void unpack(const std::byte* packed, std::int64_t expert, Part part, void* target, std::int64_t rows,
              std::int64_t columns) const {
    check(part, rows, columns);
    if (is_bias(part)) {
      const Accumulator* bias = bias_of(packed, expert, part);
      for (std::int64_t i = 0; i < columns; ++i) static_cast<Accumulator*>(target)[i] = bias[bias_place(part, i)];
      return;
    }
    const MatrixView matrix(static_cast<Element*>(target), rows, columns);
    for (std::int64_t panel = 0; panel < num_panels(part); ++panel) {
      unpack_lanes(panel_of(packed, expert, part, panel), first_lane(part), lanes(part), panel * lanes(part), matrix);
    }
  }

 private:
  static bool is_bias(Part part) { return part >= Part::kGateBias; }
  static bool is_down(Part part) { return part == Part::kDown || part == Part::kDownBias; }
  static bool is_gate(Part part) { return part == Part::kGate || part == Part::kGateBias; }

  std::int64_t padded_hidden() const { return round_up(hidden_, kPanelWidth); }
  std::int64_t padded_intermediate() const { return round_up(intermediate_, kPanelWidth); }
  std::int64_t columns_per_first_panel() const { return parts_.gate ? kHalfPanel : kPanelWidth; }
  std::int64_t first_bias_size() const { return num_first_panels() * kPanelWidth; }
  std::int64_t weights_size() const {
    return num_first_panels() * first_panel_size() + num_down_panels() * down_panel_size();
  }

  // Of a panel's 32 outputs, those that belong to a part.
  std::int64_t lanes(Part part) const { return is_down(part) ? kPanelWidth : columns_per_first_panel(); }
  std::int64_t first_lane(Part part) const {
    return is_gate(part) || is_down(part) ? 0 : kPanelWidth - columns_per_first_panel();
  }
  std::int64_t num_panels(Part part) const { return is_down(part) ? num_down_panels() : num_first_panels(); }
  std::int64_t padded_contraction(Part part) const { return is_down(part) ? padded_intermediate() : padded_hidden(); }
  std::int64_t bias_place(Part part, std::int64_t output) const {
    return output / lanes(part) * kPanelWidth + first_lane(part) + output % lanes(part);
  }

  const Element* panel_of(const std::byte* packed, std::int64_t expert, Part part, std::int64_t panel) const {
    if (is_down(part)) return down(packed, expert) + panel * down_panel_size();
    return first(packed, expert) + panel * first_panel_size();
  }
  const Accumulator* bias_of(const std::byte* packed, std::int64_t expert, Part part) const {
    return is_down(part) ? down_bias(packed, expert) : first_bias(packed, expert);
  }

  void check(Part part, std::int64_t rows, std::int64_t columns) const {
    if (is_gate(part) && !parts_.gate) throw std::invalid_argument("this kernel is for experts without a gate");
    if (is_bias(part) && !parts_.biases) throw std::invalid_argument("this kernel is for experts without biases");
    const std::int64_t outputs = is_down(part) ? hidden_ : intermediate_;
    const std::int64_t expected_rows = is_bias(part) ? 1 : outputs;
    const std::int64_t expected_columns = is_bias(part) ? outputs : is_down(part) ? intermediate_ : hidden_;
    if (rows == expected_rows && columns == expected_columns) return;
    throw std::invalid_argument("expected a matrix of " + std::to_string(expected_rows) + " x " +
                                std::to_string(expected_columns) + ", found " + std::to_string(rows) + " x " +
                                std::to_string(columns));
  }

  std::int64_t hidden_;
  std::int64_t intermediate_;
  Parts parts_;
};

using Bf16 = Dense<bf16>;
using Fp32 = Dense<float>;
using Fp64 = Dense<double>;

}  // namespace ktc::weight_format
