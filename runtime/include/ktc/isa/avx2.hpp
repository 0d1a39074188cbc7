// AVX2 with FMA and F16C: bf16 is widened to fp32 by a shift, and multiplied there.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/isa/avx2_dots.hpp"
#include "ktc/isa/avx2_words.hpp"
#include "ktc/math.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::avx2::inline KTC_UNIT {

class Lanes {
 public:
  using Scalar = float;

  explicit Lanes(float value) : low_(_mm256_set1_ps(value)), high_(low_) {}

  static Lanes load(const float* source) { return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)}; }
  static Lanes from_elements(const bf16* source) { return {widened(source), widened(source + 8)}; }
  static Lanes from_elements(const weight_format::fp16* source) { return {widened(source), widened(source + 8)}; }
  static Lanes from_words(__m256i words) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(words))),
            _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(words, 1)))};
  }
  // Bits of fp16.
  static Lanes from_halves(__m256i halves) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  }
  // Two values again and again.
  static Lanes pairs(const float* two) {
    const __m256 eight = _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(two)));
    return {eight, eight};
  }
  // Each of eight values twice.
  static Lanes twice(__m256 eight) {
    const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    return {_mm256_permutevar8x32_ps(eight, low), _mm256_permutevar8x32_ps(eight, high)};
  }
  static Lanes from_integers(const std::int32_t* sums, const std::int32_t* offsets) {
    const auto eight = [](const std::int32_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
    return {_mm256_cvtepi32_ps(_mm256_sub_epi32(eight(sums), eight(offsets))),
            _mm256_cvtepi32_ps(_mm256_sub_epi32(eight(sums + 8), eight(offsets + 8)))};
  }
  void store(float* target) const {
    _mm256_storeu_ps(target, low_);
    _mm256_storeu_ps(target + 8, high_);
  }
  void to_elements(bf16* target) const {
    const __m256i interleaved = _mm256_packus_epi32(narrowed(low_), narrowed(high_));
    const __m256i ordered = _mm256_permute4x64_epi64(interleaved, _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), ordered);
  }
  void to_codes(std::uint8_t* target) const {
    const __m256i interleaved = _mm256_packs_epi32(_mm256_cvtps_epi32(low_), _mm256_cvtps_epi32(high_));
    const __m256i words = _mm256_permute4x64_epi64(interleaved, _MM_SHUFFLE(3, 1, 2, 0));
    const __m256i codes = _mm256_add_epi16(words, _mm256_set1_epi16(128));
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
  }
  float greatest() const {
    const __m256i eight = _mm256_max_epu32(_mm256_castps_si256(low_), _mm256_castps_si256(high_));
    const __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(1, 1, 1, 1)))));
  }
  float sum() const {
    const __m256 eight = _mm256_add_ps(low_, high_);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static void store_sums(Lanes a, Lanes b, Lanes c, Lanes d, float* target) {
    _mm_storeu_ps(target, sums_of_four(a.low_ + a.high_, b.low_ + b.high_, c.low_ + c.high_, d.low_ + d.high_));
  }
  float largest() const {
    const __m256 eight = _mm256_max_ps(low_, high_);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  friend Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low_, b.low_), _mm256_add_ps(a.high_, b.high_)}; }
  friend Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low_, b.low_), _mm256_sub_ps(a.high_, b.high_)}; }
  friend Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low_, b.low_), _mm256_mul_ps(a.high_, b.high_)}; }
  friend Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low_, b.low_), _mm256_div_ps(a.high_, b.high_)}; }
  friend Lanes fused_multiply_add(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low_, b.low_, c.low_), _mm256_fmadd_ps(a.high_, b.high_, c.high_)};
  }
  friend Lanes rounded(Lanes x) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low_, kNearest), _mm256_round_ps(x.high_, kNearest)};
  }
  friend Lanes absolute(Lanes x) {
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign_bit, x.low_), _mm256_andnot_ps(sign_bit, x.high_)};
  }
  // Of numbers that are not negative, the order is that of their bits.
  friend Lanes greater(Lanes a, Lanes b) {
    const auto of_bits = [](__m256 x, __m256 y) {
      return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
    };
    return {of_bits(a.low_, b.low_), of_bits(a.high_, b.high_)};
  }
  // MAXPS returns its second operand when one is NaN.
  friend Lanes larger(Lanes kept, Lanes x) {
    return {_mm256_max_ps(x.low_, kept.low_), _mm256_max_ps(x.high_, kept.high_)};
  }
  // MINPS returns its second operand when one is NaN.
  friend Lanes of_bits(Lanes x) {
    const auto of_half = [](__m256 half) {
      const __m256 bounded = _mm256_max_ps(_mm256_min_ps(half, _mm256_set1_ps(kMostBits)), _mm256_set1_ps(kLeastBits));
      return _mm256_castsi256_ps(_mm256_cvttps_epi32(bounded));
    };
    return {of_half(x.low_), of_half(x.high_)};
  }
  // In two steps: 2^n itself may be outside the range of fp32 where x * 2^n is not, and the reverse.
  friend Lanes times_power_of_two(Lanes x, Lanes n) {
    const Lanes half = rounded(n * Lanes(0.5f));
    return x * power_of_two(half) * power_of_two(n - half);
  }
  friend Lanes clamped(Lanes x, float low, float high) {
    // MAXPS and MINPS return their second operand when one is NaN, so x comes second.
    const __m256 lowest = _mm256_set1_ps(low);
    const __m256 highest = _mm256_set1_ps(high);
    return {_mm256_min_ps(highest, _mm256_max_ps(lowest, x.low_)),
            _mm256_min_ps(highest, _mm256_max_ps(lowest, x.high_))};
  }
  friend Lanes zero_outside(float low, float high, Lanes x, Lanes value) {
    const __m256 lowest = _mm256_set1_ps(low);
    const __m256 highest = _mm256_set1_ps(high);
    const auto inside = [=](__m256 v) {
      return _mm256_and_ps(_mm256_cmp_ps(v, lowest, _CMP_GE_OQ), _mm256_cmp_ps(v, highest, _CMP_LE_OQ));
    };
    return {_mm256_and_ps(inside(x.low_), value.low_), _mm256_and_ps(inside(x.high_), value.high_)};
  }
  friend Lanes zero_up_to(float bound, Lanes x, Lanes value) {
    const __m256 last = _mm256_set1_ps(bound);
    return {_mm256_and_ps(_mm256_cmp_ps(x.low_, last, _CMP_NLE_UQ), value.low_),
            _mm256_and_ps(_mm256_cmp_ps(x.high_, last, _CMP_NLE_UQ), value.high_)};
  }
  friend Lanes with_sign_of(Lanes magnitude, Lanes sign) {
    const __m256 sign_bit = _mm256_set1_ps(-0.0f);
    const Lanes size = absolute(magnitude);
    return {_mm256_or_ps(size.low_, _mm256_and_ps(sign_bit, sign.low_)),
            _mm256_or_ps(size.high_, _mm256_and_ps(sign_bit, sign.high_))};
  }
  friend Lanes exp(Lanes x) { return exp_by_polynomial(x); }
  friend Lanes erf(Lanes x) { return erf_by_polynomial(x); }

 private:
  Lanes(__m256 low, __m256 high) : low_(low), high_(high) {}

  // Rounds to nearest even; a NaN keeps its upper bits and becomes quiet.
  static __m256i narrowed(__m256 x) {
    const __m256i word = _mm256_castps_si256(x);
    const __m256i upper = _mm256_srli_epi32(word, 16);
    const __m256i bias = _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7fff));
    const __m256i nearest = _mm256_srli_epi32(_mm256_add_epi32(word, bias), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x0040));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_epi8(nearest, quiet, _mm256_castps_si256(is_nan));
  }

  static Lanes power_of_two(Lanes n) { return {power_of_two(n.low_), power_of_two(n.high_)}; }
  static __m256 power_of_two(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }

  __m256 low_;
  __m256 high_;
};

// 4 rows x 2 vectors are 8 accumulators; 4 vectors of widened weights and 2 of a row's values fit the 16 registers.
inline constexpr int kMaxRows = 4;

inline constexpr int kUnroll = 2;

template <int kRows, class Ahead>
[[gnu::noinline]] void multiply_half(std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& next) {
  const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const auto even = [](__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); };
  const auto odd = [=](__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_half)); };
  Ahead ahead = next;
  __m256 low[kRows];
  __m256 high[kRows];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm256_setzero_ps();
  const auto* b = reinterpret_cast<const __m256i*>(panel);
  const auto* pairs = reinterpret_cast<const Neighbours*>(a);
  for (std::int64_t step = 0; step < steps; step += kUnroll) {
    ahead.step();
#pragma GCC unroll 2
    for (int k = 0; k < kUnroll; ++k) {
      const __m256i b_low = _mm256_load_si256(b);
      const __m256i b_high = _mm256_load_si256(b + 1);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = _mm256_set1_epi32(pairs[row]);
        low[row] = _mm256_fmadd_ps(even(x), even(b_low), low[row]);
        high[row] = _mm256_fmadd_ps(even(x), even(b_high), high[row]);
        low[row] = _mm256_fmadd_ps(odd(x), odd(b_low), low[row]);
        high[row] = _mm256_fmadd_ps(odd(x), odd(b_high), high[row]);
      }
      b += 4;
      pairs += kRows;
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
    _mm256_store_ps(tile + row * kPanelWidth, low[row]);
    _mm256_store_ps(tile + row * kPanelWidth + 8, high[row]);
  }
  next = ahead;
}

// One row with all 32 outputs, in the order of `multiply_half`. Half a panel at a time would read each line twice, and
// memory limits a row alone: 15 GB/s instead of 32.
template <class Ahead>
[[gnu::noinline]] void multiply_row(std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& next) {
  constexpr int kVectors = kPanelWidth / 8;
  const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const auto even = [](__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); };
  const auto odd = [=](__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, upper_half)); };
  Ahead ahead = next;
  __m256 sums[kVectors];
#pragma GCC unroll 4
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  const auto* b = reinterpret_cast<const __m256i*>(panel);
  const auto* pairs = reinterpret_cast<const Neighbours*>(a);
  for (std::int64_t step = 0; step < steps; step += kUnroll) {
    ahead.step();
    translate_next_page(reinterpret_cast<const std::byte*>(b), kUnroll * 2 * kPanelWidth * sizeof(bf16));
#pragma GCC unroll 2
    for (int k = 0; k < kUnroll; ++k, b += kVectors) {
      const __m256i x = _mm256_set1_epi32(*pairs++);
      const __m256 x_even = even(x), x_odd = odd(x);
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector) {
        const __m256i weights = _mm256_load_si256(b + vector);
        sums[vector] = _mm256_fmadd_ps(x_odd, odd(weights), _mm256_fmadd_ps(x_even, even(weights), sums[vector]));
      }
    }
  }
#pragma GCC unroll 4
  for (int vector = 0; vector < kVectors; ++vector) _mm256_store_ps(tile + 8 * vector, sums[vector]);
  next = ahead;
}

struct Isa {
  using Element = bf16;
  using Weight = bf16;
  using Accumulator = float;
  using Lanes = avx2::Lanes;
  using Words = avx2::Words;
  static constexpr int kMaxRows = avx2::kMaxRows;
  static constexpr int kStreamRows = 1;  // the processor fetches what one row reads in order
  static constexpr bool kBf16Products = false;
  // With 16 rows this takes less than two thirds of the time of decoding; a scratch panel has space for the converted
  // values of as many.
  static constexpr int kCodeRows = 16;
  static constexpr int kWordRows = 8;
  static constexpr int kNumberRows = 2;
  // In fp32, 6 rows x 2 vectors are 12 accumulators; 2 vectors of weights and a row's value fit beside.
  static constexpr int kFp32Rows = 6;
  static constexpr int kFp32Halves = 1;
  static constexpr bool kBlocked = false;
  template <class Stored, int kRows, int kColumns>
  using DotSums = avx2::DotSums<Stored, kRows, kColumns>;

  static void require() {}

  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const bf16*, const bf16*, float*, Ahead&);
    if (rows == 1) return multiply_row(steps, a, panel, tile, ahead);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_half<static_cast<int>(row) + 1, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    const Multiply multiply_16_lanes = kByRows[static_cast<std::size_t>(rows - 1)];
    multiply_16_lanes(steps, a, panel, tile, ahead);
    multiply_16_lanes(steps, a, panel + 2 * kHalfPanel, tile + kHalfPanel, ahead);
  }

  // Once per unrolled step of each half, or of a row's panel.
  static constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
    return (rows == 1 ? 1 : 2) * steps / kUnroll;
  }

  // One pair of k of all outputs, 2 x 2 elements at a time.
  static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    const bf16* from = source + piece * 2 * kPanelWidth;
    bf16* to = target + piece * 2 * 2;
    for (int lane = 0; lane < kPanelWidth; lane += 2) {
      to[0] = from[0];  // (lane, k)
      to[1] = from[2];  // (lane + 1, k)
      to[2] = from[1];  // (lane, k + 1)
      to[3] = from[3];
      from += 2 * 2;
      to += 2 * kPanelWidth;
    }
  }
};
static_assert(InstructionSet<Isa>);

}  // namespace ktc::avx2::inline KTC_UNIT
