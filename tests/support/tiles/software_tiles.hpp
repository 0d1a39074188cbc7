// The tile instructions of AMX as functions, for processors without them. Include it before everything else.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd

namespace software_tiles {

inline constexpr int kRows = 16, kBytes = 64, kWords = kBytes / 4;
using Row = std::array<std::uint32_t, kWords>;

struct Tile {
  int rows = 0;
  std::int64_t bytes = 0;  // of a row
  std::array<Row, kRows> data{};
};
inline thread_local std::array<Tile, 8> tiles;
inline std::atomic<std::int64_t> products{0};

template <class To, class From>
To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// The operand of LDTILECFG has the bytes of a row from 16 on, two per tile, and the numbers of rows from 48 on.
inline void configure(const void* shape) {
  const auto* const bytes = static_cast<const unsigned char*>(shape);
  for (std::size_t tile = 0; tile < tiles.size(); ++tile) {
    tiles[tile] = {.rows = bytes[48 + tile], .bytes = bytes[16 + 2 * tile] | bytes[17 + 2 * tile] << 8};
  }
}

inline void release() {
  tiles = {};
}

// Ends the program where the processor would raise a fault.
inline void require(bool shapes_fit) {
  if (!shapes_fit) std::abort();
}

inline void load(int tile, const void* from, std::int64_t stride) {
  Tile& to = tiles[static_cast<std::size_t>(tile)];
  require(to.rows > 0 && to.bytes > 0);
  to.data = {};
  const auto* row = static_cast<const char*>(from);
  for (int each = 0; each < to.rows; ++each, row += stride) {
    std::memcpy(to.data[static_cast<std::size_t>(each)].data(), row, static_cast<std::size_t>(to.bytes));
  }
}

inline void store(int tile, void* to, std::int64_t stride) {
  const Tile& from = tiles[static_cast<std::size_t>(tile)];
  require(from.rows > 0 && from.bytes > 0);
  auto* row = static_cast<char*>(to);
  for (int each = 0; each < from.rows; ++each, row += stride) {
    std::memcpy(row, from.data[static_cast<std::size_t>(each)].data(), static_cast<std::size_t>(from.bytes));
  }
}

inline void zero(int tile) {
  tiles[static_cast<std::size_t>(tile)].data = {};
}

// sums[row][column] = add(its value, left[row][k], right[k][column]) for every k, in 32 bits each.
template <class Add>
void multiply(int sums, int left, int right, const Add& add) {
  Tile& to = tiles[static_cast<std::size_t>(sums)];
  const Tile &of_left = tiles[static_cast<std::size_t>(left)], &of_right = tiles[static_cast<std::size_t>(right)];
  require(to.rows > 0 && of_left.rows == to.rows && of_left.bytes == 4 * of_right.rows && of_right.bytes == to.bytes);
  products.fetch_add(1, std::memory_order_relaxed);
  for (std::size_t row = 0; row < static_cast<std::size_t>(to.rows); ++row) {
    for (std::size_t k = 0; k < static_cast<std::size_t>(of_left.bytes / 4); ++k) {
      const std::uint32_t one = of_left.data[row][k];
      for (std::size_t column = 0; column < kWords; ++column) {
        to.data[row][column] = add(to.data[row][column], one, of_right.data[k][column]);
      }
    }
  }
}

// TDPBF16PS makes denormal numbers zero; this does not.
inline std::uint32_t add_bf16(std::uint32_t sum, std::uint32_t one, std::uint32_t other) {
  const auto low = [](std::uint32_t pair) { return bits_of<float>(pair << 16); };
  const auto high = [](std::uint32_t pair) { return bits_of<float>(pair & 0xffff0000u); };
  return bits_of<std::uint32_t>(bits_of<float>(sum) + low(one) * low(other) + high(one) * high(other));
}

// Bytes of `one` are unsigned, those of `other` signed.
inline std::uint32_t add_bytes(std::uint32_t sum, std::uint32_t one, std::uint32_t other) {
  for (int shift = 0; shift < 32; shift += 8) {
    const auto number = static_cast<std::int8_t>(other >> shift & 0xff);
    sum += static_cast<std::uint32_t>(static_cast<std::int32_t>(one >> shift & 0xff) * number);
  }
  return sum;
}

// Permission to use the tiles is granted; other calls are those of the system.
template <class... Arguments>
long call(long number, Arguments... arguments) {
  return number == SYS_arch_prctl ? 0 : (syscall)(number, arguments...);
}

}  // namespace software_tiles

#define _tile_loadconfig(shape) software_tiles::configure(shape)
#define _tile_release() software_tiles::release()
#define _tile_loadd(tile, from, stride) software_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) software_tiles::store(tile, to, stride)
#define _tile_zero(tile) software_tiles::zero(tile)
#define _tile_dpbf16ps(sums, left, right) software_tiles::multiply(sums, left, right, software_tiles::add_bf16)
#define _tile_dpbusd(sums, left, right) software_tiles::multiply(sums, left, right, software_tiles::add_bytes)
#define syscall(...) software_tiles::call(__VA_ARGS__)
