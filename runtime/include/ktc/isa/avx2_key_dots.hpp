// Products of keys' codes with AVX2. VPMADDUBSW adds two products of bytes in 16 bits, which codes below 16 never fill.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/isa/avx2.hpp"
#include "ktc/key_dots.hpp"

namespace ktc::avx2 {

struct KeyProducts {
  static constexpr int kMostRows = 4;
  static constexpr int kMostBlocks = 1;
  static constexpr bool kTables = false;

  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_nibbles(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                           std::int64_t stride, std::int32_t* sums) {
    const __m256i low_half = _mm256_set1_epi8(15);
    Sums<kRows> sum;
    for (std::int64_t group = 0; group < groups; ++group, codes += 64, query += 8) {
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + side);
        sum.add(side, _mm256_and_si256(both, low_half), query, stride);
        sum.add(side, _mm256_and_si256(_mm256_srli_epi16(both, 4), low_half), query + 4, stride);
      }
    }
    sum.store(sums);
  }

  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_bits(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                        std::int64_t stride, std::int32_t* sums) {
    const __m256i two = _mm256_set1_epi8(2);
    Sums<kRows> sum;
    for (std::int64_t group = 0; group < groups; ++group, codes += kGroupBytes, query += 32) {
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes) + side);
        sum.add(side, _mm256_and_si256(_mm256_add_epi8(eight, eight), two), query, stride);
#pragma GCC unroll 7
        for (int bit = 1; bit < 8; ++bit) {
          sum.add(side, _mm256_and_si256(_mm256_srli_epi16(eight, bit - 1), two), query + 4 * bit, stride);
        }
      }
    }
    sum.store(sums);
  }

 private:
  template <int kRows>
  struct Sums {
    __m256i of[kRows][2];

    [[gnu::always_inline]] Sums() {
#pragma GCC unroll 4
      for (auto& row : of) row[0] = row[1] = _mm256_setzero_si256();
    }
    [[gnu::always_inline]] void add(int side, __m256i codes, const std::int8_t* query, std::int64_t stride) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        std::int32_t four;
        __builtin_memcpy(&four, query + row * stride, sizeof four);
        const __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(four));
        of[row][side] = _mm256_add_epi32(of[row][side], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
    }
    [[gnu::always_inline]] void store(std::int32_t* sums) const {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row, sums += kKeysTogether) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), of[row][0]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums) + 1, of[row][1]);
      }
    }
  };
};

}  // namespace ktc::avx2

namespace ktc {

template <>
struct KeyDots<avx2::Isa> : avx2::KeyProducts {};

}  // namespace ktc
