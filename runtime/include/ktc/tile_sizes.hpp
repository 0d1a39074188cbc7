// Loops over rows in tiles whose sums fit the registers.
#pragma once

#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The size of a tile, as an argument of a lambda.
template <int kSize>
struct TileSize {};

// Calls `body(row, TileSize<n>{})` for tiles of `count` rows: of the first size while they fit, then of the next.
template <int... kSizes, class Body>
[[gnu::always_inline]] inline void by_rows(std::int64_t count, const Body& body) {
  std::int64_t row = 0;
  const auto tiles = [&]<int kSize>(TileSize<kSize> size) {
    for (; row + kSize <= count; row += kSize) body(row, size);
  };
  (tiles(TileSize<kSizes>{}), ...);
}

}  // namespace ktc::inline KTC_UNIT
