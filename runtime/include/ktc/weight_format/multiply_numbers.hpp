// A few rows multiplied with weights other than integer codes, for ISAs without VDPBF16PS: fp8 and fp16, as fp32
// numbers with rows of fp32. Nothing is rounded but the sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/half_precision.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// Half a vector of a block as fp32, 8 outputs with two neighbours of k each; sums of `kSumBlocks` blocks are multiplied
// with the scale of their output and with `kFactor`.
template <class Panel>
struct FloatNumbers {
  static constexpr bool kExist = false;
};

template <StoredInBlocks Panel>
  requires(Panel::Format::kBits == 16)
struct FloatNumbers<Panel> {
  static constexpr bool kExist = true;
  static constexpr bool kScaled = false;
  static constexpr std::int64_t kSumBlocks = 1;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes numbers(const std::byte* block, std::int64_t vector, int half) {
    return Lanes::from_elements(reinterpret_cast<const fp16*>(block) + vector * kPanelWidth + half * kHalfPanel);
  }
};

template <std::int64_t kGroup>
struct FloatNumbers<QuantisedPanel<Fp8, kGroup>> {
  static constexpr bool kExist = true;
  static constexpr bool kScaled = true;
  static constexpr std::int64_t kSumBlocks = QuantisedPanel<Fp8, kGroup>::kGroupBlocks;
  static constexpr float kFactor = kFp8AsHalf;

  template <class Lanes>
  [[gnu::always_inline]] static Lanes numbers(const std::byte* block, std::int64_t vector, int half) {
    return Decoding<Lanes>::halves(block + vector / 2 * kLine, static_cast<int>(vector % 2), half);
  }
};

// Packed rows [k / 2][rows][2] as fp32, in the same order.
inline void widen_rows(int rows, std::int64_t padded_k, const bf16* a, float* target) {
  std::transform(a, a + rows * padded_k, target, [](bf16 value) { return static_cast<float>(value); });
}

template <class Lanes, class Panel, int kRows>
[[gnu::noinline]] void multiply_numbers_of(std::int64_t padded_k, const float* x, int stride, const std::byte* panel,
                                           float* tile) {
  using Numbers = FloatNumbers<Panel>;
  constexpr std::int64_t kPairs = kPanelWidth / 2;
  constexpr std::int64_t kPairBytes = Panel::kBlockBytes / kPairs;
  struct Zero {
    Lanes lanes{0.0f};
  };
  Zero total[2][2][kRows];
  const std::int64_t blocks = padded_k / kPanelWidth;
  for (std::int64_t first = 0; first < blocks; first += Numbers::kSumBlocks) {
    const std::byte* codes = panel + Panel::codes_at(first);
    const std::int64_t pairs = std::min(Numbers::kSumBlocks, blocks - first) * kPairs;
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      Zero sum[2][kRows];
#pragma GCC unroll 2
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        if (side == 0) {
#pragma GCC unroll 2
          for (std::int64_t at = 0; at < kPairBytes; at += kCacheLine) {
            __builtin_prefetch(codes + kCodesAhead + pair * kPairBytes + at, 0, 0);
          }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const Lanes numbers = Numbers::template numbers<Lanes>(codes, 2 * pair + side, half);
#pragma GCC unroll 4
          for (int row = 0; row < kRows; ++row) {
            Lanes& to = sum[half][row].lanes;
            to = fused_multiply_add(numbers, Lanes::pairs(x + (pair * stride + row) * 2), to);
          }
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          Lanes& to = total[side][half][row].lanes;
          if constexpr (Numbers::kScaled) {
            const auto* scales = reinterpret_cast<const typename Panel::Scale*>(panel + Panel::scales_at(first));
            const Lanes scale = Decoding<Lanes>::doubled(scales + side * kHalfPanel + half * kHalfPanel / 2);
            to = fused_multiply_add(sum[half][row].lanes, scale * Lanes(Numbers::kFactor), to);
          } else {
            to = to + sum[half][row].lanes;
          }
        }
      }
    }
    x += pairs * 2 * stride;
  }
  for (int row = 0; row < kRows; ++row) {
    float of_pairs[2 * kPanelWidth];
    for (int part = 0; part < 4; ++part) total[part / 2][part % 2][row].lanes.store(of_pairs + part * kHalfPanel);
    for (int lane = 0; lane < kPanelWidth; ++lane) {
      tile[row * kPanelWidth + lane] = of_pairs[2 * lane] + of_pairs[2 * lane + 1];
    }
  }
}

// tile[row][32] = sum over k of x[k][row] * panel[k][32], of any number of rows, which `widen_rows` gave; `kMost` at a
// time, whose sums of 16 outputs fit the registers beside numbers and a row's values.
template <class Lanes, class Panel, int kMost>
void multiply_numbers(int rows, std::int64_t padded_k, const float* x, const std::byte* panel, float* tile) {
  int row = 0;
  for (; row + kMost <= rows; row += kMost) {
    multiply_numbers_of<Lanes, Panel, kMost>(padded_k, x + 2 * row, rows, panel, tile + row * kPanelWidth);
  }
  if (kMost > 2 && row + 2 <= rows) {
    multiply_numbers_of<Lanes, Panel, 2>(padded_k, x + 2 * row, rows, panel, tile + row * kPanelWidth);
    row += 2;
  }
  if (row < rows) {
    multiply_numbers_of<Lanes, Panel, 1>(padded_k, x + 2 * row, rows, panel, tile + row * kPanelWidth);
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT
