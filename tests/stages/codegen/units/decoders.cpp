// Panels of every format: packed, decoded to bf16 and to words, and multiplied as they are stored, against their
// weights one by one.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "ktc/code_products.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/decode_blocks.hpp"
#include "ktc/weight_format/decode_int8.hpp"
#include "ktc/weight_format/multiply_word_panel.hpp"

namespace unit_tests {
namespace {

using namespace ktc;
using namespace ktc::weight_format;

constexpr std::int64_t kContraction = 512;

template <class T>
struct alignas(64) Aligned {
  T data[64 / sizeof(T)];
};

// A panel of random weights.
template <class Panel>
class Sample {
 public:
  Sample() : lines_(static_cast<std::size_t>(Panel::bytes(kContraction) / 64)) {
    Random random(1);
    if constexpr (StoredInBlocks<Panel>) {
      using Format = typename Panel::Format;
      std::vector<std::uint8_t> stored(kPanelWidth * kContraction / Format::kWeights * Format::kStoredBytes);
      for (std::uint8_t& byte : stored)
        byte = static_cast<std::uint8_t>(random.bits() & 0x3b);  // halves that are finite
      Panel::pack_blocks(MatrixView<const std::uint8_t>(stored.data(), kPanelWidth,
                                                        static_cast<std::int64_t>(stored.size()) / kPanelWidth),
                         lanes());
    } else {
      std::vector<float> weights(kPanelWidth * kContraction);
      for (float& weight : weights) weight = random.normal();
      Panel::pack(MatrixView<const float>(weights.data(), kPanelWidth, kContraction), lanes());
    }
    weights_.resize(kPanelWidth * kContraction);
    Panel::unpack(lanes(), MatrixView<bf16>(weights_.data(), kPanelWidth, kContraction));
  }

  std::byte* bytes() { return lines_.front().data; }
  bf16 weight(std::int64_t lane, std::int64_t k) const {
    return weights_[static_cast<std::size_t>(lane * kContraction + k)];
  }

 private:
  PartLanes lanes() {
    return {.panels = bytes(), .num_panels = 1, .padded_k = kContraction, .first_lane = 0, .lanes = kPanelWidth};
  }

  std::vector<Aligned<std::byte>> lines_;
  std::vector<bf16> weights_;
};

float flushed(float value) {
  return Isa::kBf16Products && std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

template <class Panel>
void check_decoding(Sample<Panel>& sample) {
  constexpr std::int64_t kBlocks = kContraction / kPanelWidth;
  alignas(64) static bf16 computed[kBlocks * weight_format::kBlock];
  decode_blocks<Lanes, Panel>(sample.bytes(), 0, kBlocks, computed);
  for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
    for (std::int64_t k = 0; k < kContraction; ++k) {
      CHECK_SAME(flushed(static_cast<float>(computed[panel_offset<bf16>(lane, k)])),
                 flushed(static_cast<float>(sample.weight(lane, k))));
    }
  }
}

// Words are the numbers of the codes, and a word panel has the scales in fp32.
template <class Panel>
void check_words(Sample<Panel>& sample) {
  using Words = typename Isa::Words;
  std::vector<Aligned<std::byte>> decoded(static_cast<std::size_t>(WordPanel<Panel>::bytes(kContraction) / 64));
  decode_words<Words, Panel>(sample.bytes(), kContraction, decoded.front().data);
  const auto* words = reinterpret_cast<const std::int16_t*>(decoded.front().data);
  for (std::int64_t k = 0; k < kContraction; ++k) {
    const std::byte* block = sample.bytes() + Panel::codes_at(k / kPanelWidth);
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
      const unsigned code = Panel::code_at(block, panel_offset<bf16>(lane, k % kPanelWidth));
      CHECK(words[panel_offset<bf16>(lane, k)] == static_cast<std::int16_t>(Panel::Format::number(code)));
    }
  }
}

// A few rows with codes as they are stored. Only the last rounding of the weights to bf16 differs, and that of rows to
// 16 bits.
template <class Panel>
void check_products(Sample<Panel>& sample) {
  using Products = CodeProducts<Isa, Panel>;
  if constexpr (Products::kRows > 0) {
    constexpr int kMost = std::min(Products::kRows, Isa::kMaxRows);
    alignas(64) static std::byte converted[kMost * kContraction * sizeof(float)];
    Random random(3);
    for (int rows = 1; rows <= kMost; ++rows) {
      std::vector<bf16> packed(static_cast<std::size_t>(rows * kContraction));
      for (bf16& value : packed) value = bf16(random.normal());
      alignas(64) float tile[Isa::kMaxRows * kPanelWidth];
      if constexpr (Products::kConverts) Products::convert(rows, kContraction, packed.data(), converted);
      Products::multiply(rows, kContraction, packed.data(), converted, {sample.bytes(), sample.bytes()}, tile);
      for (int row = 0; row < rows; ++row) {
        for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
          double expected = 0, magnitude = 0;
          for (std::int64_t k = 0; k < kContraction; ++k) {
            const bf16 x = packed[static_cast<std::size_t>(k / 2 * 2 * rows + row * 2 + k % 2)];
            const double product = static_cast<double>(x) * static_cast<double>(sample.weight(lane, k));
            expected += product;
            magnitude += std::abs(product);
          }
          CHECK_NEAR(tile[row * kPanelWidth + lane], expected, magnitude * 0x1p-8 + 1e-6);
        }
      }
    }
  }
}

template <class Panel>
void check_panel() {
  Sample<Panel> sample;
  check_decoding(sample);
  if constexpr (VectorWords<typename Isa::Words>) {
    if constexpr (StoredInBlocks<Panel> && IntegerCodes<Panel>::kExist) check_words(sample);
  }
  if constexpr (!Panel::kIntegerProducts) check_products(sample);
}

template <class... Panels>
void check_panels() {
  (check_panel<Panels>(), ...);
}

const Test decoders("decoders: panels of every format", [] { check_panels<KTC_PANELS>(); });

}  // namespace
}  // namespace unit_tests
