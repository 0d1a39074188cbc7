// Weights as 8-bit integers with one scale per output, for products in integers.
//
// A panel is [32 fp32 scales][32 offsets][codes]. The codes of four neighbours of k are stored side by side, [k / 4][32
// outputs][4], as VPDPBUSD and the AMX tiles multiply them; k is padded to whole tiles of 64. The rows' codes are
// multiplied with 128 added. An offset is the resulting error of a sum: 128 times the sum of an output's codes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ktc/element.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/quantise_rows.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/layout.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

struct Int8Panel {
  using Element = bf16;
  static constexpr const char* kCode = Int8::kName;
  static constexpr std::int64_t kGroup = 0;
  static constexpr const char* kStored = nullptr;
  static constexpr bool kIntegerProducts = true;
  static constexpr bool kDecoded = true;
  static constexpr std::int64_t kBlockBytes = kBlock;
  static constexpr std::int64_t kOffsetsAt = kPanelWidth * sizeof(float);
  static constexpr std::int64_t kScaleBytes = kOffsetsAt + kPanelWidth * sizeof(std::int32_t);

  // The size of a row of codes, for a contraction padded to whole blocks.
  static std::int64_t contraction(std::int64_t padded_k) { return round_up(padded_k, 64); }
  static std::int64_t bytes(std::int64_t padded_k) { return kScaleBytes + contraction(padded_k) * kPanelWidth; }
  static std::int64_t scales_at(std::int64_t) { return 0; }
  static std::int64_t codes_at(std::int64_t block) { return kScaleBytes + block * kBlockBytes; }

  // The sum of 255 x -128 for each of this many weights still fits 32 bits.
  static void check(const char* name, std::int64_t size) {
    constexpr std::int64_t kLargest = 65536;
    if (size <= kLargest) return;
    throw std::invalid_argument(std::string("int8 products: ") + name + " = " + decimal(size) + " is more than " +
                                decimal(kLargest) + ", and a sum could overflow 32 bits");
  }

  // Quantises, after rounding to bf16. Throws std::invalid_argument for weights that are not finite.
  template <class Source>
  static void pack(const MatrixView<const Source>& source, const PartLanes& part) {
    for (std::int64_t row = 0; row < source.rows; ++row) {
      const auto weight = [&](std::int64_t k) { return static_cast<float>(bf16(source.row(row)[k])); };
      float largest = 0;
      bool finite = true;
      for (std::int64_t k = 0; k < source.columns; ++k) {
        largest = std::max(largest, std::abs(weight(k)));
        finite = finite && std::isfinite(weight(k));
      }
      if (!finite) throw std::invalid_argument("weights that are not finite cannot be quantised");
      const float scale = Int8::scale_of(largest);
      put_row(part, row, source.columns, scale, [&](std::int64_t k) { return Int8::encode(weight(k), scale); });
    }
  }

  static void pack_codes(const MatrixView<const std::uint8_t>& codes, const MatrixView<const float>& scales,
                         const PartLanes& part) {
    if (scales.rows != codes.rows || scales.columns != 1) {
      throw std::invalid_argument("expected scales of " + decimal(codes.rows) + " x 1, found " + decimal(scales.rows) +
                                  " x " + decimal(scales.columns));
    }
    for (std::int64_t row = 0; row < codes.rows; ++row) {
      put_row(part, row, codes.columns, scales.row(row)[0], [&](std::int64_t k) { return codes.row(row)[k]; });
    }
  }

  static void unpack(const PartLanes& part, const MatrixView<Element>& target) {
    for (std::int64_t row = 0; row < target.rows; ++row) {
      const Lane lane(part, row);
      for (std::int64_t k = 0; k < target.columns; ++k) {
        target.row(row)[k] = Element(Int8::value(*lane.code(k)) * *lane.scale());
      }
    }
  }

 private:
  // One output of a part: a lane of one panel.
  class Lane {
   public:
    Lane(const PartLanes& part, std::int64_t row)
        : panel_(part.panels + row / part.lanes * bytes(part.padded_k)), lane_(part.first_lane + row % part.lanes) {}

    float* scale() const { return reinterpret_cast<float*>(panel_) + lane_; }
    std::int32_t* offset() const { return reinterpret_cast<std::int32_t*>(panel_ + kOffsetsAt) + lane_; }
    std::uint8_t* code(std::int64_t k) const {
      return reinterpret_cast<std::uint8_t*>(panel_ + kScaleBytes) + panel_offset<std::uint8_t>(lane_, k);
    }

   private:
    std::byte* panel_;
    std::int64_t lane_;
  };

  template <class CodeOf>
  static void put_row(const PartLanes& part, std::int64_t row, std::int64_t columns, float scale,
                      const CodeOf& code_of) {
    const Lane lane(part, row);
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < columns; ++k) {
      const std::uint8_t code = code_of(k);
      *lane.code(k) = code;
      sum += static_cast<std::int8_t>(code);
    }
    *lane.scale() = scale;
    *lane.offset() = kCodeOffset * sum;
  }
};

}  // namespace ktc::weight_format::inline KTC_UNIT
