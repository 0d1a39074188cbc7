// A few rows multiplied with integer codes as they are stored, for ISAs without VDPBF16PS. Rows are 16-bit fixed point
// (`fixed_point_rows.hpp`), so that one VPMADDWD does what takes two multiplications in fp32, and codes are not
// converted. The sum of 32 products is exact. It is multiplied by both scales and added in fp32, block after block:
// the order of a sum depends on neither the ISA nor the other rows.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/code_words.hpp"
#include "ktc/weight_format/fixed_point_rows.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// Rows at a time, for which the registers of AVX2 hold the sums of a strip, codes and a row's value.
inline constexpr int kWordRows = 4;

// Integer sums of a strip's two halves: of 8 or 16 outputs each, and of `kRows` rows.
template <class Words, int kRows>
struct WordSums {
  typename Words::Vector of[2][kRows];

  [[gnu::always_inline]] void start(int row, std::int32_t value) { of[0][row] = of[1][row] = Words::sums(value); }

  // The vectors of a step, `at` the values of its rows.
  template <class Panel>
  [[gnu::always_inline]] void add(const CodeWords<Words, Panel>& lines, const Neighbours* at, std::int64_t stride) {
#pragma GCC unroll 16
    for (int vector = 0; vector < CodeWords<Words, Panel>::kVectors; ++vector) {
      const typename Words::Vector words = lines.words(vector);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        auto& to = of[vector % 2][row];
        to = Words::add_products_in_order(to, words, Words::pairs(at[vector / 2 * stride + row]));
      }
    }
  }
  [[gnu::always_inline]] void finish() {}
};

// The same of one row whose words are split into bytes (`split_words`), and codes as bytes: VPMADDUBSW multiplies twice
// as many of them, and half as many instructions put codes together. Sums of words are widened before they overflow.
template <class Words, class Panel>
class ByteSums {
  using Lines = CodeWords<Words, Panel>;
  using Vector = typename Words::Vector;
  static constexpr int kQuads = Lines::kVectors / 4;
  static constexpr std::int64_t kMostProducts =
      ((std::int64_t{1} << (Words::kByteSumBits - 1)) - 1) / (2 * 128 * Lines::kLargestByte);  // two at a time
  static constexpr bool kWidenedLast = kMostProducts >= kPanelWidth / 4 / IntegerCodes<Panel>::kScales;
  static_assert(kMostProducts >= kQuads);

 public:
  Vector of[2][1];

  [[gnu::always_inline]] void start(int, std::int32_t value) {
    of[0][0] = of[1][0] = Words::sums(value);
    clear();
  }
  [[gnu::always_inline]] void add(const Lines& lines, const Neighbours* at, std::int64_t) {
#pragma GCC unroll 4
    for (int quad = 0; quad < kQuads; ++quad) {
      const Neighbours* bytes = at + quad * 2;
      const Vector of_first = Words::pairs(bytes[0]), of_second = Words::pairs(bytes[1]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Vector codes = lines.bytes(quad, half);
        first_[half] = Words::add_byte_products(first_[half], codes, of_first);
        second_[half] = Words::add_byte_products(second_[half], codes, of_second);
      }
    }
    if (kWidenedLast) return;
    widen();
    clear();
  }
  [[gnu::always_inline]] void finish() {
    if (kWidenedLast) widen();
  }

 private:
  [[gnu::always_inline]] void clear() { first_[0] = first_[1] = second_[0] = second_[1] = Words::all(std::int16_t{0}); }
  [[gnu::always_inline]] void widen() {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      of[half][0] = Words::add_byte_sums(of[half][0], first_[half], second_[half]);
    }
  }

  Vector first_[2];  // of the rows' upper bytes, for the outputs of either half
  Vector second_[2];
};

// `kAlone`: it is the only row, so that strides are constants and all steps are unrolled. Its words are split where
// codes are multiplied as bytes (`to_row_words`).
template <class Words, class Panel, int kRows, bool kAlone>
[[gnu::noinline]] void multiply_words_of(std::int64_t padded_k, const FixedPointRows& x, int first_row,
                                         const CodedPanel& stored, float* tile) {
  using Codes = IntegerCodes<Panel>;
  using Lines = CodeWords<Words, Panel>;
  using Floats = typename Words::Floats;
  using Span = typename Codes::template Scales<Words>;
  constexpr bool kAsBytes = kAlone && Lines::kBytes;
  using Sums = std::conditional_t<kAsBytes, ByteSums<Words, Panel>, WordSums<Words, kRows>>;
  static_assert(!kAlone || kRows == 1);
  using Numbers = WordNumbers<Panel>;
  constexpr auto kOffset = static_cast<std::uint32_t>(kAsBytes ? Numbers::kByteOffset : Numbers::kOffset);
  constexpr int kStrips = static_cast<int>(kHalfPanel / Words::kOutputs);
  constexpr int kTogether = kRows <= 2 ? kStrips : 1;  // of strips whose sums fit the registers: a value is read once
  constexpr std::int64_t kSteps = kBlock / kPanelWidth / Lines::kVectors / Codes::kScales;  // of a scale
  constexpr std::int64_t kStepBytes = Panel::kBlockBytes / (kSteps * Codes::kScales);
  constexpr std::int64_t kPairs = kPanelWidth / 2;
  const std::byte* const panel = stored.begin;
  Floats total[kStrips][2][kRows];
#pragma GCC unroll 2
  for (auto& strip : total) {
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) strip[0][row] = strip[1][row] = Words::all(0.0f);
  }

  const auto* pairs = reinterpret_cast<const Neighbours*>(x.words) + first_row;
  const FixedPointBlock* of_rows = x.blocks + first_row;
  const std::int64_t stride = kAlone ? 1 : x.rows;
  const std::int64_t blocks = padded_k / kPanelWidth, bytes = Panel::bytes(padded_k);
  // Codes of more rows are read too slowly for the processor to fetch them ahead: four rows of q4_k read 10.6 GB/s on a
  // Zen 4, and 12.5 by lines.
  constexpr int kMostByPages = std::max(1 + kStrips, Codes::kBits == 8 ? 3 : 0);
  const bool by_lines = kRows > kMostByPages || fetches_codes_by_lines(), into_l2 = fetches_into_l2();
  for (std::int64_t first_block = 0; first_block < blocks; first_block += Codes::kSpanBlocks) {
    // Fetches the scales of this span, or those 8 KB ahead, before its first block needs them.
    const std::byte* head = panel + Panel::scales_at(first_block);
    if (into_l2) {
      fetch_codes<Panel::kScaleBytes>(head + stored.jump(head, bytes), into_l2);
    } else if constexpr (Panel::kScaleBytes > kCacheLine) {
      if (by_lines) head += kCodesAhead + stored.jump(head, bytes);
      for (std::int64_t at = 0; at < Panel::kScaleBytes; at += kCacheLine) __builtin_prefetch(head + at, 0, 3);
    }
    const Span span(panel, first_block);
    const std::int64_t of_span = std::min(Codes::kSpanBlocks, blocks - first_block);
    for (std::int64_t block = 0; block < of_span; ++block, pairs += kPairs * stride, of_rows += stride) {
      const typename Span::Block scales(span, block);
      const std::byte* codes = panel + Panel::codes_at(first_block) + block * Panel::kBlockBytes;
      const std::byte* const fetched = codes + stored.jump(codes, bytes);
      translate_next_page(codes, Panel::kBlockBytes);
#pragma GCC unroll 2
      for (int first = 0; first < kStrips; first += kTogether) {
#pragma GCC unroll 2
        for (int group = 0; group < Codes::kScales; ++group) {
          Sums sum[kTogether];
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            const std::int32_t* sums = of_rows[row].sums;
            const auto of_words = static_cast<std::uint32_t>(Codes::kScales == 2 ? sums[group] : sums[0] + sums[1]);
            const auto start = static_cast<std::int32_t>(0u - kOffset * of_words);  // modulo 2^32
#pragma GCC unroll 2
            for (Sums& strip : sum) strip.start(row, start);
          }
          const auto add_step = [&](std::int64_t step) __attribute__((always_inline)) {
            if (by_lines && first == 0) {
              fetch_codes<kStepBytes>(fetched + step * kStepBytes, into_l2);
            }
            const Neighbours* at = pairs + step * (Lines::kVectors / 2) * stride;
#pragma GCC unroll 2
            for (int strip = 0; strip < kTogether; ++strip)
              sum[strip].add(Lines(codes, step, first + strip), at, stride);
          };
          if constexpr (kAlone) {
#pragma GCC unroll 16
            for (std::int64_t step = 0; step < kSteps; ++step) add_step(group * kSteps + step);
          } else {
#pragma GCC unroll 2
            for (std::int64_t step = 0; step < kSteps; ++step) add_step(group * kSteps + step);
          }
#pragma GCC unroll 2
          for (int strip = 0; strip < kTogether; ++strip) {
            sum[strip].finish();
#pragma GCC unroll 2
            for (int side = 0; side < 2; ++side) {
              const Floats scale = scales.scale(group, side * kHalfPanel + (first + strip) * Words::kOutputs);
#pragma GCC unroll 8
              for (int row = 0; row < kRows; ++row) {
                const Floats both = Words::product(scale, Words::all(of_rows[row].scale));  // a power of two: exact
                Floats& to = total[first + strip][side][row];
                to = Words::add_product(Words::to_floats(sum[strip].of[side][row]), both, to);
              }
            }
          }
        }
      }
      if constexpr (Codes::kMins) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const Floats of_row = Words::all(of_rows[row].sum);
#pragma GCC unroll 2
          for (int strip = 0; strip < kStrips; ++strip) {
#pragma GCC unroll 2
            for (int side = 0; side < 2; ++side) {
              Floats& to = total[strip][side][row];
              to = Words::subtract_product(of_row, scales.min(side * kHalfPanel + strip * Words::kOutputs), to);
            }
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int strip = 0; strip < kStrips; ++strip) {
      float* to = tile + (first_row + row) * kPanelWidth + strip * Words::kOutputs;
      Words::store(total[strip][0][row], to);
      Words::store(total[strip][1][row], to + kHalfPanel);
    }
  }
}

// Packed rows as `multiply_words` reads them, into `target` of `fixed_point_bytes`.
template <class Words, class Panel>
void to_row_words(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
  to_fixed_point(rows, padded_k, a, target);
  if (CodeWords<Words, Panel>::kBytes && rows == 1) split_words(padded_k, target);
}

// tile[row][32] = sum over k of x[k][row] * panel[k][32], of any number of rows. More than `kWordRows` read the panel
// again, from L2.
template <class Words, class Panel>
void multiply_words(std::int64_t padded_k, const FixedPointRows& x, const CodedPanel& panel, float* tile) {
  using Multiply = void (*)(std::int64_t, const FixedPointRows&, int, const CodedPanel&, float*);
  static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
    return std::array<Multiply, sizeof...(row)>{&multiply_words_of<Words, Panel, static_cast<int>(row) + 1, false>...};
  }(std::make_index_sequence<kWordRows>{});
  if (x.rows == 1) return multiply_words_of<Words, Panel, 1, true>(padded_k, x, 0, panel, tile);
  for (int first = 0; first < x.rows; first += kWordRows) {
    const int rows = std::min(kWordRows, x.rows - first);
    kByRows[static_cast<std::size_t>(rows - 1)](padded_k, x, first, panel, tile);
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
