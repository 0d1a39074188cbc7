// Products of a few rows with a panel's codes as they are stored: memory limits the speed of an expert with so few
// tokens, and decoded weights would be written and read again. An instruction set has one way for a type of panel, or
// none.
//
//   kRows       the most rows of an expert, in any number of groups; 0: codes are always decoded.
//   kConverts   whether rows are read in another form, of `bytes`: `convert` writes it, once for all panels and
//               workers.
//   multiply    one group, [k / 2][rows][2], and its other form with a panel from `k` on: both are given whole, and
//               the panel from there. All of `k` is read but for an expert that is computed in part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/code_words.hpp"
#include "ktc/weight_format/fixed_point_rows.hpp"
#include "ktc/weight_format/multiply_decoded.hpp"
#include "ktc/weight_format/multiply_numbers.hpp"
#include "ktc/weight_format/multiply_words.hpp"

#if defined(__AVX512BF16__)
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/multiply_codes.hpp"
#endif

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, WeightPanel Panel>
class CodeProducts {
 public:
  static constexpr int kRows = 0;
  static constexpr bool kConverts = false;
};

// Rows in another form: `Rows` has the bytes of a number of rows, converts them, and multiplies with them.
template <class Rows, int kMostRows>
struct ConvertedRows : Rows {
  static constexpr int kRows = kMostRows;
  static constexpr bool kConverts = true;
};

// `Isa` multiplies the rows that are not finite.
template <class Isa, class Panel>
struct WordRows {
  using Words = typename Isa::Words;

  static constexpr std::int64_t bytes(std::int64_t rows, std::int64_t padded_k) {
    return weight_format::fixed_point_bytes(rows, padded_k);
  }
  static void convert(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
    weight_format::to_row_words<Words, Panel>(rows, padded_k, a, target);
  }
  static void multiply(int rows, Range k, const bf16* a, const std::byte* x, const CodedPanel& panel, float* tile) {
    const auto words = weight_format::fixed_point_rows(x, rows, k.end);
    weight_format::multiply_words<Words, Panel>(k.size(), words.from(k.begin), panel, tile);
    if (words.finite()) return;
    weight_format::multiply_decoded<Isa, Panel>(words, k.size(), a + k.begin * rows, panel.begin, tile);
  }
};

template <class Isa, class Panel>
struct FloatRows {
  static constexpr std::int64_t bytes(std::int64_t rows, std::int64_t padded_k) {
    return rows * padded_k * static_cast<std::int64_t>(sizeof(float));
  }
  static void convert(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
    weight_format::widen_rows(rows, padded_k, a, reinterpret_cast<float*>(target));
  }
  static void multiply(int rows, Range k, const bf16*, const std::byte* x, const CodedPanel& panel, float* tile) {
    const auto* values = reinterpret_cast<const float*>(x) + k.begin * rows;
    weight_format::multiply_numbers<typename Isa::Lanes, Panel, Isa::kNumberRows>(rows, k.size(), values, panel.begin,
                                                                                  tile);
  }
};

// Whether rows are converted for codes of every kind: without products of bf16.
template <InstructionSet Isa>
inline constexpr bool kConvertsRows = Isa::kCodeRows > 0 && !Isa::kBf16Products;

template <InstructionSet Isa, WeightPanel Panel>
  requires(kConvertsRows<Isa> && weight_format::IntegerCodes<Panel>::kExist)
class CodeProducts<Isa, Panel> : public ConvertedRows<WordRows<Isa, Panel>, Isa::kCodeRows> {};

template <InstructionSet Isa, WeightPanel Panel>
  requires(kConvertsRows<Isa> && weight_format::FloatNumbers<Panel>::kExist)
class CodeProducts<Isa, Panel> : public ConvertedRows<FloatRows<Isa, Panel>, Isa::kCodeRows> {};

#if defined(__AVX512BF16__)
// Blocks whose numbers are their codes less an offset, as words: VNNI adds products in one instruction, and takes
// integers where VDPBF16PS takes a look-up of each number. Cores with AMX take longer for VDPBF16PS, so all
// codes are words there, and so few rows read a panel once.
template <class Isa, class Panel>
inline constexpr bool kInWords = [] {
  if constexpr (!weight_format::IntegerCodes<Panel>::kExist)
    return false;
  else if constexpr (Isa::kCodeRows <= weight_format::kWordRows)
    return true;
  else
    return weight_format::StoredInBlocks<Panel> && !weight_format::WordNumbers<Panel>::kLookedUp;
}();

template <InstructionSet Isa, WeightPanel Panel>
  requires(Isa::kBf16Products && kInWords<Isa, Panel>)
class CodeProducts<Isa, Panel> : public ConvertedRows<WordRows<avx512_bf16::Isa, Panel>, Isa::kCodeRows> {};

// Other codes as bf16 numbers, which they are exactly, multiplied with the rows as they are.
template <class Isa, class Panel>
inline constexpr bool kHasBf16Numbers = [] {
  if constexpr (kInWords<Isa, Panel>) return false;
  if constexpr (weight_format::StoredInBlocks<Panel>) return true;
  return Panel::kDecoded && !Panel::kIntegerProducts;
}();

template <InstructionSet Isa, WeightPanel Panel>
  requires(Isa::kBf16Products && kHasBf16Numbers<Isa, Panel>)
class CodeProducts<Isa, Panel> {
 public:
  static constexpr int kRows = Isa::kCodeRows;
  static constexpr bool kConverts = false;

  static void multiply(int rows, Range k, const bf16* a, const std::byte*, const CodedPanel& panel, float* tile) {
    weight_format::multiply_codes<Panel, kRows>(rows, k.size(), a + k.begin * rows, panel, tile);
  }
};
#endif

}  // namespace ktc::inline KTC_UNIT
