// Codes to fp32 with AVX2: shift, widen, convert, multiply.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/isa/avx2.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/code_words.hpp"
#include "ktc/weight_format/decode.hpp"
#include "ktc/weight_format/decode_blocks.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

template <>
struct Decoding<avx2::Lanes> {
  using Lanes = avx2::Lanes;

  static Lanes doubled(const bf16* scales) { return Lanes::twice(avx2::Words::load(scales)); }
  static Lanes doubled(const float* scales) { return Lanes::twice(avx2::Words::load(scales)); }

  static Lanes numbers(Int4, const std::byte* line, int vector, int half) {
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(line) + half);
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi16(words, 4 * vector), _mm256_set1_epi16(0xf));
    return Lanes::from_words(_mm256_sub_epi16(codes, _mm256_set1_epi16(8)));
  }
  static Lanes numbers(Fp8, const std::byte* line, int vector, int half) {
    return halves(line, vector, half) * Lanes(kFp8AsHalf);
  }
  // The same as fp16, whose exponent has another bias and which has the same denormals. The sign is extended into the
  // bit below it, which is removed.
  static Lanes halves(const std::byte* line, int vector, int half) {
    const __m128i codes = _mm_load_si128(reinterpret_cast<const __m128i*>(line) + 2 * vector + half);
    const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return Lanes::from_halves(_mm256_and_si256(words, _mm256_set1_epi16(static_cast<short>(0xbf80))));
  }
};

template <>
inline avx2::Lanes each_twice<avx2::Lanes>(const float* values) {
  return avx2::Lanes::twice(avx2::Words::load(values));
}

template <class Panel>
  requires IntegerCodes<Panel>::kExist
class BlockNumbers<avx2::Lanes, Panel> {
  using Words = CodeWords<avx2::Words, Panel>;

 public:
  static constexpr int kVectors = Words::kVectors;

  BlockNumbers(const std::byte* block, std::int64_t index) : first_(block, index, 0), second_(block, index, 1) {}

  [[gnu::always_inline]] std::array<avx2::Lanes, 2> halves(int vector) const {
    return {numbers(first_.words(vector)), numbers(second_.words(vector))};
  }

 private:
  static avx2::Lanes numbers(__m256i words) {
    constexpr auto kOffset = static_cast<std::int16_t>(WordNumbers<Panel>::kOffset);
    return avx2::Lanes::from_words(_mm256_sub_epi16(words, _mm256_set1_epi16(kOffset)));
  }

  Words first_;
  Words second_;
};

template <class Panel>
  requires(Panel::Format::kBits == 16)
class BlockNumbers<avx2::Lanes, Panel> {
 public:
  static constexpr int kVectors = 2;

  BlockNumbers(const std::byte* block, std::int64_t index)
      : halves_(reinterpret_cast<const fp16*>(block) + index * kVectors * kPanelWidth) {}

  std::array<avx2::Lanes, 2> halves(int vector) const {
    const fp16* at = halves_ + vector * kPanelWidth;
    return {avx2::Lanes::from_elements(at), avx2::Lanes::from_elements(at + kHalfPanel)};
  }

 private:
  const fp16* halves_;
};

}  // namespace ktc::weight_format::inline KTC_UNIT
