// The tile registers of AMX: permission to use them, their shape, and their instructions.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <stdexcept>

#include "ktc/element.hpp"
#include "ktc/unit.hpp"

namespace ktc::amx::inline KTC_UNIT {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;  // of a row

// Linux saves 8 KB more per thread of a process that uses tiles, so a process must request permission. Throws
// std::runtime_error if it is refused.
inline void request_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  static const long refused = syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  if (refused != 0) throw std::runtime_error("the operating system does not let this process use the AMX tiles");
}

// The intrinsics do not declare the memory they read: the compiler must not delay a store past this.
[[gnu::always_inline]] inline void settle_memory() {
  asm volatile("" ::: "memory");
}

// The shape of all eight tiles for products of `rows` rows, at most 32, with 32 outputs. Tiles 0 and 1 hold the sums of
// the upper 16 rows, 2 and 3 those of the rest; 4 and 5 the rows themselves; 6 and 7 the weights.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_ != 0) _tile_release();
  }

  void shape_for(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int upper = rows < kTileRows ? rows : kTileRows;
    alignas(64) Shape shape{};
    for (const int tile : {0, 1, 4}) shape.set(tile, upper);
    for (const int tile : {2, 3, 5}) shape.set(tile, rows - upper);
    for (const int tile : {6, 7}) shape.set(tile, kTileRows);
    settle_memory();
    _tile_loadconfig(&shape);
  }

 private:
  struct Shape {  // the operand of LDTILECFG
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::array<std::uint8_t, 14> reserved{};
    std::array<std::uint16_t, 16> row_bytes{};
    std::array<std::uint8_t, 16> num_rows{};

    void set(int tile, int rows) {
      row_bytes[static_cast<std::size_t>(tile)] = rows == 0 ? 0 : kTileBytes;
      num_rows[static_cast<std::size_t>(tile)] = static_cast<std::uint8_t>(rows);
    }
  };
  static_assert(sizeof(Shape) == 64);

  int rows_ = 0;
};

}  // namespace ktc::amx::inline KTC_UNIT
