// Codes of blocks to numbers with AVX-512. Those of up to six bits are looked up, as bf16, in one or two registers.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "ktc/isa/avx512_lanes.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/decode_blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// The values of the codes of up to six bits, as bf16. A look-up reads five bits of an index, or six: shorter tables are
// repeated.
template <class Format>
struct NumberTable {
  static constexpr int kEntries = Format::kBits == 6 ? 64 : 32;
  alignas(64) static constexpr std::array<std::uint16_t, kEntries> kValues = [] {
    std::array<std::uint16_t, kEntries> values{};
    for (unsigned code = 0; code < kEntries; ++code) {
      const float number = Format::number(code % (1u << Format::kBits));
      values[code] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16);
    }
    return values;
  }();
};

// A vector of 32 numbers in fp32.
struct Halves {
  __m512 first;
  __m512 second;
};

// Some vectors of a block whose codes are read together: a line of the upper bits, or of all.
template <class Panel>
class CodeLines {
 public:
  using Format = typename Panel::Format;
  static constexpr int kVectors = Panel::kUnitVectors;
  static constexpr int kLines = Panel::kUnitLines;
  static constexpr bool kLookedUp = Format::kBits <= 6;

  [[gnu::always_inline]] CodeLines(const std::byte* block, std::int64_t index) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) {
      low_[line] = _mm512_load_si512(block + index * Panel::kUnitBytes + line * 64);
    }
    if constexpr (Panel::kHighBits > 0) high_ = _mm512_load_si512(block + index * Panel::kUnitBytes + kLines * 64);
  }

  // 32 numbers as bf16.
  [[gnu::always_inline]] __m512i words(int vector) const
    requires kLookedUp
  {
    constexpr int kPerLine = 16 / Panel::kLowBits;
    const auto* table = NumberTable<Format>::kValues.data();
    __m512i index = _mm512_srli_epi16(low_[vector / kPerLine], static_cast<unsigned>(vector % kPerLine * 4));
    if constexpr (Panel::kHighBits > 0) {
      const int up = 4 - Panel::high_shift(vector);
      const __m512i high = up >= 0 ? _mm512_slli_epi16(high_, static_cast<unsigned>(up))
                                   : _mm512_srli_epi16(high_, static_cast<unsigned>(-up));
      constexpr int kSelect = 0xca;  // the second operand where the first has ones, otherwise the third
      index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xf), index, high, kSelect);
    }
    if constexpr (Format::kBits == 6) {
      return _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32));
    }
    return _mm512_permutexvar_epi16(index, _mm512_load_si512(table));
  }

  // 32 numbers as fp32.
  [[gnu::always_inline]] Halves halves(int vector) const {
    if constexpr (kLookedUp) {
      const __m512i bits = words(vector);
      return {widened(_mm512_castsi512_si256(bits)), widened(_mm512_extracti64x4_epi64(bits, 1))};
    } else if constexpr (Format::kBits == 8) {
      const __m256i codes = vector == 0 ? _mm512_castsi512_si256(low_[0]) : _mm512_extracti64x4_epi64(low_[0], 1);
      return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes))),
              _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1)))};
    } else {
      return {_mm512_cvtph_ps(_mm512_castsi512_si256(low_[vector])),
              _mm512_cvtph_ps(_mm512_extracti64x4_epi64(low_[vector], 1))};
    }
  }

 private:
  static __m512 widened(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }

  __m512i low_[kLines];
  __m512i high_;
};

template <class Rounding, class Panel>
class BlockNumbers<avx512::Lanes<Rounding>, Panel> {
 public:
  using Lanes = avx512::Lanes<Rounding>;
  static constexpr int kVectors = CodeLines<Panel>::kVectors;

  [[gnu::always_inline]] BlockNumbers(const std::byte* block, std::int64_t index) : lines_(block, index) {}

  [[gnu::always_inline]] std::array<Lanes, 2> halves(int vector) const {
    const Halves numbers = lines_.halves(vector);
    return {Lanes(numbers.first), Lanes(numbers.second)};
  }

 private:
  CodeLines<Panel> lines_;
};

}  // namespace ktc::weight_format::inline KTC_UNIT
