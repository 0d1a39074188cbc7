// Products of keys' codes with AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ktc/isa/avx2.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/top_positions.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx2::inline KTC_UNIT {

struct KeyProducts {
  static constexpr int kMostRows = 4;
  static constexpr int kMostBlocks = 1;
  static constexpr bool kTables = true;

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

  // By VPSHUFB, which reads 32 numbers of a table for each 16 bytes: the bytes of 16 keys are put side by side. Bytes
  // are added in 16 bits: as they are, and the upper ones apart.
  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_tables(const std::uint8_t* codes, std::int64_t groups, const std::uint8_t* tables,
                                          std::int64_t stride, std::int32_t* sums) {
    for (std::int64_t begin = 0; begin < groups; begin += Tables::kGroupsInWords) {
      const std::int64_t end = std::min(begin + Tables::kGroupsInWords, groups);
      TableSums<kRows> sum;
      for (std::int64_t group = begin; group < end; ++group, codes += kGroupBytes) {
        __builtin_prefetch(codes + kAhead, 0, 3);
        sum.add(codes, tables + group * Tables::kBytes, stride);
      }
      sum.store(sums, end - begin, begin == 0);
    }
  }

 private:
  using Tables = SignTables;
  static constexpr std::int64_t kAhead = 8192;

  template <int kRows>
  struct TableSums {
    __m256i both[kRows], upper[kRows];

    [[gnu::always_inline]] TableSums() {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) both[row] = upper[row] = _mm256_setzero_si256();
    }
    [[gnu::always_inline]] void add(const std::uint8_t* codes, const std::uint8_t* tables, std::int64_t stride) {
      const auto* from = reinterpret_cast<const __m256i*>(codes);
      const __m256i by_byte =
          _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
      const __m256i left = _mm256_shuffle_epi8(_mm256_loadu_si256(from), by_byte);
      const __m256i right = _mm256_shuffle_epi8(_mm256_loadu_si256(from + 1), by_byte);
      add(_mm256_permute4x64_epi64(_mm256_unpacklo_epi32(left, right), 0xd8), tables, stride);  // bytes 0 and 1
      add(_mm256_permute4x64_epi64(_mm256_unpackhi_epi32(left, right), 0xd8), tables + 32, stride);
    }
    [[gnu::always_inline]] void add(__m256i bytes, const std::uint8_t* tables, std::int64_t stride) {
      const __m256i low_half = _mm256_set1_epi8(15);
      const __m256i low = _mm256_and_si256(bytes, low_half);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_half);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const auto* of_row = reinterpret_cast<const __m256i*>(tables + row * stride);
        const __m256i sums_of_tables = _mm256_add_epi8(_mm256_shuffle_epi8(_mm256_loadu_si256(of_row), low),
                                                       _mm256_shuffle_epi8(_mm256_loadu_si256(of_row + 2), high));
        both[row] = _mm256_add_epi16(both[row], sums_of_tables);
        upper[row] = _mm256_add_epi16(upper[row], _mm256_srli_epi16(sums_of_tables, 8));
      }
    }
    // Both lanes have the keys 0 to 3, 8 to 11, 4 to 7 and 12 to 15.
    [[gnu::always_inline]] void store(std::int32_t* sums, std::int64_t groups, bool first) const {
      const __m256i bias = _mm256_set1_epi32(static_cast<int>(8 * Tables::kBias * groups));
      auto* to = reinterpret_cast<__m256i*>(sums);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row, to += 2) {
        const __m128i even = lanes_of(_mm256_sub_epi16(both[row], _mm256_slli_epi16(upper[row], 8)));
        const __m128i odd = lanes_of(upper[row]);
        const __m256i one = _mm256_sub_epi32(_mm256_cvtepu16_epi32(_mm_unpacklo_epi16(even, odd)), bias);
        const __m256i other = _mm256_sub_epi32(_mm256_cvtepu16_epi32(_mm_unpackhi_epi16(even, odd)), bias);
        __m256i left = _mm256_permute2x128_si256(one, other, 0x20), right = _mm256_permute2x128_si256(one, other, 0x31);
        left = _mm256_add_epi32(left, left);
        right = _mm256_add_epi32(right, right);
        if (!first) {
          left = _mm256_add_epi32(left, _mm256_loadu_si256(to));
          right = _mm256_add_epi32(right, _mm256_loadu_si256(to + 1));
        }
        _mm256_storeu_si256(to, left);
        _mm256_storeu_si256(to + 1, right);
      }
    }
    [[gnu::always_inline]] static __m128i lanes_of(__m256i words) {
      return _mm_add_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    }
  };

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
    // Writes the sums in 32 bits, or adds them to earlier ones.
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
struct ScoreLanes : PlainScoreLanes {
  [[gnu::always_inline]] static std::int64_t append(const std::int32_t* scores, std::int32_t bound, std::int64_t first,
                                                    std::int32_t* positions) {
    const __m256i below = _mm256_set1_epi32(bound - 1);
    const auto reach = [&](const std::int32_t* eight) {
      const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(eight));
      return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(values, below))));
    };
    std::int64_t count = 0;
    for (unsigned mask = reach(scores) | reach(scores + 8) << 8; mask != 0; mask &= mask - 1) {
      positions[count++] = static_cast<std::int32_t>(first) + std::countr_zero(mask);
    }
    return count;
  }
};

}  // namespace ktc::avx2::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct ScoreLanes<avx2::Isa> : avx2::ScoreLanes {};

template <>
struct KeyDots<avx2::Isa> : avx2::KeyProducts {};

}  // namespace ktc::inline KTC_UNIT
