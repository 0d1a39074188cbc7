// Products of a few rows with a panel's codes as they are stored: memory limits the speed of an expert with so few
// tokens, and decoded weights would be written and read again. An instruction set has one way for a type of panel, or
// none.
//
//   kRows       the most rows of an expert, in any number of groups; 0: codes are always decoded.
//   multiply    one group, [k / 2][rows][2], with a whole panel; `scratch` has 32 elements for each k.
//   forget      must be called when the scratch was overwritten.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/shape.hpp"
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

  void multiply(int, std::int64_t, const typename Isa::Element*, const std::byte*, typename Isa::Accumulator*,
                typename Isa::Element*) {}
  void forget() {}
};

// Rows in another form, converted once for all panels of an expert. `Rows` has the bytes of a number of rows, converts
// them, and multiplies with them.
template <InstructionSet Isa, class Rows, int kMostRows>
class ConvertedRows {
 public:
  static constexpr int kRows = kMostRows;

  void multiply(int rows, std::int64_t contraction, const bf16* a, const std::byte* panel, float* tile, bf16* scratch) {
    static_assert(Rows::bytes(kRows, kPanelWidth) <= kPanelWidth * kPanelWidth * std::int64_t{sizeof(bf16)});
    std::size_t index = 0;
    while (index < groups_.size() && groups_[index].a != a) ++index;
    if (index == groups_.size()) index = add(rows, contraction, a, scratch);
    Rows::multiply(rows, contraction, groups_[index].converted, a, panel, tile);
  }
  void forget() {
    groups_ = {};
    num_groups_ = 0;
    num_rows_ = 0;
  }

 private:
  struct Group {
    const bf16* a = nullptr;
    const std::byte* converted = nullptr;
  };

  // Converts a group into the scratch. It has room for the rows of one expert: those of others are then forgotten.
  std::size_t add(int rows, std::int64_t contraction, const bf16* a, bf16* scratch) {
    if (num_groups_ == groups_.size() || num_rows_ + rows > kRows) forget();
    std::byte* converted = reinterpret_cast<std::byte*>(scratch) + Rows::bytes(num_rows_, contraction);
    Rows::convert(rows, contraction, a, converted);
    groups_[num_groups_] = {a, converted};
    num_rows_ += rows;
    return num_groups_++;
  }

  std::array<Group, (kRows + Isa::kMaxRows - 1) / Isa::kMaxRows> groups_{};
  std::size_t num_groups_ = 0;
  int num_rows_ = 0;
};

// `Isa` multiplies the rows that are not finite.
template <class Isa, class Panel>
struct WordRows {
  using Words = typename Isa::Words;

  static constexpr std::int64_t bytes(int rows, std::int64_t padded_k) {
    return weight_format::fixed_point_bytes(rows, padded_k);
  }
  static void convert(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
    weight_format::to_row_words<Words, Panel>(rows, padded_k, a, target);
  }
  static void multiply(int rows, std::int64_t padded_k, const std::byte* x, const bf16* a, const std::byte* panel,
                       float* tile) {
    const auto words = weight_format::fixed_point_rows(x, rows, padded_k);
    weight_format::multiply_words<Words, Panel>(padded_k, words, panel, tile);
    if (!words.finite()) weight_format::multiply_decoded<Isa, Panel>(words, padded_k, a, panel, tile);
  }
};

template <class Isa, class Panel>
struct FloatRows {
  static constexpr std::int64_t bytes(int rows, std::int64_t padded_k) {
    return rows * padded_k * static_cast<std::int64_t>(sizeof(float));
  }
  static void convert(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
    weight_format::widen_rows(rows, padded_k, a, reinterpret_cast<float*>(target));
  }
  static void multiply(int rows, std::int64_t padded_k, const std::byte* x, const bf16*, const std::byte* panel,
                       float* tile) {
    const auto* values = reinterpret_cast<const float*>(x);
    weight_format::multiply_numbers<typename Isa::Lanes, Panel, Isa::kNumberRows>(rows, padded_k, values, panel, tile);
  }
};

// Whether rows are converted for codes of every kind: without products of bf16.
template <InstructionSet Isa>
inline constexpr bool kConvertsRows = Isa::kCodeRows > 0 && !Isa::kBf16Products;

template <InstructionSet Isa, WeightPanel Panel>
  requires(kConvertsRows<Isa> && weight_format::IntegerCodes<Panel>::kExist)
class CodeProducts<Isa, Panel> : public ConvertedRows<Isa, WordRows<Isa, Panel>, Isa::kCodeRows> {};

template <InstructionSet Isa, WeightPanel Panel>
  requires(kConvertsRows<Isa> && weight_format::FloatNumbers<Panel>::kExist)
class CodeProducts<Isa, Panel> : public ConvertedRows<Isa, FloatRows<Isa, Panel>, Isa::kCodeRows> {};

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
class CodeProducts<Isa, Panel>
    : public ConvertedRows<avx512_bf16::Isa, WordRows<avx512_bf16::Isa, Panel>, Isa::kCodeRows> {};

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

  void multiply(int rows, std::int64_t contraction, const bf16* a, const std::byte* panel, float* tile, bf16*) {
    weight_format::multiply_codes<Panel, kRows>(rows, contraction, a, panel, tile);
  }
  void forget() {}
};
#endif

}  // namespace ktc::inline KTC_UNIT
