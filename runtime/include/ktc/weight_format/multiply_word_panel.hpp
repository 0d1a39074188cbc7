// A panel of a file's blocks as 16-bit words, and products of many rows with it, for ISAs without bf16 products. The
// numbers of the codes are decoded once into a scratch that stays in L2, with their scales in fp32; rows are 16-bit
// fixed point (`fixed_point_rows.hpp`). VPMADDWD multiplies twice as many values as an FMA of fp32, and nothing is
// rounded but the sums. These are the same bits as those of `multiply_words.hpp`, in the same order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/code_words.hpp"
#include "ktc/weight_format/fixed_point_rows.hpp"
#include "ktc/weight_format/multiply_words.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// The decoded panel: words [k / 2][32 outputs][2], then for each 32 of k the scales, [1 or 2][32], and minima, [32].
template <class Panel>
struct WordPanel {
  using Codes = IntegerCodes<Panel>;
  static constexpr std::int64_t kFactors = (Codes::kScales + (Codes::kMins ? 1 : 0)) * kPanelWidth;  // of 32 of k

  static constexpr std::int64_t words(std::int64_t padded_k) { return padded_k * kPanelWidth; }
  static constexpr std::int64_t bytes(std::int64_t padded_k) {
    return words(padded_k) * std::int64_t{sizeof(std::int16_t)} +
           padded_k / kPanelWidth * kFactors * std::int64_t{sizeof(float)};
  }
  static const float* factors(const std::byte* decoded, std::int64_t padded_k) {
    return reinterpret_cast<const float*>(decoded + words(padded_k) * std::int64_t{sizeof(std::int16_t)});
  }
};

// `target` is `WordPanel<Panel>::bytes` of 64-byte aligned memory.
template <class Words, class Panel>
[[gnu::noinline]] void decode_words(const std::byte* panel, std::int64_t padded_k, std::byte* target) {
  using Codes = IntegerCodes<Panel>;
  using Lines = CodeWords<Words, Panel>;
  using Vector = typename Words::Vector;
  constexpr std::int64_t kSteps = kBlock / kPanelWidth / Lines::kVectors;
  constexpr std::int64_t kStrips = kHalfPanel / Words::kOutputs;
  const Vector offset = Words::all(static_cast<std::int16_t>(WordNumbers<Panel>::kOffset));
  auto* factors = const_cast<float*>(WordPanel<Panel>::factors(target, padded_k));
  for (std::int64_t block = 0; block < padded_k / kPanelWidth; ++block) {
    const std::byte* codes = panel + Panel::codes_at(block);
    for (std::int64_t step = 0; step < kSteps; ++step) {
#pragma GCC unroll 2
      for (std::int64_t strip = 0; strip < kStrips; ++strip) {
        const Lines lines(codes, step, strip);
#pragma GCC unroll 16
        for (int vector = 0; vector < Lines::kVectors; ++vector) {
          const Vector words = lines.words(vector);
          Words::store(WordNumbers<Panel>::kOffset == 0 ? words : Words::difference(words, offset),
                       target + (vector * kStrips + strip) * static_cast<std::int64_t>(sizeof(Vector)));
        }
      }
      target += Lines::kVectors * kStrips * static_cast<std::int64_t>(sizeof(Vector));
    }
    const BlockScales<typename Panel::Format> scales(panel + Panel::scales_at(block), block % Panel::kSpanBlocks);
    for (std::int64_t lane = 0; lane < kPanelWidth; lane += Words::kOutputs) {
#pragma GCC unroll 2
      for (int group = 0; group < Codes::kScales; ++group) {
        Words::store(Words::load(scales.scale[group] + lane), factors + group * kPanelWidth + lane);
      }
      if constexpr (Codes::kMins) {
        Words::store(Words::load(scales.min + lane), factors + Codes::kScales * kPanelWidth + lane);
      }
    }
    factors += WordPanel<Panel>::kFactors;
  }
}

// Of this many steps of a product, each two of k, `ahead.step()` is called once.
inline constexpr int kWordPairsAhead = 4;

// Two vectors of outputs, from vector `first` of a pair on. The sums of blocks are added in `tile`, which stays in L1:
// registers hold those of the words.
template <class Words, class Panel, int kRows, class Ahead>
[[gnu::noinline]] void multiply_word_columns(std::int64_t padded_k, const FixedPointRows& x, const std::byte* decoded,
                                             int first, float* tile, Ahead& next) {
  using Codes = IntegerCodes<Panel>;
  using Vector = typename Words::Vector;
  using Floats = typename Words::Floats;
  constexpr int kColumns = 2;
  constexpr int kPairs = kPanelWidth / 2 / Codes::kScales;  // of a scale
  constexpr std::int64_t kPairBytes = 2 * kPanelWidth * std::int64_t{sizeof(std::int16_t)};
  const float* factors = WordPanel<Panel>::factors(decoded, padded_k) + first * Words::kOutputs;
  const std::byte* b = decoded + first * static_cast<std::int64_t>(sizeof(Vector));
  const auto* pairs = reinterpret_cast<const Neighbours*>(x.words);
  const FixedPointBlock* of_rows = x.blocks;
  tile += first * Words::kOutputs;
  Ahead ahead = next;
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int column = 0; column < kColumns; ++column) {
      Words::store(Words::all(0.0f), tile + row * kPanelWidth + column * Words::kOutputs);
    }
  }
  for (std::int64_t block = 0; block < padded_k / kPanelWidth; ++block, of_rows += kRows) {
#pragma GCC unroll 2
    for (int group = 0; group < Codes::kScales; ++group) {
      Vector sum[kColumns][kRows];
#pragma GCC unroll 2
      for (auto& column : sum) {
#pragma GCC unroll 12
        for (Vector& of_row : column) of_row = Words::sums(0);
      }
      for (int at = 0; at < kPairs; at += kWordPairsAhead) {
        ahead.step();
#pragma GCC unroll 4
        for (int pair = 0; pair < kWordPairsAhead; ++pair, b += kPairBytes, pairs += kRows) {
          const Vector left = Words::load(b);
          const Vector right = Words::load(b + sizeof(Vector));
#pragma GCC unroll 12
          for (int row = 0; row < kRows; ++row) {
            const Vector of_row = Words::pairs(pairs[row]);
            sum[0][row] = Words::add_products_in_order(sum[0][row], left, of_row);
            sum[1][row] = Words::add_products_in_order(sum[1][row], right, of_row);
          }
        }
      }
#pragma GCC unroll 2
      for (int column = 0; column < kColumns; ++column) {
        const float* of_outputs = factors + column * Words::kOutputs;
        const Floats scale = Words::load(of_outputs + group * kPanelWidth);
        const bool has_min = Codes::kMins && group == Codes::kScales - 1;
        const Floats min = has_min ? Words::load(of_outputs + Codes::kScales * kPanelWidth) : scale;
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
          float* to = tile + row * kPanelWidth + column * Words::kOutputs;
          const Floats both = Words::product(scale, Words::all(of_rows[row].scale));  // a power of two: exact
          Floats total = Words::add_product(Words::to_floats(sum[column][row]), both, Words::load(to));
          if (has_min) total = Words::subtract_product(Words::all(of_rows[row].sum), min, total);
          Words::store(total, to);
        }
      }
    }
    factors += WordPanel<Panel>::kFactors;
  }
  next = ahead;
}

// tile[row][32] = sum over k of x[k][row] * the decoded panel, of up to `kMostRows` rows.
template <class Words, class Panel, int kMostRows, class Ahead>
void multiply_word_panel(std::int64_t padded_k, const FixedPointRows& x, const std::byte* decoded, float* tile,
                         Ahead& ahead) {
  using Multiply = void (*)(std::int64_t, const FixedPointRows&, const std::byte*, int, float*, Ahead&);
  static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
    return std::array<Multiply, sizeof...(row)>{
        &multiply_word_columns<Words, Panel, static_cast<int>(row) + 1, Ahead>...};
  }(std::make_index_sequence<kMostRows>{});
  const Multiply multiply = kByRows[static_cast<std::size_t>(x.rows - 1)];
  for (int first = 0; first < kPanelWidth / Words::kOutputs; first += 2) {
    multiply(padded_k, x, decoded, first, tile, ahead);
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
