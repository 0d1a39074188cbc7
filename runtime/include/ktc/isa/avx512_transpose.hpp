// A packed 32 x 32 block of bf16 with outputs and contraction exchanged, for every ISA that has AVX-512.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>

#include "ktc/element.hpp"

namespace ktc::avx512 {

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

// Of the four 16 x 16 quarters of a block, piece by piece: two of the rebuilt vectors.
[[gnu::always_inline]] inline void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
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

}  // namespace ktc::avx512
