// Packed rows of bf16 as 16-bit fixed point, for products with integer codes: 32 values of a row share a scale, the
// power of two with which the largest has 15 bits. A value above 1/128 of the largest keeps all bits of its bf16; the
// error of a smaller one is at most 2^-15 of the largest.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// Of 32 values of a row: a value is `scale` times its word. The words' sums are of the first 16 and of the others, and
// `sum` is that of all values.
struct FixedPointBlock {
  float scale;
  float sum;
  std::int32_t sums[2];
};

// `words` [k / 2][rows][2], as the packed rows; `blocks` [k / 32][rows]. The first scale of a row is NaN if one of its
// values is infinite or a NaN: then a product with its words is NaN too. It says nothing of other rows.
struct FixedPointRows {
  const std::int16_t* words;
  const FixedPointBlock* blocks;
  int rows;

  // The values from `k` on, a multiple of 32. Only the first ones say whether a row is finite.
  FixedPointRows from(std::int64_t k) const {
    return {.words = words + k * rows, .blocks = blocks + k / kPanelWidth * rows, .rows = rows};
  }
  bool finite(int row) const { return !std::isnan(blocks[row].scale); }
  bool finite() const {
    bool all = true;
    for (int row = 0; row < rows; ++row) all &= finite(row);
    return all;
  }
};

// The bytes of `rows` rows: words, then blocks.
constexpr std::int64_t fixed_point_bytes(std::int64_t rows, std::int64_t padded_k) {
  return rows * (padded_k * 2 + padded_k / kPanelWidth * static_cast<std::int64_t>(sizeof(FixedPointBlock)));
}

// 32 neighbours. Returns whether all are finite; otherwise the words are zero. Values below 2^-100 count as zero where
// the largest is one, since the inverse of the scale might not be finite.
inline bool to_fixed_point(const std::uint16_t* bits, std::int16_t* words, FixedPointBlock& block) {
  constexpr int kBias = 127;
  constexpr int kWordBits = 14;  // of the largest, below its first
  std::uint16_t largest = 0;
  for (int k = 0; k < kPanelWidth; ++k) largest = std::max<std::uint16_t>(largest, bits[k] & 0x7fff);
  const int exponent = (largest >> 7) - kBias;
  block = {};
  const bool finite = exponent <= kBias;
  if (!finite || exponent < -100) {
    std::fill(words, words + kPanelWidth, std::int16_t{});
    return finite;
  }
  const auto power = [](int of_two) { return std::bit_cast<float>(static_cast<std::uint32_t>(of_two + kBias) << 23); };
  const float inverse = power(kWordBits - exponent);
  block.scale = power(exponent - kWordBits);
  for (int k = 0; k < kPanelWidth; ++k) {
    // Adding 1.5 x 2^23 rounds to an integer, to nearest even, and leaves it in the lower bits.
    const float value = std::bit_cast<float>(static_cast<std::uint32_t>(bits[k]) << 16) * inverse + 0x1.8p23f;
    words[k] = static_cast<std::int16_t>(std::bit_cast<std::uint32_t>(value));
  }
  for (int half = 0; half < 2; ++half) {
    std::int32_t sum = 0;
    for (int k = 0; k < kHalfPanel; ++k) sum += words[half * kHalfPanel + k];
    block.sums[half] = sum;
  }
  block.sum = block.scale * static_cast<float>(block.sums[0] + block.sums[1]);
  return true;
}

inline FixedPointRows fixed_point_rows(const std::byte* converted, int rows, std::int64_t padded_k) {
  return {.words = reinterpret_cast<const std::int16_t*>(converted),
          .blocks = reinterpret_cast<const FixedPointBlock*>(converted + rows * padded_k * 2),
          .rows = rows};
}

// Packed rows [k / 2][rows][2] into `target`, of `fixed_point_bytes`.
inline void to_fixed_point(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
  constexpr std::int64_t kPairs = kPanelWidth / 2;
  constexpr std::size_t kPairBytes = 2 * sizeof(bf16);
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  auto* words = reinterpret_cast<std::int16_t*>(target);
  auto* blocks = reinterpret_cast<FixedPointBlock*>(target + rows * padded_k * 2);
  auto* const first = blocks;
  for (std::int64_t k = 0; k < padded_k; k += kPanelWidth, a += rows * kPanelWidth, words += rows * kPanelWidth) {
    for (int row = 0; row < rows; ++row, ++blocks) {
      // Aligned, since GCC 12 stores them as whole vectors but gives them less where the address sanitizer moves them.
      alignas(64) std::uint16_t bits[kPanelWidth];
      alignas(64) std::int16_t row_words[kPanelWidth];
      if (rows == 1) {
        std::memcpy(bits, a, sizeof(bits));
        if (!to_fixed_point(bits, row_words, *blocks)) first[row].scale = kNaN;
        std::memcpy(words, row_words, sizeof(row_words));
        continue;
      }
      for (std::int64_t pair = 0; pair < kPairs; ++pair) {
        std::memcpy(bits + 2 * pair, a + (pair * rows + row) * 2, kPairBytes);
      }
      if (!to_fixed_point(bits, row_words, *blocks)) first[row].scale = kNaN;
      for (std::int64_t pair = 0; pair < kPairs; ++pair) {
        std::memcpy(words + (pair * rows + row) * 2, row_words + 2 * pair, kPairBytes);
      }
    }
  }
}

// The words of one row as bytes in the same place, for codes that are bytes: a word is 256 times a signed byte less
// another one. Of each four neighbours the first bytes of 0, 2, 1 and 3 are followed by the second ones.
inline void split_words(std::int64_t padded_k, std::byte* row) {
  constexpr std::int64_t kQuads = kPanelWidth / 4;
  constexpr std::uint64_t kBytes = 0x00ff00ff00ff00ff;
  std::int16_t words[kPanelWidth];
  std::uint16_t split[kPanelWidth];
  std::uint64_t quads[kQuads];
  for (std::int64_t k = 0; k < padded_k; k += kPanelWidth, row += sizeof(words)) {
    std::memcpy(words, row, sizeof(words));
    for (int i = 0; i < kPanelWidth; ++i) {
      const int upper = (words[i] + 127) >> 8;  // at most 127, since no word is above 32640
      const int lower = 256 * upper - words[i];
      split[i] = static_cast<std::uint16_t>((upper & 0xff) | lower << 8);
    }
    std::memcpy(quads, split, sizeof(quads));
    for (std::uint64_t& quad : quads) {
      const std::uint64_t upper = quad & kBytes, lower = quad >> 8 & kBytes;
      quad = ((upper | upper >> 24) & 0xffffffff) | (lower | lower >> 24) << 32;
    }
    std::memcpy(row, quads, sizeof(quads));
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
