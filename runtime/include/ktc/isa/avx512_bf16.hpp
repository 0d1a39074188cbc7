// AVX-512 with VDPBF16PS: two bf16 products per fp32 lane and instruction. That instruction rounds to nearest even and
// takes and gives denormals as zero, whatever MXCSR says.
#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>
#include <utility>

#include "ktc/element.hpp"
#include "ktc/math.hpp"
#include "ktc/shape.hpp"

namespace ktc::avx512_bf16 {

class Lanes {
 public:
  using Scalar = float;

  explicit Lanes(float value) : v_(_mm512_set1_ps(value)) {}

  static Lanes load(const float* source) { return Lanes(_mm512_loadu_ps(source)); }
  static Lanes from_elements(const bf16* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return Lanes(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
  void store(float* target) const { _mm512_storeu_ps(target, v_); }
  void to_elements(bf16* target) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), std::bit_cast<__m256i>(_mm512_cvtneps_pbh(v_)));
  }
  float sum() const { return _mm512_reduce_add_ps(v_); }

  friend Lanes operator+(Lanes a, Lanes b) { return Lanes(_mm512_add_ps(a.v_, b.v_)); }
  friend Lanes operator-(Lanes a, Lanes b) { return Lanes(_mm512_sub_ps(a.v_, b.v_)); }
  friend Lanes operator*(Lanes a, Lanes b) { return Lanes(_mm512_mul_ps(a.v_, b.v_)); }
  friend Lanes operator/(Lanes a, Lanes b) { return Lanes(_mm512_div_ps(a.v_, b.v_)); }
  friend Lanes fused_multiply_add(Lanes a, Lanes b, Lanes c) { return Lanes(_mm512_fmadd_ps(a.v_, b.v_, c.v_)); }
  friend Lanes rounded(Lanes x) { return Lanes(_mm512_roundscale_ps(x.v_, _MM_FROUND_TO_NEAREST_INT)); }
  friend Lanes absolute(Lanes x) { return Lanes(_mm512_abs_ps(x.v_)); }
  friend Lanes times_power_of_two(Lanes x, Lanes n) { return Lanes(_mm512_scalef_ps(x.v_, n.v_)); }
  friend Lanes clamped(Lanes x, float low, float high) {
    // MAXPS and MINPS return their second operand when one is NaN, so x comes second.
    return Lanes(_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), x.v_)));
  }
  // `value` where low <= x <= high, elsewhere and where x is NaN zero.
  friend Lanes zero_outside(float low, float high, Lanes x, Lanes value) {
    const __mmask16 from_low = _mm512_cmp_ps_mask(x.v_, _mm512_set1_ps(low), _CMP_GE_OQ);
    return Lanes(
        _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(from_low, x.v_, _mm512_set1_ps(high), _CMP_LE_OQ), value.v_));
  }
  // Zero where x <= bound, elsewhere and where x is NaN `value`.
  friend Lanes zero_up_to(float bound, Lanes x, Lanes value) {
    return Lanes(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v_, _mm512_set1_ps(bound), _CMP_NLE_UQ), value.v_));
  }
  friend Lanes with_sign_of(Lanes magnitude, Lanes sign) {
    const __m512 sign_bit = _mm512_set1_ps(-0.0f);
    return Lanes(_mm512_or_ps(_mm512_andnot_ps(sign_bit, magnitude.v_), _mm512_and_ps(sign_bit, sign.v_)));
  }
  friend Lanes exp(Lanes x) { return exp_by_polynomial(x); }
  friend Lanes erf(Lanes x) { return erf_by_polynomial(x); }

 private:
  explicit Lanes(__m512 v) : v_(v) {}
  __m512 v_;
};

// 12 rows x 2 vectors are 24 accumulators; 2 vectors of the panel and 1 broadcast row value beside them leave 5 of the
// 32 registers free, and each load of the panel feeds 12 instructions.
inline constexpr int kMaxRows = 12;

// Up to this many rows an expert is read as fast as memory gives it, not as fast as it is multiplied. Then a prefetch
// into L1, 4 KB ahead, serves better than one of the next panel into L2: 31 instead of 21 GB/s at one token.
inline constexpr int kStreamRows = 4;

inline constexpr int kUnroll = 4;

// Two bf16 read as one integer, which the type rules would otherwise forbid.
using Pair [[gnu::may_alias]] = std::int32_t;

template <int kRows, class Ahead>
[[gnu::noinline]] void multiply_rows(std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& next) {
  constexpr int kStepBytes = 2 * 64;
  constexpr int kStreamAhead = 4096;
  Ahead ahead = next;  // by value: the stores to `tile` must not force it back to memory
  __m512 left[kRows];
  __m512 right[kRows];
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) left[row] = right[row] = _mm512_setzero_ps();

  const auto* b = reinterpret_cast<const char*>(panel);
  const auto* pairs = reinterpret_cast<const Pair*>(a);  // one row's two neighbours, broadcast to all lanes
  for (std::int64_t step = 0; step < steps; step += kUnroll) {
    if constexpr (kRows <= kStreamRows) {
#pragma GCC unroll 8
      for (int line = 0; line < kUnroll * kStepBytes; line += 64) __builtin_prefetch(b + kStreamAhead + line, 0, 0);
    }
    ahead.step();
#pragma GCC unroll 4
    for (int k = 0; k < kUnroll; ++k) {
      const auto b_left = std::bit_cast<__m512bh>(_mm512_load_si512(b + k * kStepBytes));
      const auto b_right = std::bit_cast<__m512bh>(_mm512_load_si512(b + k * kStepBytes + 64));
#pragma GCC unroll 12
      for (int row = 0; row < kRows; ++row) {
        const auto x = std::bit_cast<__m512bh>(_mm512_set1_epi32(pairs[k * kRows + row]));
        left[row] = _mm512_dpbf16_ps(left[row], x, b_left);
        right[row] = _mm512_dpbf16_ps(right[row], x, b_right);
      }
    }
    b += kUnroll * kStepBytes;
    pairs += kUnroll * kRows;
  }
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(tile + row * kPanelWidth, left[row]);
    _mm512_store_ps(tile + row * kPanelWidth + kHalfPanel, right[row]);
  }
  next = ahead;
}

// Transposing a 16 x 16 quarter of a block: k and n are its two indices; before, register k/2 holds (n, k%2) in its
// 16-bit places, after, register n/2 holds (k, n%2). Pieces of 128 bits move by loading them where they belong, which
// costs no shuffle; the rest is one two-register permutation per vector, of bits (k0, n0, n1) to (n0, k0, k1) of the
// place inside a piece, where k1 chooses the register and n1 is constant.
using WordOrder = std::array<std::uint16_t, 32>;

constexpr WordOrder word_order(unsigned n1) {
  WordOrder order{};
  for (unsigned place = 0; place < order.size(); ++place) {
    const unsigned n0 = place & 1;
    const unsigned k0 = place >> 1 & 1;
    const unsigned k1 = place >> 2 & 1;
    const unsigned piece = place >> 3;
    order[place] = static_cast<std::uint16_t>(k0 | n0 << 1 | n1 << 2 | piece << 3 | k1 << 5);
  }
  return order;
}

alignas(64) inline constexpr WordOrder kLowerWords = word_order(0);
alignas(64) inline constexpr WordOrder kUpperWords = word_order(1);

// The 128-bit pieces at `source` of four registers, each two further along k/2.
[[gnu::always_inline]] inline __m512i four_pieces(const bf16* source, int stride) {
  const auto piece = [=](int index) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(source + index * 2 * stride));
  };
  __m512i pieces = _mm512_broadcast_i32x4(piece(0));
  pieces = _mm512_mask_broadcast_i32x4(pieces, 0x00f0, piece(1));
  pieces = _mm512_mask_broadcast_i32x4(pieces, 0x0f00, piece(2));
  return _mm512_mask_broadcast_i32x4(pieces, 0xf000, piece(3));
}

struct Isa {
  using Element = bf16;
  using Accumulator = float;
  using Lanes = avx512_bf16::Lanes;
  static constexpr int kMaxRows = avx512_bf16::kMaxRows;
  static constexpr int kStreamRows = avx512_bf16::kStreamRows;

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` pairs of k, a multiple of 16; tile, panel aligned.
  template <class Ahead>
  static void multiply(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    using Multiply = void (*)(std::int64_t, const bf16*, const bf16*, float*, Ahead&);
    static constexpr auto kByRows = []<std::size_t... row>(std::index_sequence<row...>) {
      return std::array<Multiply, sizeof...(row)>{&multiply_rows<static_cast<int>(row) + 1, Ahead>...};
    }(std::make_index_sequence<kMaxRows>{});
    kByRows[static_cast<std::size_t>(rows - 1)](steps, a, panel, tile, ahead);
  }

  // How often `multiply` calls `ahead.step()`.
  static constexpr std::int64_t steps_ahead(std::int64_t steps) { return steps / kUnroll; }

  // Of the four 16 x 16 quarters of a block, piece by piece: two of the rebuilt vectors.
  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    constexpr int kStride = 2 * 32;          // a quarter has every second vector of its block
    constexpr int kSecondHalf = 8 * 2 * 32;  // 16 further along k
    constexpr int kRightLanes = 32;          // 16 further along n
    const unsigned right = piece / 4 % 2;
    const unsigned lower = piece / 8;
    const bf16* from = source + right * kRightLanes + lower * kSecondHalf + piece % 4 * 8;
    bf16* to = target + right * kSecondHalf + lower * kRightLanes + piece % 4 * 2 * kStride;
    const __m512i even = four_pieces(from, kStride);
    const __m512i odd = four_pieces(from + kStride, kStride);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(even, _mm512_load_si512(kLowerWords.data()), odd));
    _mm512_store_si512(to + kStride, _mm512_permutex2var_epi16(even, _mm512_load_si512(kUpperWords.data()), odd));
  }
};

}  // namespace ktc::avx512_bf16
