// Products of keys' codes for every ISA with AVX-512: `Add` adds four products of bytes to each 32 bits of a sum, and
// says how many groups of codes it can add before these have to be widened.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "ktc/key_dots.hpp"
#include "ktc/shape.hpp"

namespace ktc::avx512 {

struct ScoreLanes {
  [[gnu::always_inline]] static void order(const float* scores, std::int32_t* ordered) {
    const __m512 each = _mm512_loadu_ps(scores);
    const __m512i bits = _mm512_castps_si512(each), greatest = _mm512_set1_epi32(0x7fffffff);
    const __m512i order = _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), greatest));
    const __mmask16 invalid = _mm512_cmp_ps_mask(each, each, _CMP_UNORD_Q);
    _mm512_storeu_si512(ordered, _mm512_mask_mov_epi32(order, invalid, greatest));
  }

  // By compression of registers, without a branch: one of three vectors has such a score.
  [[gnu::always_inline]] static std::int64_t append(const std::int32_t* scores, std::int32_t bound, std::int64_t first,
                                                    std::int32_t* positions) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i each = _mm512_loadu_si512(scores);
    const __mmask16 reach = _mm512_cmpge_epi32_mask(each, _mm512_set1_epi32(bound));
    const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(reach, at));
    return std::popcount(static_cast<unsigned>(reach));
  }

  [[gnu::always_inline]] static std::int64_t keep(const std::int32_t* scores, std::int32_t bound,
                                                  const std::int32_t* positions, std::int32_t* kept,
                                                  std::int32_t* reaching) {
    const __m512i each = _mm512_loadu_si512(scores), at = _mm512_loadu_si512(positions);
    const __mmask16 reach = _mm512_cmpge_epi32_mask(each, _mm512_set1_epi32(bound));
    _mm512_storeu_si512(kept, _mm512_maskz_compress_epi32(reach, at));
    _mm512_storeu_si512(reaching, _mm512_maskz_compress_epi32(reach, each));
    return std::popcount(static_cast<unsigned>(reach));
  }
};

template <class Add>
struct KeyProducts {
  static constexpr int kMostRows = 8;
  static constexpr int kMostBlocks = 2;  // each number of a query is loaded once for both
  static constexpr bool kTables = false;
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

  template <int kRows, int kBlocks>
  [[gnu::noinline]] static void of_bits(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query,
                                        std::int64_t stride, std::int32_t* sums) {
    const __m512i two = _mm512_set1_epi8(2);
    in_parts<kRows, kBlocks>(codes, groups, Add::kBitGroups, sums, [&](auto& sum, const __m512i(&eight)[kBlocks]) {
      __m512i part[kBlocks];
#pragma GCC unroll 2
      for (int block = 0; block < kBlocks; ++block) {
        part[block] = _mm512_and_si512(_mm512_add_epi8(eight[block], eight[block]), two);
      }
      sum.add(0, part, query, stride);
#pragma GCC unroll 7
      for (int bit = 1; bit < 8; ++bit) {
#pragma GCC unroll 2
        for (int block = 0; block < kBlocks; ++block) {
          part[block] = _mm512_and_si512(_mm512_srli_epi16(eight[block], bit - 1), two);
        }
        sum.add(bit, part, query + 4 * bit, stride);
      }
      query += 32;
    });
  }

 private:
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
    // Writes the sums in 32 bits, or adds them to what is there.
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
        __m512i each[kBlocks];
#pragma GCC unroll 2
        for (int block = 0; block < kBlocks; ++block, ahead += kGroupBytes) {
          __builtin_prefetch(ahead, 0, 3);
          each[block] = _mm512_loadu_si512(codes + block * of_block);
        }
        codes += kGroupBytes;
        add(sum, each);
      }
      sum.store(sums, begin == 0);
    }
  }
};

}  // namespace ktc::avx512
