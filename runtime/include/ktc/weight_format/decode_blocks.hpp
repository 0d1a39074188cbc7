// Blocks of a file's formats to bf16, vector by vector, in the `Lanes` of an ISA: scale x number is exact in fp32, a
// minimum is subtracted with one rounding, and bf16 is the other. Every ISA gives the same bits, except that
// AVX512-BF16 reads denormals as zero.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// The numbers of `kVectors` vectors of a block, from vector `index` x `kVectors` on: the step that an ISA may
// specialise.
template <class Lanes, class Panel>
class BlockNumbers {
 public:
  static constexpr int kVectors = 2;

  BlockNumbers(const std::byte* block, std::int64_t index) : block_(block), first_(index * kVectors) {}

  // The 32 elements of a vector.
  std::array<Lanes, 2> halves(int vector) const { return {half(vector, 0), half(vector, 1)}; }

 private:
  Lanes half(int vector, int half) const {
    alignas(64) typename Lanes::Scalar numbers[kHalfPanel];
    const std::int64_t first = (first_ + vector) * kPanelWidth + half * kHalfPanel;
    for (std::int64_t i = 0; i < kHalfPanel; ++i) {
      numbers[i] = Panel::Format::number(Panel::code_at(block_, first + i));
    }
    return Lanes::load(numbers);
  }

  const std::byte* block_;
  std::int64_t first_;
};

// Each of 8 values twice: those of 8 outputs, of which a vector has two neighbours of k.
template <class Lanes>
Lanes each_twice(const float* values) {
  alignas(64) typename Lanes::Scalar twice[kHalfPanel];
  for (int i = 0; i < kHalfPanel; ++i) twice[i] = values[i / 2];
  return Lanes::load(twice);
}
template <class Lanes>
std::array<Lanes, 4> of_outputs(const float* values) {
  return {each_twice<Lanes>(values), each_twice<Lanes>(values + 8), each_twice<Lanes>(values + 16),
          each_twice<Lanes>(values + 24)};
}

// `take(lanes)` for each 16 elements of a block, in fp32 and in order.
template <class Lanes, class Panel, class Take>
void for_weights(const std::byte* panel, std::int64_t block, Take&& take) {
  using Format = typename Panel::Format;
  using Numbers = BlockNumbers<Lanes, Panel>;
  constexpr std::int64_t kSteps = kBlock / kPanelWidth / Numbers::kVectors;
  const BlockScales<Format> scales(panel + Panel::scales_at(block), block % Panel::kSpanBlocks);
  const auto steps = [&](std::int64_t first, std::int64_t last, const auto& weight) {
    for (std::int64_t step = first; step < last; ++step) {
      const Numbers numbers(panel + Panel::codes_at(block), step);
#pragma GCC unroll 16
      for (int vector = 0; vector < Numbers::kVectors; ++vector) {
        const std::array<Lanes, 2> halves = numbers.halves(vector);
        const int side = vector % 2;  // 16 outputs
        take(weight(halves[0], 2 * side));
        take(weight(halves[1], 2 * side + 1));
      }
    }
  };
  if constexpr (Format::kScales == 0) {
    steps(0, kSteps, [](const Lanes& number, int) { return number; });
  } else {
    constexpr std::int64_t kOfScale = kSteps / Format::kScales;
    for (std::int64_t group = 0; group < Format::kScales; ++group) {
      const std::array<Lanes, 4> scale = of_outputs<Lanes>(scales.scale[group]);
      const std::array<Lanes, 4> min = of_outputs<Lanes>(Format::kMins ? scales.min : scales.scale[group]);
      steps(group * kOfScale, (group + 1) * kOfScale, [&](const Lanes& number, int lanes) {
        const auto place = static_cast<std::size_t>(lanes);
        if constexpr (!Format::kMins) return number * scale[place];
        return number * scale[place] - min[place];
      });
    }
  }
}

// Blocks [first, last) of a panel, as bf16 panels have them.
template <class Lanes, StoredInBlocks Panel>
void decode_blocks(const std::byte* panel, std::int64_t first, std::int64_t last, bf16* target) {
  for (std::int64_t block = first; block < last; ++block) {
    for_weights<Lanes, Panel>(panel, block, [&](const Lanes& weights) {
      weights.to_elements(target);
      target += kHalfPanel;
    });
  }
}

}  // namespace ktc::weight_format::inline KTC_UNIT

#if defined(__AVX512BW__)
#include "ktc/weight_format/decode_blocks_avx512.hpp"
#elif defined(__AVX2__)
#include "ktc/unit.hpp"
#include "ktc/weight_format/decode_avx2.hpp"
#endif
