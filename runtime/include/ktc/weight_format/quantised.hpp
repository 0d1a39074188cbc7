// Weights as codes with one scale per output and group of the contraction: a weight is code x scale in bf16.
//
// A panel is a sequence of groups, each [32 scales][blocks of codes]. A block is 32 outputs x 32 of the contraction in
// the order of a bf16 block (`panel.hpp`), whose vectors are 32 elements: 8-bit codes are in the order of these
// elements. Four consecutive vectors of 4-bit codes share a line of 64 bytes. Each is a nibble of its 32 words, so that
// a shift and a table look-up decode a vector.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ktc/element.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/layout.hpp"
#include "ktc/weight_format/packed.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

inline constexpr std::int64_t kLine = 64;

template <class CodeType, std::int64_t kGroupSize>
struct QuantisedPanel {
  using Element = bf16;
  using Code = CodeType;
  using Scale = typename Code::Scale;
  static constexpr const char* kCode = Code::kName;
  static constexpr std::int64_t kGroup = kGroupSize;
  static constexpr const char* kStored = nullptr;
  static constexpr bool kIntegerProducts = false;
  static constexpr bool kDecoded = true;
  static constexpr std::int64_t kBlockBytes = kBlock * Code::kBits / 8;
  static constexpr std::int64_t kScaleBytes = kPanelWidth * sizeof(Scale);
  static constexpr std::int64_t kGroupBlocks = kGroup / kPanelWidth;
  static_assert(kGroup > 0 && kGroup % kPanelWidth == 0 && kScaleBytes % kLine == 0);

  static std::int64_t num_groups(std::int64_t k) { return (k + kGroup - 1) / kGroup; }
  static std::int64_t bytes(std::int64_t padded_k) {
    return num_groups(padded_k) * kScaleBytes + padded_k / kPanelWidth * kBlockBytes;
  }
  // The offset of a block's scales and of its codes in its panel.
  static std::int64_t scales_at(std::int64_t block) {
    return block / kGroupBlocks * (kScaleBytes + kGroupBlocks * kBlockBytes);
  }
  static std::int64_t codes_at(std::int64_t block) {
    return scales_at(block) + kScaleBytes + block % kGroupBlocks * kBlockBytes;
  }

  static void check(const char* name, std::int64_t size) {
    if (Code::kBits == 8 || size % kGroup == 0) return;
    throw std::invalid_argument(std::string(kCode) + " weights in groups of " + decimal(kGroup) + ": " + name + " = " +
                                decimal(size) + " is no multiple of it");
  }

  // Quantises, after rounding to bf16. Throws std::invalid_argument for weights that are not finite.
  template <class Source>
  static void pack(const MatrixView<const Source>& source, const PartLanes& part) {
    for (std::int64_t row = 0; row < source.rows; ++row) {
      const Lane lane(part, row);
      const auto weight = [&](std::int64_t k) { return static_cast<float>(bf16(source.row(row)[k])); };
      for_groups(source.columns, [&](std::int64_t begin, std::int64_t end) {
        float largest = 0;
        bool finite = true;
        for (std::int64_t k = begin; k < end; ++k) {
          largest = std::max(largest, std::abs(weight(k)));
          finite = finite && std::isfinite(weight(k));
        }
        if (!finite) throw std::invalid_argument("weights that are not finite cannot be quantised");
        const Scale scale = Code::scale_of(largest);
        lane.put_scale(begin, scale);
        for (std::int64_t k = begin; k < end; ++k) lane.put(k, Code::encode(weight(k), scale));
      });
    }
  }

  static void pack_codes(const MatrixView<const std::uint8_t>& codes, const MatrixView<const float>& scales,
                         const PartLanes& part) {
    if (scales.rows != codes.rows || scales.columns != num_groups(codes.columns)) {
      throw std::invalid_argument("expected scales of " + decimal(codes.rows) + " x " +
                                  decimal(num_groups(codes.columns)) + ", found " + decimal(scales.rows) + " x " +
                                  decimal(scales.columns));
    }
    for (std::int64_t row = 0; row < codes.rows; ++row) {
      const Lane lane(part, row);
      for_groups(codes.columns, [&](std::int64_t begin, std::int64_t end) {
        const float value = scales.row(row)[num_groups(begin + 1) - 1];
        const auto scale = Scale(value);
        if (static_cast<float>(scale) != value) throw std::invalid_argument("a scale is not exact in this format");
        lane.put_scale(begin, scale);
        for (std::int64_t k = begin; k < end; ++k) lane.put(k, Code::from_stored(codes.row(row)[k]));
      });
    }
  }

  static void unpack(const PartLanes& part, const MatrixView<Element>& target) {
    for (std::int64_t row = 0; row < target.rows; ++row) {
      const Lane lane(part, row);
      for (std::int64_t k = 0; k < target.columns; ++k) target.row(row)[k] = lane.weight(k);
    }
  }

 private:
  // One output of a part: a lane of one panel.
  class Lane {
   public:
    Lane(const PartLanes& part, std::int64_t row)
        : panel_(part.panels + row / part.lanes * bytes(part.padded_k)), lane_(part.first_lane + row % part.lanes) {}

    void put_scale(std::int64_t k, Scale scale) const { scales(k)[lane_] = scale; }
    void put(std::int64_t k, std::uint8_t code) const {
      const Place place = place_of(k);
      auto byte = std::to_integer<unsigned>(*place.byte);
      byte = (byte & ~(kMask << place.shift)) | static_cast<unsigned>(code) << place.shift;
      *place.byte = static_cast<std::byte>(byte);
    }
    Element weight(std::int64_t k) const {
      const Place place = place_of(k);
      const auto code = static_cast<std::uint8_t>(std::to_integer<unsigned>(*place.byte) >> place.shift & kMask);
      return Element(Code::value(code) * static_cast<float>(scales(k)[lane_]));
    }

   private:
    static constexpr unsigned kMask = (1u << Code::kBits) - 1;
    struct Place {
      std::byte* byte;
      unsigned shift;
    };

    Scale* scales(std::int64_t k) const { return reinterpret_cast<Scale*>(panel_ + scales_at(k / kPanelWidth)); }
    Place place_of(std::int64_t k) const {
      std::byte* block = panel_ + codes_at(k / kPanelWidth);
      const std::int64_t offset = panel_offset<Element>(lane_, k % kPanelWidth);
      if constexpr (Code::kBits == 8) return {block + offset, 0};
      const std::int64_t vector = offset / 32;
      return {block + vector / 4 * kLine + offset % 32 * 2 + vector % 4 / 2, static_cast<unsigned>(vector % 2 * 4)};
    }

    std::byte* panel_;
    std::int64_t lane_;
  };

  // `body(begin, end)` for every group of a row of `columns`.
  template <class Body>
  static void for_groups(std::int64_t columns, const Body& body) {
    for (std::int64_t begin = 0; begin < columns; begin += kGroup) body(begin, std::min(begin + kGroup, columns));
  }
};

template <std::int64_t kGroup>
using Int4Panel = QuantisedPanel<Int4, kGroup>;
template <std::int64_t kGroup>
using Fp8Panel = QuantisedPanel<Fp8, kGroup>;

}  // namespace ktc::weight_format::inline KTC_UNIT
