// Products of keys' codes with AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ktc/isa/avx2.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/top_positions.hpp"

namespace ktc::avx2 {

struct KeyProducts {
  static constexpr int kMostRows = 4;
  static constexpr int kMostBlocks = 1;
  static constexpr bool kTables = false;

  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_nibbles(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                           std::int64_t stride, std::int32_t* sums) {
    const __m256i low_half = _mm256_set1_epi8(15);
    in_parts<kRows>(codes, groups, kNibbleGroupsInWords, sums, [&](auto& sum, __m256i left, __m256i right) {
      sum.add(_mm256_and_si256(left, low_half), _mm256_and_si256(right, low_half), query, stride);
      left = _mm256_and_si256(_mm256_srli_epi16(left, 4), low_half);
      right = _mm256_and_si256(_mm256_srli_epi16(right, 4), low_half);
      sum.add(left, right, query + 4, stride);
      query += 8;
    });
  }

  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_bits(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                        std::int64_t stride, std::int32_t* sums) {
    const __m256i two = _mm256_set1_epi8(2);
    in_parts<kRows>(codes, groups, kBitGroupsInWords, sums, [&](auto& sum, __m256i left, __m256i right) {
      sum.add(_mm256_and_si256(_mm256_add_epi8(left, left), two), _mm256_and_si256(_mm256_add_epi8(right, right), two),
              query, stride);
#pragma GCC unroll 7
      for (int bit = 1; bit < 8; ++bit) {
        sum.add(_mm256_and_si256(_mm256_srli_epi16(left, bit - 1), two),
                _mm256_and_si256(_mm256_srli_epi16(right, bit - 1), two), query + 4 * bit, stride);
      }
      query += 32;
    });
  }

 private:
  static constexpr std::int64_t kAhead = 8192;

  template <int kRows>
  struct Sums {
    __m256i of[kRows][2];

    [[gnu::always_inline]] Sums() {
#pragma GCC unroll 4
      for (auto& row : of) row[0] = row[1] = _mm256_setzero_si256();
    }
    [[gnu::always_inline]] void add(__m256i left, __m256i right, const std::int8_t* query, std::int64_t stride) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        std::int32_t four;
        __builtin_memcpy(&four, query + row * stride, sizeof four);
        const __m256i numbers = _mm256_set1_epi32(four);
        of[row][0] = _mm256_add_epi16(of[row][0], _mm256_maddubs_epi16(left, numbers));
        of[row][1] = _mm256_add_epi16(of[row][1], _mm256_maddubs_epi16(right, numbers));
      }
    }
    // Writes the sums in 32 bits, or adds them to what is there.
    [[gnu::always_inline]] void store(std::int32_t* sums, bool first) const {
      auto* to = reinterpret_cast<__m256i*>(sums);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
        for (int side = 0; side < 2; ++side, ++to) {
          const __m256i total = _mm256_madd_epi16(of[row][side], _mm256_set1_epi16(1));
          _mm256_storeu_si256(to, first ? total : _mm256_add_epi32(total, _mm256_loadu_si256(to)));
        }
      }
    }
  };

  // Calls `add` with both halves of every group, whose sums are widened after `most` groups. Codes are fetched in their
  // order.
  template <int kRows, class Group>
  [[gnu::always_inline]] static void in_parts(const std::uint8_t* codes, std::int64_t groups, std::int64_t most,
                                              std::int32_t* sums, const Group& add) {
    for (std::int64_t begin = 0; begin < groups; begin += most) {
      Sums<kRows> sum;
      for (std::int64_t group = begin; group < std::min(begin + most, groups); ++group, codes += kGroupBytes) {
        __builtin_prefetch(codes + kAhead, 0, 3);
        const auto* from = reinterpret_cast<const __m256i*>(codes);
        add(sum, _mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
      }
      sum.store(sums, begin == 0);
    }
  }
};

// By the bits of a mask: few scores reach a bound.
struct ScoreLanes : ktc::ScoreLanes<void> {
  [[gnu::always_inline]] static std::int64_t append(const std::int32_t* scores, std::int32_t bound, std::int64_t first,
                                                    std::int32_t* positions) {
    const __m256i below = _mm256_set1_epi32(bound - 1);
    const auto reach = [&](const std::int32_t* eight) {
      const __m256i each = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(eight));
      return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(each, below))));
    };
    std::int64_t count = 0;
    for (unsigned mask = reach(scores) | reach(scores + 8) << 8; mask != 0; mask &= mask - 1) {
      positions[count++] = static_cast<std::int32_t>(first) + std::countr_zero(mask);
    }
    return count;
  }
};

}  // namespace ktc::avx2

namespace ktc {

template <>
struct ScoreLanes<avx2::Isa> : avx2::ScoreLanes {};

template <>
struct KeyDots<avx2::Isa> : avx2::KeyProducts {};

}  // namespace ktc
