// A packed 32 x 32 block of bf16 with outputs and contraction exchanged, for every ISA that has AVX-512.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

// Transposing a 16 x 16 quarter of a block: k and n are its two indices; before, register k/2 holds (n, k%2) in its
// 16-bit places, after, register n/2 holds (k, n%2). Of two neighbouring registers, one two-register permutation each
// makes every 128-bit piece of the result, of bits (k0, n0, n1) to (n0, k0, k1) of the place inside a piece, where k1
// chooses the register and n1 is constant. The pieces then move to their final places through memory: a product beside
// it leaves stores free, while each shuffle takes the place of one of its multiply-adds.
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

// Transposes the four 16 x 16 quarters of a block piece by piece; a piece is two registers.
[[gnu::always_inline]] inline void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
  constexpr int kStride = 2 * 32;          // a quarter has every second vector of its block
  constexpr int kSecondHalf = 8 * 2 * 32;  // 16 further along k
  constexpr int kRightLanes = 32;          // 16 further along n
  constexpr int kPiece = 8;
  const unsigned right = piece / 4 % 2;
  const unsigned lower = piece / 8;
  const unsigned pair = piece % 4;
  const bf16* from = source + right * kRightLanes + lower * kSecondHalf + pair * 2 * kStride;
  bf16* to = target + right * kSecondHalf + lower * kRightLanes + pair * kPiece;
  const __m512i even = _mm512_load_si512(from);
  const __m512i odd = _mm512_load_si512(from + kStride);
  alignas(64) bf16 moved[2][32];
  _mm512_store_si512(moved[0], _mm512_permutex2var_epi16(even, _mm512_load_si512(kLowerWords.data()), odd));
  _mm512_store_si512(moved[1], _mm512_permutex2var_epi16(even, _mm512_load_si512(kUpperWords.data()), odd));
  const bf16* pieces = moved[0];
  asm("" : "+r"(pieces) : "m"(moved));  // otherwise the compiler would extract the pieces by shuffles
#pragma GCC unroll 8
  for (int vector = 0; vector < 8; ++vector) {
    const auto* taken = reinterpret_cast<const __m128i*>(pieces + vector % 2 * 32 + vector / 2 * kPiece);
    _mm_store_si128(reinterpret_cast<__m128i*>(to + vector * kStride), _mm_load_si128(taken));
  }
}

}  // namespace ktc::avx512::inline KTC_UNIT
