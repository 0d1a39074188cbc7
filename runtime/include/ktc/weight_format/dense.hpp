// Unquantised expert weights: what is stored is what is multiplied.
//
// An expert is [I/16 gate-and-up panels][H/32 down panels]. A gate-and-up panel holds 16 outputs of gate and the same
// 16 of up, so that the activation of both is at hand when one product ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ktc/weight_format/panel.hpp"

namespace ktc::weight_format {

enum class Part { kGate, kUp, kDown };

template <class ElementType>
class Dense {
 public:
  using Element = ElementType;

  Dense(std::int64_t hidden, std::int64_t intermediate) : hidden_(hidden), intermediate_(intermediate) {}

  std::int64_t num_gate_up_panels() const { return padded_intermediate() / kHalfPanel; }
  std::int64_t num_down_panels() const { return padded_hidden() / kPanelWidth; }
  std::int64_t gate_up_panel_size() const { return padded_hidden() * kPanelWidth; }
  std::int64_t down_panel_size() const { return padded_intermediate() * kPanelWidth; }
  std::int64_t gate_up_size() const { return num_gate_up_panels() * gate_up_panel_size(); }
  std::int64_t expert_size() const { return gate_up_size() + num_down_panels() * down_panel_size(); }

  const Element* gate_up(const std::byte* packed, std::int64_t expert) const {
    return reinterpret_cast<const Element*>(packed) + expert * expert_size();
  }
  const Element* down(const std::byte* packed, std::int64_t expert) const {
    return gate_up(packed, expert) + gate_up_size();
  }

  // `source` is (I, H) for gate and up, (H, I) for down.
  template <class Source>
  void pack(std::byte* packed, std::int64_t expert, Part part, const MatrixView<const Source>& source) const {
    check(part, source.rows, source.columns);
    for (std::int64_t panel = 0; panel < num_panels(part); ++panel) {
      pack_lanes(source, panel * lanes(part), lanes(part), first_lane(part), padded_contraction(part),
                 const_cast<Element*>(panel_of(packed, expert, part, panel)));
    }
  }

  void unpack(const std::byte* packed, std::int64_t expert, Part part, const MatrixView<Element>& target) const {
    check(part, target.rows, target.columns);
    for (std::int64_t panel = 0; panel < num_panels(part); ++panel) {
      unpack_lanes(panel_of(packed, expert, part, panel), first_lane(part), lanes(part), panel * lanes(part), target);
    }
  }

 private:
  std::int64_t padded_hidden() const { return round_up(hidden_, kPanelWidth); }
  std::int64_t padded_intermediate() const { return round_up(intermediate_, kPanelWidth); }

  static std::int64_t lanes(Part part) { return part == Part::kDown ? kPanelWidth : kHalfPanel; }
  static std::int64_t first_lane(Part part) { return part == Part::kUp ? kHalfPanel : 0; }
  std::int64_t num_panels(Part part) const { return part == Part::kDown ? num_down_panels() : num_gate_up_panels(); }
  std::int64_t padded_contraction(Part part) const {
    return part == Part::kDown ? padded_intermediate() : padded_hidden();
  }

  const Element* panel_of(const std::byte* packed, std::int64_t expert, Part part, std::int64_t panel) const {
    if (part == Part::kDown) return down(packed, expert) + panel * down_panel_size();
    return gate_up(packed, expert) + panel * gate_up_panel_size();
  }

  void check(Part part, std::int64_t rows, std::int64_t columns) const {
    const std::int64_t expected_rows = part == Part::kDown ? hidden_ : intermediate_;
    const std::int64_t expected_columns = part == Part::kDown ? intermediate_ : hidden_;
    if (rows == expected_rows && columns == expected_columns) return;
    throw std::invalid_argument("expected a matrix of " + std::to_string(expected_rows) + " x " +
                                std::to_string(expected_columns) + ", found " + std::to_string(rows) + " x " +
                                std::to_string(columns));
  }

  std::int64_t hidden_;
  std::int64_t intermediate_;
};

using Bf16 = Dense<bf16>;
using Fp32 = Dense<float>;
using Fp64 = Dense<double>;

}  // namespace ktc::weight_format
