// The tile instructions of AMX as functions, for processors without them. Each tile has 16 rows of 64 bytes: their
// shape (LDTILECFG) is not looked at. Include it before the headers of kernels.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release

namespace software_tiles {

inline constexpr int kRows = 16, kBytes = 64, kSums = kBytes / 4;

struct Tile {
  alignas(64) unsigned char rows[kRows][kBytes];
};
inline thread_local Tile tiles[8];

inline void load(int tile, const void* from, std::int64_t stride) {
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(tiles[tile].rows[row], static_cast<const char*>(from) + row * stride, kBytes);
  }
}

inline void store(int tile, void* to, std::int64_t stride) {
  for (int row = 0; row < kRows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile].rows[row], kBytes);
  }
}

// The two bf16 of 32 bits.
struct Pair {
  float first, second;

  explicit Pair(std::uint32_t bits) {
    const std::uint32_t low = bits << 16, high = bits & 0xffff0000u;
    std::memcpy(&first, &low, sizeof first);
    std::memcpy(&second, &high, sizeof second);
  }
};

// sums[row][column] += the products of the pairs left[row][k] and right[k][column].
inline void multiply(int sums, int left, int right) {
  std::uint32_t of_left[kRows][kSums], of_right[kRows][kSums];
  float found[kRows][kSums];
  std::memcpy(of_left, tiles[left].rows, sizeof of_left);
  std::memcpy(of_right, tiles[right].rows, sizeof of_right);
  std::memcpy(found, tiles[sums].rows, sizeof found);
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kSums; ++k) {
      const Pair one(of_left[row][k]);
      for (int column = 0; column < kSums; ++column) {
        const Pair other(of_right[k][column]);
        found[row][column] += one.first * other.first + one.second * other.second;
      }
    }
  }
  std::memcpy(tiles[sums].rows, found, sizeof found);
}

}  // namespace software_tiles

#define _tile_loadd(tile, from, stride) software_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) software_tiles::store(tile, to, stride)
#define _tile_zero(tile) std::memset(&software_tiles::tiles[tile], 0, sizeof software_tiles::tiles[tile])
#define _tile_dpbf16ps(sums, left, right) software_tiles::multiply(sums, left, right)
#define _tile_loadconfig(shape) static_cast<void>(shape)
#define _tile_release() static_cast<void>(0)
#define syscall(...) 0L  // request_tiles
