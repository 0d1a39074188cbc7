// Keys as codes of few bits: centred, rotated by Hadamard matrices with fixed signs, and rounded to 4 bits with a scale
// or to their signs. Every step rounds as in `ktc/model/attention/key_codes.py`, so the codes are equal on every
// machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ktc/interface/attention.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::inline KTC_UNIT {

// The numbers whose codes are a group.
inline std::int64_t group_size(const KeyLayout& layout) {
  return layout.format == KeyFormat::kInt4 ? 8 : 32;
}

inline std::int64_t groups_of(const KeyLayout& layout) {
  return (layout.width + group_size(layout) - 1) / group_size(layout);
}

// Of 16 keys.
inline std::int64_t block_bytes(const KeyLayout& layout) {
  return groups_of(layout) * kGroupBytes;
}

inline std::int64_t padded_width(const KeyLayout& layout) {
  return groups_of(layout) * group_size(layout);
}

struct KeyCodes {
  // Multiplies `width` numbers by their signs and by one orthogonal Hadamard matrix per power of two in `width`.
  static void rotate(float* numbers, std::int64_t width, const float* signs) {
    for (std::int64_t k = 0; k < width; ++k) numbers[k] *= signs[k];
    for (std::int64_t size = largest_power(width), left = width; left > 0; left -= size, size = largest_power(left)) {
      hadamard(numbers, size);
      numbers += size;
      if (left == size) return;
    }
  }

  // Writes the codes of one key, whose centred and rotated numbers are given, and returns its scale. `block` holds the
  // codes of 16 keys.
  static weight_format::fp16 encode(const float* numbers, const KeyLayout& layout, std::int64_t key,
                                    std::uint8_t* block) {
    return layout.format == KeyFormat::kInt4 ? encode_nibbles(numbers, layout, key, block)
                                             : encode_bits(numbers, layout, key, block);
  }

  // Codes of a rotated query, followed by zeros, and their scale.
  static float encode_query(const float* numbers, const KeyLayout& layout, std::int8_t* codes) {
    const float largest = layout.format == KeyFormat::kInt4 ? 127.0f : kLargestBesideBits;
    const float scale = greatest(numbers, layout.width) / largest;
    for (std::int64_t k = 0; k < layout.width; ++k) {
      codes[k] = static_cast<std::int8_t>(code(numbers[k] / scale, largest));
    }
    std::fill(codes + layout.width, codes + padded_width(layout), std::int8_t{0});
    return scale;
  }

 private:
  static std::int64_t largest_power(std::int64_t width) {
    std::int64_t size = 1;
    while (2 * size <= width) size *= 2;
    return size;
  }

  static void hadamard(float* numbers, std::int64_t size) {
    for (std::int64_t half = 1; half < size; half *= 2) {
      for (std::int64_t pair = 0; pair < size; pair += 2 * half) {
        for (std::int64_t k = pair; k < pair + half; ++k) {
          const float low = numbers[k], high = numbers[k + half];
          numbers[k] = low + high;
          numbers[k + half] = low - high;
        }
      }
    }
    const auto factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
    for (std::int64_t k = 0; k < size; ++k) numbers[k] *= factor;
  }

  // A NaN counts as greater than any number.
  static float greatest(const float* numbers, std::int64_t width) {
    float greatest_number = 0.0f, invalid = 0.0f;
    for (std::int64_t k = 0; k < width; ++k) {
      const float magnitude = std::abs(numbers[k]);
      greatest_number = magnitude > greatest_number ? magnitude : greatest_number;
      invalid = numbers[k] != numbers[k] ? numbers[k] : invalid;
    }
    return invalid != invalid ? invalid : greatest_number;
  }

  // To nearest even, at most `largest`; NaN becomes 0.
  static int code(float value, float largest) {
    const float bounded = value > largest ? largest : value < -largest ? -largest : value;
    return bounded != bounded ? 0 : static_cast<int>(std::nearbyint(bounded));
  }

  static weight_format::fp16 encode_nibbles(const float* numbers, const KeyLayout& layout, std::int64_t key,
                                            std::uint8_t* block) {
    const auto scale = weight_format::fp16::nearest(greatest(numbers, layout.width) / 7.0f);
    const auto step = static_cast<float>(scale);
    const auto nibble = [&](std::int64_t k) {
      return k < layout.width && step != 0.0f ? code(numbers[k] / step, 7) + 8 : 8;
    };
    for (std::int64_t group = 0; group < groups_of(layout); ++group) {
      std::uint8_t* four = block + group * kGroupBytes + key * 4;
      for (std::int64_t k = 0; k < 4; ++k) {
        four[k] = static_cast<std::uint8_t>(nibble(group * 8 + k) | nibble(group * 8 + 4 + k) << 4);
      }
    }
    return scale;
  }

  static weight_format::fp16 encode_bits(const float* numbers, const KeyLayout& layout, std::int64_t key,
                                         std::uint8_t* block) {
    double squares = 0.0, magnitudes = 0.0;
    for (std::int64_t k = 0; k < layout.width; ++k) {
      const double number = numbers[k];
      squares += number * number;
      magnitudes += std::abs(number);
    }
    for (std::int64_t group = 0; group < groups_of(layout); ++group) {
      std::uint8_t* four = block + group * kGroupBytes + key * 4;
      for (std::int64_t byte = 0; byte < 4; ++byte) {
        unsigned bits = 0;
        for (std::int64_t bit = 0; bit < 8; ++bit) {
          const std::int64_t at = group * 32 + bit * 4 + byte;
          bits |= static_cast<unsigned>(at < layout.width && !(numbers[at] < 0.0f)) << bit;
        }
        four[byte] = static_cast<std::uint8_t>(bits);
      }
    }
    return weight_format::fp16::nearest(magnitudes == 0.0 ? 0.0f : static_cast<float>(squares / magnitudes));
  }
};

}  // namespace ktc::inline KTC_UNIT
