// Weights in the blocks of a GGUF file, multiplied as they are stored: the same bits in another order.
//
// A panel is a sequence of spans of `kSpanBlocks` x 32 weights of its 32 outputs: [`kHeadBytes` of scales][blocks]. A
// block is 32 x 32 codes in the order of a bf16 block (`panel.hpp`), whose 32 vectors are 32 elements each. The lower
// four bits of codes are in lines of 64 bytes for four consecutive vectors, a nibble of a word for each. Four lines of
// 5-bit codes and two of 6-bit codes are followed by one of their upper bits, each in the byte of a word that has its
// lower bits (`high_shift`). Codes of 8 and 16 bits are in the order of the elements.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"
#include "ktc/weight_format/layout.hpp"
#include "ktc/weight_format/packed.hpp"
#include "ktc/weight_format/panel.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// In fp32, the scales of 32 weights of each of a panel's outputs: of the whole 32, or of 16 and 16.
template <class Format>
struct BlockScales {
  static constexpr int kScales = Format::kScales;
  alignas(64) float scale[std::max(kScales, 1)][kPanelWidth];
  alignas(64) float min[kPanelWidth];

  BlockScales(const std::byte* head, std::int64_t block) {
    if constexpr (kScales > 0) Format::scales(head, block, scale, min);
  }
};

template <BlockFormat FormatType>
struct BlockPanel {
  using Element = bf16;
  using Format = FormatType;
  static constexpr const char* kCode = nullptr;
  static constexpr std::int64_t kGroup = 0;
  static constexpr const char* kStored = Format::kName;
  static constexpr bool kIntegerProducts = false;
  static constexpr bool kDecoded = true;
  static constexpr int kHighBits = Format::kBits == 5 ? 1 : Format::kBits == 6 ? 2 : 0;
  static constexpr int kLowBits = Format::kBits - kHighBits;
  // Vectors of a unit: those of a line of upper bits, which follows `kUnitLines` of lower ones.
  static constexpr int kUnitVectors = kHighBits > 0 ? 16 / kHighBits : std::max(2, 16 / Format::kBits);
  static constexpr int kUnitLines = kUnitVectors * kLowBits / 16;
  static constexpr std::int64_t kUnitBytes = kUnitVectors * kPanelWidth * Format::kBits / 8;
  static constexpr std::int64_t kBlockBytes = kBlock * Format::kBits / 8;
  static constexpr std::int64_t kScaleBytes = Format::kHeadBytes;
  static constexpr std::int64_t kSpanBlocks = Format::kSpanBlocks;
  static constexpr std::int64_t kSpanBytes = kScaleBytes + kSpanBlocks * kBlockBytes;
  static_assert(kScaleBytes % 64 == 0 && kBlockBytes % 64 == 0);

  // The place of the upper bits of a vector's codes in the words of their unit's line. The lower bits of vectors 0 and
  // 1 of four are in the first byte of a word, and those of 2 and 3 in the second one.
  static constexpr int high_shift(int vector) { return vector % 4 / 2 * 8 + (vector / 4 * 2 + vector % 2) * kHighBits; }

  static std::int64_t bytes(std::int64_t padded_k) {
    return (padded_k / kPanelWidth + kSpanBlocks - 1) / kSpanBlocks * kSpanBytes;
  }
  static std::int64_t scales_at(std::int64_t block) { return block / kSpanBlocks * kSpanBytes; }
  static std::int64_t codes_at(std::int64_t block) {
    return scales_at(block) + kScaleBytes + block % kSpanBlocks * kBlockBytes;
  }

  static void check(const char* name, std::int64_t size) {
    if (size % Format::kWeights == 0) return;
    throw std::invalid_argument(std::string(kStored) + " weights in blocks of " + decimal(Format::kWeights) + ": " +
                                name + " = " + decimal(size) + " is no multiple of it");
  }

  static constexpr bool kMatrixScale = requires(float largest) { Format::matrix_scale(largest); };
  // The scale that all blocks of a matrix share.
  template <class Source>
  static float matrix_scale(const MatrixView<const Source>& source) {
    float largest = 0;
    for (std::int64_t row = 0; row < source.rows; ++row) {
      for (std::int64_t k = 0; k < source.columns; ++k) {
        largest = std::max(largest, std::abs(static_cast<float>(source.row(row)[k])));
      }
    }
    return Format::matrix_scale(largest);
  }

  // `shared` is the `matrix_scale` of the whole matrix, where there is one.
  // Throws std::invalid_argument for weights that are not finite, and for formats that are only read.
  template <class Source>
  static void pack(const MatrixView<const Source>& source, const PartLanes& part, [[maybe_unused]] float shared = 0) {
    if constexpr (Format::kQuantises) {
      float weights[Format::kWeights];
      std::uint8_t stored[Format::kStoredBytes];
      for (std::int64_t row = 0; row < source.rows; ++row) {
        for (std::int64_t k = 0; k < source.columns; k += Format::kWeights) {
          for (int i = 0; i < Format::kWeights; ++i) {
            weights[i] = static_cast<float>(source.row(row)[k + i]);
            if (!std::isfinite(weights[i])) {
              throw std::invalid_argument("weights that are not finite cannot be quantised");
            }
          }
          if constexpr (kMatrixScale) {
            Format::quantise(weights, stored, shared);
          } else {
            Format::quantise(weights, stored);
          }
          put_block(stored, part, row, k);
        }
      }
    } else {
      throw std::invalid_argument(std::string(kStored) + " weights are taken only as a file stores them");
    }
  }

  // `blocks` as a file stores them, (rows, bytes of a row).
  static void pack_blocks(const MatrixView<const std::uint8_t>& blocks, const PartLanes& part) {
    for (std::int64_t row = 0; row < blocks.rows; ++row) {
      for (std::int64_t at = 0; at < blocks.columns; at += Format::kStoredBytes) {
        put_block(blocks.row(row) + at, part, row, at / Format::kStoredBytes * Format::kWeights);
      }
    }
  }

  static void unpack(const PartLanes& part, const MatrixView<Element>& target) {
    for (std::int64_t row = 0; row < target.rows; ++row) {
      const std::byte* panel = part.panels + row / part.lanes * bytes(part.padded_k);
      const std::int64_t lane = part.first_lane + row % part.lanes;
      for (std::int64_t block = 0; block * kPanelWidth < target.columns; ++block) {
        const BlockScales<Format> scales(panel + scales_at(block), block % kSpanBlocks);
        for (std::int64_t k = 0; k < kPanelWidth && block * kPanelWidth + k < target.columns; ++k) {
          const unsigned code = code_at(panel + codes_at(block), panel_offset<Element>(lane, k));
          target.row(row)[block * kPanelWidth + k] = Element(weight(scales, code, lane, k));
        }
      }
    }
  }

  // One weight in fp32, where all but the last step is exact.
  static float weight(const BlockScales<Format>& scales, unsigned code, std::int64_t lane, std::int64_t k) {
    const float number = Format::number(code);
    if constexpr (Format::kScales == 0) return number;
    const float product = scales.scale[k * Format::kScales / kPanelWidth][lane] * number;
    if constexpr (!Format::kMins) return product;
    return product - scales.min[lane];
  }

  // The code of the element at `offset` of a block.
  static unsigned code_at(const std::byte* block, std::int64_t offset) {
    if constexpr (kLowBits == 16) return word_at(block, offset);
    if constexpr (kLowBits == 8) return std::to_integer<unsigned>(block[offset]);
    const Place low = low_place(offset);
    unsigned code = word_at(block, low.word) >> low.shift & 0xf;
    if constexpr (kHighBits > 0) {
      const Place high = high_place(offset);
      code |= (word_at(block, high.word) >> high.shift & ((1u << kHighBits) - 1)) << 4;
    }
    return code;
  }

 private:
  // The place of an element's bits: their 16-bit word, and their shift in it.
  struct Place {
    std::int64_t word;
    unsigned shift;
  };
  static Place low_place(std::int64_t offset) {
    const std::int64_t vector = offset / kPanelWidth % kUnitVectors;
    return {unit_word(offset) + vector / 4 * kPanelWidth, static_cast<unsigned>(vector % 4) * 4};
  }
  static Place high_place(std::int64_t offset) {
    const int vector = static_cast<int>(offset / kPanelWidth % kUnitVectors);
    return {unit_word(offset) + kUnitLines * kPanelWidth, static_cast<unsigned>(high_shift(vector))};
  }
  // Of an element, in the first line of its unit.
  static std::int64_t unit_word(std::int64_t offset) {
    return offset / kPanelWidth / kUnitVectors * (kUnitBytes / 2) + offset % kPanelWidth;
  }

  static unsigned word_at(const std::byte* words, std::int64_t index) {
    std::uint16_t word;
    std::memcpy(&word, words + 2 * index, sizeof(word));
    return word;
  }
  template <int kBits>
  static void put_bits(std::byte* words, Place place, unsigned bits) {
    constexpr unsigned kMask = (1u << kBits) - 1;
    const unsigned others = word_at(words, place.word) & ~(kMask << place.shift);
    const auto word = static_cast<std::uint16_t>(others | (bits & kMask) << place.shift);
    std::memcpy(words + 2 * place.word, &word, sizeof(word));
  }
  static void put(std::byte* block, std::int64_t offset, unsigned code) {
    if constexpr (kLowBits == 16) return put_bits<16>(block, {offset, 0}, code);
    if constexpr (kLowBits == 8) {
      block[offset] = static_cast<std::byte>(code);
      return;
    }
    put_bits<4>(block, low_place(offset), code);
    if constexpr (kHighBits > 0) put_bits<std::max(kHighBits, 1)>(block, high_place(offset), code >> 4);
  }

  // A stored block that begins at weight `first` of a row.
  static void put_block(const std::uint8_t* stored, const PartLanes& part, std::int64_t row, std::int64_t first) {
    std::byte* panel = part.panels + row / part.lanes * bytes(part.padded_k);
    const std::int64_t lane = part.first_lane + row % part.lanes;
    const std::int64_t block = first / kPanelWidth;
    if constexpr (Format::kScales > 0) {
      std::byte* head = panel + scales_at(block);
      if constexpr (requires { Format::put_shared(stored, head, lane); }) Format::put_shared(stored, head, lane);
      Format::put_head(stored, head + block % kSpanBlocks * Format::kBlockHeadBytes, lane);
    }
    for (int k = 0; k < Format::kWeights; ++k) {
      const std::int64_t at = first + k;
      put(panel + codes_at(at / kPanelWidth), panel_offset<Element>(lane, at % kPanelWidth), Format::code(stored, k));
    }
  }
};

template <class Panel>
concept StoredInBlocks = Panel::kStored != nullptr;

}  // namespace ktc::weight_format::inline KTC_UNIT
