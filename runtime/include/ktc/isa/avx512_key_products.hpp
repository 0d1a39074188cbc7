// Products of keys' codes for every ISA with AVX-512: `Add` adds four products of bytes to each 32 bits of a sum, and
// says how many groups of codes it can add before these have to be widened.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ktc/key_dots.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::avx512::inline KTC_UNIT {

struct ScoreLanes {
  [[gnu::always_inline]] static void order(const float* scores, std::int32_t* ordered) {
    const __m512 values = _mm512_loadu_ps(scores);
    const __m512i bits = _mm512_castps_si512(values), greatest = _mm512_set1_epi32(0x7fffffff);
    const __m512i order = _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), greatest));
    const __mmask16 invalid = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    _mm512_storeu_si512(ordered, _mm512_mask_mov_epi32(order, invalid, greatest));
  }

  // By compression of registers, without a branch: one of three vectors has such a score.
  [[gnu::always_inline]] static std::int64_t append(const std::int32_t* scores, std::int32_t bound, std::int64_t first,
                                                    std::int32_t* positions) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i values = _mm512_loadu_si512(scores);
    const __mmask16 reach = _mm512_cmpge_epi32_mask(values, _mm512_set1_epi32(bound));
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(reach, at));
    return std::popcount(static_cast<unsigned>(reach));
  }

  [[gnu::always_inline]] static std::int64_t keep(const std::int32_t* scores, std::int32_t bound,
                                                  const std::int32_t* positions, std::int32_t* kept,
                                                  std::int32_t* reaching) {
    const __m512i values = _mm512_loadu_si512(scores), at = _mm512_loadu_si512(positions);
    const __mmask16 reach = _mm512_cmpge_epi32_mask(values, _mm512_set1_epi32(bound));
    _mm512_storeu_si512(kept, _mm512_maskz_compress_epi32(reach, at));
    _mm512_storeu_si512(reaching, _mm512_maskz_compress_epi32(reach, values));
    return std::popcount(static_cast<unsigned>(reach));
  }
};

template <class Add>
struct KeyProducts {
  static constexpr int kMostRows = 8;
  static constexpr int kMostBlocks = 2;  // each number of a query is loaded once for both
  static constexpr bool kTables = true;
  static constexpr std::int64_t kAhead = 8192;

  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_nibbles(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                           std::int64_t stride, std::int32_t* sums) {
    const __m512i low_half = _mm512_set1_epi8(15);
    in_parts<kRows, kBlocks>(codes, groups, Add::kNibbleGroups, sums, [&](auto& sum, const __m512i(&both)[kBlocks]) {
      __m512i part[kBlocks];
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block) part[block] = _mm512_and_si512(both[block], low_half);
      sum.add(0, part, query, stride);
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block) {
        part[block] = _mm512_and_si512(_mm512_srli_epi16(both[block], 4), low_half);
      }
      sum.add(1, part, query + 4, stride);
      query += 8;
    });
  }

  // By VPSHUFB, which reads 64 numbers of a table for each 16 bytes: the bytes of 16 keys are put side by side. Bytes
  // are added in 16 bits: as they are, and the upper ones apart.
  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_tables(const std::uint8_t* codes, std::int64_t groups, const std::uint8_t* tables,
                                          std::int64_t stride, std::int32_t* sums) {
    const std::uint8_t* ahead = codes + kAhead;
    for (int block = 0; block < kBlocks; ++block, sums += kRows * kKeysTogether) {
      for (std::int64_t begin = 0; begin < groups; begin += Tables::kGroupsInWords) {
        const std::int64_t end = std::min(begin + Tables::kGroupsInWords, groups);
        TableSums<kRows> sum;
        for (std::int64_t group = begin; group < end; ++group, codes += kGroupBytes, ahead += kGroupBytes) {
          __builtin_prefetch(ahead, 0, 3);
          sum.add(_mm512_loadu_si512(codes), tables + group * Tables::kBytes, stride);
        }
        sum.store(sums, end - begin, begin == 0);
      }
    }
  }

 protected:
  using Tables = SignTables;

 private:
  template <int kRows>
  struct TableSums {
    __m512i both[kRows], upper[kRows];

    [[gnu::always_inline]] TableSums() {
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) both[row] = upper[row] = _mm512_setzero_si512();
    }
    [[gnu::always_inline]] void add(__m512i codes, const std::uint8_t* tables, std::int64_t stride) {
      const __m512i low_half = _mm512_set1_epi8(15);
      const __m512i by_byte =
          _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
      const __m512i by_lane = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const __m512i bytes = _mm512_permutexvar_epi32(by_lane, _mm512_shuffle_epi8(codes, by_byte));
      const __m512i low = _mm512_and_si512(bytes, low_half);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low_half);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const std::uint8_t* of_row = tables + row * stride;
        const __m512i sums_of_tables = _mm512_add_epi8(_mm512_shuffle_epi8(_mm512_loadu_si512(of_row), low),
                                                       _mm512_shuffle_epi8(_mm512_loadu_si512(of_row + 64), high));
        both[row] = _mm512_add_epi16(both[row], sums_of_tables);
        upper[row] = _mm512_add_epi16(upper[row], _mm512_srli_epi16(sums_of_tables, 8));
      }
    }
    [[gnu::always_inline]] void store(std::int32_t* sums, std::int64_t groups, bool first) const {
      const __m512i bias = _mm512_set1_epi32(static_cast<int>(8 * Tables::kBias * groups));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row, sums += kKeysTogether) {
        const __m128i even = lanes_of(_mm512_sub_epi16(both[row], _mm512_slli_epi16(upper[row], 8)));
        const __m128i odd = lanes_of(upper[row]);
        const __m256i keys = _mm256_set_m128i(_mm_unpackhi_epi16(even, odd), _mm_unpacklo_epi16(even, odd));
        __m512i total = _mm512_sub_epi32(_mm512_cvtepu16_epi32(keys), bias);
        total = _mm512_add_epi32(total, total);
        if (!first) total = _mm512_add_epi32(total, _mm512_loadu_si512(sums));
        _mm512_storeu_si512(sums, total);
      }
    }
    // The sum of four lanes of words.
    [[gnu::always_inline]] static __m128i lanes_of(__m512i words) {
      const __m256i half = _mm256_add_epi16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
      return _mm_add_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }
  };

  // Few rows of one block have two sums each, since the next addition to one waits for the last.
  template <int kRows, int kBlocks>
  struct Sums {
    static constexpr int kChains = kRows * kBlocks <= 4 ? 2 : 1;
    __m512i of[kChains][kBlocks][kRows];

    [[gnu::always_inline]] Sums() {
#pragma GCC unroll 2
      for (auto& chain : of) {
#pragma GCC unroll 2
        for (auto& block : chain) {
#pragma GCC unroll 8
          for (__m512i& row : block) row = _mm512_setzero_si512();
        }
      }
    }
    [[gnu::always_inline]] void add(int turn, const __m512i (&codes)[kBlocks], const std::int8_t* query,
                                    std::int64_t stride) {
      auto& chain = of[turn % kChains];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        std::int32_t four;
        __builtin_memcpy(&four, query + row * stride, sizeof four);
        const __m512i numbers = _mm512_set1_epi32(four);
#pragma GCC unroll 2
        for (int block = 0; block < kBlocks; ++block) {
          chain[block][row] = Add::products(chain[block][row], codes[block], numbers);
        }
      }
    }
    // Writes the sums in 32 bits, or adds them to earlier ones.
    [[gnu::always_inline]] void store(std::int32_t* sums, bool first) const {
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row, sums += kKeysTogether) {
          __m512i total = Add::widened(of[0][block][row]);
          if constexpr (kChains == 2) total = _mm512_add_epi32(total, Add::widened(of[1][block][row]));
          if (!first) total = _mm512_add_epi32(total, _mm512_loadu_si512(sums));
          _mm512_storeu_si512(sums, total);
        }
      }
    }
  };

  // Calls `add` with every group of the blocks, whose sums are widened after `most` groups. Blocks are neighbours, and
  // fetched in their order.
  template <int kRows, int kBlocks, class Group>
  [[gnu::always_inline]] static void in_parts(const std::uint8_t* codes, std::int64_t groups, std::int64_t most,
                                              std::int32_t* sums, const Group& add) {
    const std::int64_t of_block = groups * kGroupBytes;
    const std::uint8_t* ahead = codes + kAhead;
    for (std::int64_t begin = 0; begin < groups; begin += most) {
      Sums<kRows, kBlocks> sum;
      for (std::int64_t group = begin; group < std::min(begin + most, groups); ++group) {
        __m512i lines[kBlocks];
#pragma GCC unroll 2
        for (int block = 0; block < kBlocks; ++block, ahead += kGroupBytes) {
          __builtin_prefetch(ahead, 0, 3);
          lines[block] = _mm512_loadu_si512(codes + block * of_block);
        }
        codes += kGroupBytes;
        add(sum, lines);
      }
      sum.store(sums, begin == 0);
    }
  }
};

}  // namespace ktc::avx512::inline KTC_UNIT
