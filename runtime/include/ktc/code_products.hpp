// Products of a few rows with a panel's codes as they are stored: memory limits an expert with so few tokens, and
// decoded weights would be written and read again. Each ISA has one way for each type of panel, or none.
//
//   kRows       the most rows of an expert, in any number of groups; 0 where codes are always decoded.
//   multiply    one group with a whole panel, [k / 2][rows][2] x [k][32]; `scratch` has 32 elements for each of
//               `contraction`.
//   forget      the scratch was overwritten: `multiply` must not read what it left there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/code_words.hpp"
#include "ktc/weight_format/fixed_point_rows.hpp"
#include "ktc/weight_format/multiply_decoded.hpp"
#include "ktc/weight_format/multiply_numbers.hpp"
#include "ktc/weight_format/multiply_words.hpp"

#if defined(__AVX512BF16__)
#include "ktc/weight_format/multiply_blocks.hpp"
#include "ktc/weight_format/multiply_codes.hpp"
#endif

namespace ktc {

template <class Isa, class Panel>
class CodeProducts {
 public:
  static constexpr int kRows = 0;

  void multiply(int, std::int64_t, const typename Isa::Element*, const std::byte*, typename Isa::Accumulator*,
                typename Isa::Element*) {}
  void forget() {}
};

// Rows in another form, made once for all panels of an expert. `Rows` knows the bytes of a number of rows, converts
// them, and multiplies with them if they could be converted.
template <class Isa, class Panel, class Rows>
class ConvertedRows {
 public:
  static constexpr int kRows = Isa::kCodeRows;

  void multiply(int rows, std::int64_t contraction, const bf16* a, const std::byte* panel, float* tile, bf16* scratch) {
    static_assert(Rows::bytes(kRows, kPanelWidth) <= kPanelWidth * kPanelWidth * std::int64_t{sizeof(bf16)});
    std::size_t index = 0;
    while (index < groups_.size() && groups_[index].a != a) ++index;
    if (index == groups_.size()) index = add(rows, contraction, a, scratch);
    const Group& group = groups_[index];
    if (group.exact) return Rows::multiply(rows, contraction, group.converted, panel, tile);
    weight_format::multiply_decoded<Isa, Panel>(rows, contraction, a, panel, tile);
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
    bool exact = false;
  };

  // Convert a group into the scratch, where one expert's have space: those of others are then forgotten.
  std::size_t add(int rows, std::int64_t contraction, const bf16* a, bf16* scratch) {
    if (num_groups_ == groups_.size() || num_rows_ + rows > kRows) forget();
    std::byte* converted = reinterpret_cast<std::byte*>(scratch) + Rows::bytes(num_rows_, contraction);
    groups_[num_groups_] = {a, converted, Rows::convert(rows, contraction, a, converted)};
    num_rows_ += rows;
    return num_groups_++;
  }

  std::array<Group, (kRows + Isa::kMaxRows - 1) / Isa::kMaxRows> groups_{};
  std::size_t num_groups_ = 0;
  int num_rows_ = 0;
};

template <class Isa, class Panel>
struct WordRows {
  static constexpr std::int64_t bytes(int rows, std::int64_t padded_k) {
    return weight_format::fixed_point_bytes(rows, padded_k);
  }
  static bool convert(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
    return weight_format::to_row_words<typename Isa::Words, Panel>(rows, padded_k, a, target);
  }
  static void multiply(int rows, std::int64_t padded_k, const std::byte* x, const std::byte* panel, float* tile) {
    const auto words = weight_format::fixed_point_rows(x, rows, padded_k);
    weight_format::multiply_words<typename Isa::Words, Panel>(padded_k, words, panel, tile);
  }
};

template <class Isa, class Panel>
struct FloatRows {
  static constexpr std::int64_t bytes(int rows, std::int64_t padded_k) {
    return rows * padded_k * static_cast<std::int64_t>(sizeof(float));
  }
  static bool convert(int rows, std::int64_t padded_k, const bf16* a, std::byte* target) {
    weight_format::widen_rows(rows, padded_k, a, reinterpret_cast<float*>(target));
    return true;
  }
  static void multiply(int rows, std::int64_t padded_k, const std::byte* x, const std::byte* panel, float* tile) {
    const auto* values = reinterpret_cast<const float*>(x);
    weight_format::multiply_numbers<typename Isa::Lanes, Panel, Isa::kNumberRows>(rows, padded_k, values, panel, tile);
  }
};

template <class Isa, class Panel>
  requires(weight_format::IntegerCodes<Panel>::kExist && requires { typename Isa::Words; })
class CodeProducts<Isa, Panel> : public ConvertedRows<Isa, Panel, WordRows<Isa, Panel>> {};

template <class Isa, class Panel>
  requires(weight_format::FloatNumbers<Panel>::kExist && requires { typename Isa::Words; })
class CodeProducts<Isa, Panel> : public ConvertedRows<Isa, Panel, FloatRows<Isa, Panel>> {};

#if defined(__AVX512BF16__)
// Codes as bf16 numbers, which they are exactly, multiplied with the rows as they are.
template <class Isa, class Panel>
inline constexpr bool kHasBf16Numbers = [] {
  if constexpr (!std::is_same_v<typename Isa::Lanes, avx512_bf16::Lanes>) return false;
  if constexpr (weight_format::StoredInBlocks<Panel>) return true;
  return requires(__m512i line) { weight_format::bf16_numbers(typename Panel::Code{}, line, 0); };
}();

template <class Isa, class Panel>
  requires kHasBf16Numbers<Isa, Panel>
class CodeProducts<Isa, Panel> {
 public:
  // An ISA with tiles has packed larger groups in the order of the tiles.
  static constexpr int kRows = Isa::kBlocked ? Isa::kStreamRows : weight_format::kMaxCodeRows;
  static_assert(kRows <= weight_format::kMaxCodeRows);

  void multiply(int rows, std::int64_t contraction, const bf16* a, const std::byte* panel, float* tile, bf16* scratch) {
    if constexpr (!weight_format::StoredInBlocks<Panel>) {
      weight_format::multiply_codes<Panel>(rows, contraction, a, panel, tile);
    } else if constexpr (!weight_format::kWantsFinite<typename Panel::Format>) {
      weight_format::multiply_blocks<Panel>(rows, contraction, a, nullptr, panel, tile);
    } else {
      auto* sums = reinterpret_cast<float*>(scratch);
      if (summed_ != a) finite_ = weight_format::sum_blocks(rows, contraction, a, sums);
      summed_ = a;
      if (finite_) return weight_format::multiply_blocks<Panel>(rows, contraction, a, sums, panel, tile);
      weight_format::multiply_decoded<avx512_bf16::Isa, Panel>(rows, contraction, a, panel, tile);
    }
  }
  void forget() { summed_ = nullptr; }

 private:
  const bf16* summed_ = nullptr;  // the rows whose sums are in the scratch
  bool finite_ = true;
};
#endif

}  // namespace ktc
