// The layout of an expert's parts in its packed form, for every type of panel.
//
// An expert is [first panels][H/32 down panels][biases]. A first panel, of the product that reads hidden states, holds
// 16 outputs of gate and the same 16 of up, so that the activation has both when one product ends; 32 of up without a
// gate. Biases are kept as accumulators, in the order of the panels' outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ktc/interface/moe.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// The parts that an expert has beside up and down.
struct Parts {
  bool gate;
  bool biases;
};

inline bool is_bias(Part part) {
  return part >= Part::kGateBias;
}
inline bool is_down(Part part) {
  return part == Part::kDown || part == Part::kDownBias;
}
inline bool is_gate(Part part) {
  return part == Part::kGate || part == Part::kGateBias;
}

// The lanes of one part in all panels that hold it: row `panel * lanes + i` is lane `first_lane + i` of its panel.
struct PartLanes {
  std::byte* panels;
  std::int64_t num_panels;
  std::int64_t padded_k;
  std::int64_t first_lane;
  std::int64_t lanes;
};

class ExpertLayout {
 public:
  ExpertLayout(std::int64_t hidden, std::int64_t intermediate, Parts parts)
      : hidden_(hidden), intermediate_(intermediate), parts_(parts) {}

  Parts parts() const { return parts_; }
  std::int64_t padded_hidden() const { return round_up(hidden_, kPanelWidth); }
  std::int64_t padded_intermediate() const { return round_up(intermediate_, kPanelWidth); }
  std::int64_t num_first_panels() const { return padded_intermediate() / columns_per_first_panel(); }
  std::int64_t num_down_panels() const { return padded_hidden() / kPanelWidth; }

  std::int64_t outputs(Part part) const { return is_down(part) ? hidden_ : intermediate_; }
  std::int64_t num_panels(Part part) const { return is_down(part) ? num_down_panels() : num_first_panels(); }
  std::int64_t padded_contraction(Part part) const { return is_down(part) ? padded_intermediate() : padded_hidden(); }
  // The number of a panel's 32 outputs that belong to a part.
  std::int64_t lanes(Part part) const { return is_down(part) ? kPanelWidth : columns_per_first_panel(); }
  std::int64_t first_lane(Part part) const {
    return is_gate(part) || is_down(part) ? 0 : kPanelWidth - columns_per_first_panel();
  }
  std::int64_t bias_place(Part part, std::int64_t output) const {
    return output / lanes(part) * kPanelWidth + first_lane(part) + output % lanes(part);
  }
  std::int64_t first_bias_size() const { return num_first_panels() * kPanelWidth; }

  // Throws std::invalid_argument if a part does not belong to this layer or has another shape.
  void check(Part part, std::int64_t rows, std::int64_t columns) const {
    if (is_gate(part) && !parts_.gate) throw std::invalid_argument("this kernel is for experts without a gate");
    if (is_bias(part) && !parts_.biases) throw std::invalid_argument("this kernel is for experts without biases");
    const std::int64_t expected_rows = is_bias(part) ? 1 : outputs(part);
    const std::int64_t expected_columns = is_bias(part) ? outputs(part) : is_down(part) ? intermediate_ : hidden_;
    if (rows == expected_rows && columns == expected_columns) return;
    throw std::invalid_argument("expected a matrix of " + decimal(expected_rows) + " x " + decimal(expected_columns) +
                                ", found " + decimal(rows) + " x " + decimal(columns));
  }

 private:
  std::int64_t columns_per_first_panel() const { return parts_.gate ? kHalfPanel : kPanelWidth; }

  std::int64_t hidden_;
  std::int64_t intermediate_;
  Parts parts_;
};

}  // namespace ktc::weight_format::inline KTC_UNIT
