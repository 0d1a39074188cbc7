// Products of keys' codes for every ISA with AVX-512: `Add` adds four products of bytes to each 32-bit sum.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/key_dots.hpp"

namespace ktc::avx512 {

template <class Add>
struct KeyProducts {
  static constexpr int kMostRows = 8;

  template <int kRows>
  [[gnu::noinline]] static void of_nibbles(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                           std::int64_t stride, std::int32_t* sums) {
    constexpr std::int64_t kAhead = 4096;
    const __m512i low_half = _mm512_set1_epi8(15);
    // Two sums of few rows, since the next addition to one waits for the last.
    constexpr int kChains = kRows <= 4 ? 2 : 1;
    Sums<kRows, kChains> sum;
    for (std::int64_t group = 0; group < groups; ++group, codes += 64, query += 8) {
      __builtin_prefetch(codes + kAhead, 0, 0);
      const __m512i both = _mm512_loadu_si512(codes);
      sum.add(0, _mm512_and_si512(both, low_half), query, stride);
      sum.add(kChains - 1, _mm512_and_si512(_mm512_srli_epi16(both, 4), low_half), query + 4, stride);
    }
    sum.store(sums);
  }

  template <int kRows>
  [[gnu::noinline]] static void of_bits(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                        std::int64_t stride, std::int32_t* sums) {
    constexpr std::int64_t kAhead = 4096;
    const __m512i one = _mm512_set1_epi8(1);
    Sums<kRows, 1> sum;
    for (std::int64_t group = 0; group < groups; ++group, codes += 8, query += 4) {
      if (group % 8 == 0) __builtin_prefetch(codes + kAhead, 0, 0);
      std::uint64_t bits;
      __builtin_memcpy(&bits, codes, sizeof bits);
      sum.add(0, _mm512_maskz_mov_epi8(bits, one), query, stride);
    }
    sum.store(sums);
  }

 private:
  template <int kRows, int kChains>
  struct Sums {
    __m512i of[kChains][kRows];

    [[gnu::always_inline]] Sums() {
#pragma GCC unroll 2
      for (auto& chain : of) {
#pragma GCC unroll 8
        for (__m512i& row : chain) row = _mm512_setzero_si512();
      }
    }
    [[gnu::always_inline]] void add(int chain, __m512i codes, const std::int8_t* query, std::int64_t stride) {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        std::int32_t four;
        __builtin_memcpy(&four, query + row * stride, sizeof four);
        of[chain][row] = Add::products(of[chain][row], codes, _mm512_set1_epi32(four));
      }
    }
    [[gnu::always_inline]] void store(std::int32_t* sums) const {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row, sums += kKeysTogether) {
        __m512i total = of[0][row];
        if constexpr (kChains == 2) total = _mm512_add_epi32(total, of[1][row]);
        _mm512_storeu_si512(sums, total);
      }
    }
  };
};

}  // namespace ktc::avx512
