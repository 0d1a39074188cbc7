// Products of the codes of 16 keys with those of queries: unsigned ones of 4 bits or 1 bit with signed bytes, summed in
// 32 bits. Sums are exact, so every instruction set has the same. Its header `ktc/isa/NAME_key_dots.hpp` chooses them.
//
// Groups of 64 bytes have four bytes per key. Of codes of 4 bits, the low halves have neighbours 0 to 3, and the high
// ones 4 to 7. Of codes of one bit, the lowest bits have neighbours 0 to 3, the next bits 4 to 7, and so on up to 31.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

inline constexpr std::int64_t kKeysTogether = 16;
inline constexpr std::int64_t kGroupBytes = 64;
// The greatest code of a query beside keys' codes of one bit: four of them add up to at most 60, so that sums of four
// with a bias are bytes, and two such bytes add up to one.
inline constexpr int kLargestBesideBits = 15;

// Without VNNI products are added in 16 bits as long as they fit: VPMADDUBSW adds two of up to 15 * 127, and a group
// has two such pairs for each sum.
inline constexpr std::int64_t kNibbleGroupsInWords = 32767 / (2 * 15 * 127) / 2;

// Products of a query with codes of one bit, from tables: half a byte has one bit of four neighbours of a key, and a
// table of 16 has the sums of the query's numbers.
struct SignTables {
  static constexpr std::int64_t kBytes = 128;  // of a group: tables for the low halves of four bytes, and the high ones
  static constexpr int kBias = 4 * kLargestBesideBits;  // that is in every number of a table
  static constexpr std::int64_t kGroupsInWords = 65535 / (8 * 2 * kBias);

  static void fill(const std::int8_t* query, std::int64_t groups, std::uint8_t* tables) {
    for (std::int64_t table = 0; table < groups * 8; ++table, tables += 16) {
      const std::int8_t* four = query + table / 4 * 16 + table % 4;
      for (int bits = 0; bits < 16; ++bits) {
        int sum = kBias;
        for (int bit = 0; bit < 4; ++bit) sum += (bits >> bit & 1) * four[4 * bit];
        tables[bits] = static_cast<std::uint8_t>(sum);
      }
    }
  }
};

template <class Isa>
struct KeyDots;

// In plain C++.
struct PlainKeyDots {
  static constexpr int kMostRows = 4;
  static constexpr int kMostBlocks = 1;   // of 16 keys that are multiplied at a time
  static constexpr bool kTables = false;  // whether products with bits are `of_tables`, the same sums

  // A set bit counts as 2: codes of one bit then are 2 b, and numbers 2 b - 1.
  // sums[block][row][16] = sum over k of codes[block][k][key] * query[row][k].
  template <int kRows, int kBlocks>
  static void of_nibbles(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query, std::int64_t stride,
                         std::int32_t* sums) {
    std::fill(sums, sums + kRows * kKeysTogether, 0);
    for (std::int64_t group = 0; group < groups; ++group, codes += 64) {
      for (int row = 0; row < kRows; ++row) {
        const std::int8_t* of_row = query + row * stride + group * 8;
        for (std::int64_t key = 0; key < kKeysTogether; ++key) {
          for (int k = 0; k < 4; ++k) {
            const int both = codes[key * 4 + k];
            sums[row * kKeysTogether + key] += (both & 15) * of_row[k] + (both >> 4) * of_row[k + 4];
          }
        }
      }
    }
  }

  template <int kRows, int kBlocks>
  static void of_bits(const std::uint8_t* codes, std::int64_t groups, const std::int8_t* query, std::int64_t stride,
                      std::int32_t* sums) {
    std::fill(sums, sums + kRows * kKeysTogether, 0);
    for (std::int64_t group = 0; group < groups; ++group, codes += kGroupBytes) {
      for (int row = 0; row < kRows; ++row) {
        const std::int8_t* of_row = query + row * stride + group * 32;
        for (std::int64_t key = 0; key < kKeysTogether; ++key) {
          for (int k = 0; k < 32; ++k) {
            sums[row * kKeysTogether + key] += 2 * (codes[key * 4 + k % 4] >> (k / 4) & 1) * of_row[k];
          }
        }
      }
    }
  }
};

}  // namespace ktc::inline KTC_UNIT
