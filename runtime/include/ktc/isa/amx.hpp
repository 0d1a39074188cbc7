// AMX: TDPBF16PS multiplies 16 rows of 32 bf16 with 16 outputs. Groups of up to 32 rows take 2 x 2 tiles of sums and
// four loads per four products. An expert with a handful of tokens is limited by memory either way, and its few rows
// would leave the tiles empty. AVX512-BF16 computes it, from the same packed weights.
//
// The weights' tiles are loaded from a packed panel: [k / 2][32 outputs][2], two tiles side by side.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/isa/amx_tiles.hpp"
#include "ktc/isa/amx_transpose.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::amx::inline KTC_UNIT {

// The four products of one step, of rows in tiles 4 and 5 with weights in 6 and 7. Their instructions contain the
// numbers of the registers; other types have their own under the same names.
struct Bf16Products {
  using Row = bf16;
  using Weight = bf16;
  using Sum = float;
  static constexpr int kDepth = kTileBytes / sizeof(Row);  // neighbours of k in a row of a tile

  [[gnu::always_inline]] static void upper_left() { _tile_dpbf16ps(0, 4, 6); }
  [[gnu::always_inline]] static void upper_right() { _tile_dpbf16ps(1, 4, 7); }
  [[gnu::always_inline]] static void lower_left() { _tile_dpbf16ps(2, 5, 6); }
  [[gnu::always_inline]] static void lower_right() { _tile_dpbf16ps(3, 5, 7); }
};

// Every tile is set to zero after its last use, which costs nothing. A zero needs no register, and a core has few tile
// registers for renaming, half of them when its other hardware thread is busy. Then eight tiles in use leave hardly any
// for instructions in flight, and loads and products wait for each other. That gives 0.53 TFLOP/s instead of 0.85 from
// L1; a core with one busy thread reaches 1.9 either way.
//
// tile[row][32] = (`kAdd` ? its value : zero) + the sum over k of a[k][row] * panel[k][32]. The tiles must have the
// shape for `kLower` ? 17 to 32 : 1 to 16 rows.
template <class Products, bool kLower, bool kAdd, class Ahead>
[[gnu::noinline]] void multiply_tiles(std::int64_t depth_steps, int rows, const typename Products::Row* a,
                                      const typename Products::Weight* panel, typename Products::Sum* tile,
                                      Ahead& next) {
  using Sum = typename Products::Sum;
  constexpr int kDepth = Products::kDepth;
  constexpr int kStride = kPanelWidth * sizeof(Sum);  // the neighbours of k fill a sum's bytes
  constexpr std::int64_t kPanelStep = kDepth * kPanelWidth;
  constexpr int kRight = kHalfPanel * sizeof(Sum) / sizeof(typename Products::Weight);
  Sum* lower = tile + kTileRows * kPanelWidth;
  Ahead ahead = next;
  settle_memory();
  if constexpr (kAdd) {
    _tile_loadd(0, tile, kStride);
    _tile_loadd(1, tile + kHalfPanel, kStride);
    if constexpr (kLower) {
      _tile_loadd(2, lower, kStride);
      _tile_loadd(3, lower + kHalfPanel, kStride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kLower) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (std::int64_t step = 0; step < depth_steps; ++step) {
    ahead.step();
    _tile_loadd(4, a, kTileBytes);
    _tile_loadd(6, panel, kStride);
    Products::upper_left();
    _tile_loadd(7, panel + kRight, kStride);
    Products::upper_right();
    _tile_zero(4);
    if constexpr (kLower) {
      _tile_loadd(5, a + kTileRows * kDepth, kTileBytes);
      Products::lower_left();
      _tile_zero(6);
      Products::lower_right();
      _tile_zero(5);
    } else {
      _tile_zero(6);
    }
    _tile_zero(7);
    a += rows * kDepth;
    panel += kPanelStep;
  }
  _tile_stored(0, tile, kStride);
  _tile_stored(1, tile + kHalfPanel, kStride);
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kLower) {
    _tile_stored(2, lower, kStride);
    _tile_stored(3, lower + kHalfPanel, kStride);
    _tile_zero(2);
    _tile_zero(3);
  }
  settle_memory();
  next = ahead;
}

class Isa {
 public:
  using Element = bf16;
  using Accumulator = float;
  using Lanes = avx512_bf16::Lanes;
  static constexpr int kMaxRows = 2 * kTileRows;
  static constexpr int kStreamRows = avx512_bf16::kStreamRows;
  // The prefetch for few rows goes into L2. These cores have 16 lines in flight to L1, and 48 to L2: 139 instead of 72
  // GB/s at one token with 16 threads.
  static constexpr int kStreamLocality = 2;

  // At 512 of k and 12 groups, the rows (384 KB) and the sums of 16 panels (768 KB) stay in L2 and a stretch of a panel
  // (32 KB) in L1. Memory limits an expert with fewer rows, which is best read panel by panel. So is one whose rows
  // stay in L2 beside two panels, because sums are then kept in tiles: 12 % less time at 192 rows of 2048. Blocks save
  // the same at 64 rows of 7168.
  static constexpr bool kBlocked = true;
  static constexpr Blocking kBlocking{.panels = 16, .groups = 12, .contraction = 512};
  static constexpr std::int64_t kBlockedRows = 48;
  static constexpr std::int64_t kBlockedBytes = 6 << 18;  // of rows and two panels

  static void require() { request_tiles(); }

  static constexpr int kTileDepth = Bf16Products::kDepth;
  static constexpr bool multiplies_tiles(int rows) { return rows > kStreamRows; }

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` pairs of k, a multiple of 16; tile, panel aligned.
  template <class Ahead>
  void multiply(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    if (!multiplies_tiles(rows)) {
      return avx512_bf16::Isa::multiply<FetchedLines<kStreamLocality>>(rows, steps, a, panel, tile, ahead);
    }
    by_tiles<false>(rows, steps, a, panel, tile, ahead);
  }

  // Adds the same to `tile`.
  template <class Ahead>
  void multiply_add(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    by_tiles<true>(rows, steps, a, panel, tile, ahead);
  }

  // The number of times that `multiply` calls `ahead.step()`.
  static constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
    return multiplies_tiles(rows) ? steps / kPairs : avx512_bf16::Isa::steps_ahead(rows, steps);
  }

  // All products share the one shape of the registers, so other products must set the shape that they need through
  // these.
  Tiles& tiles() { return tiles_; }

  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    amx::transpose_piece(source, target, piece);
  }

 private:
  static constexpr std::int64_t kPairs = kTileDepth / 2;

  template <bool kAdd, class Ahead>
  void by_tiles(int rows, std::int64_t steps, const bf16* a, const bf16* panel, float* tile, Ahead& ahead) {
    tiles_.shape_for(rows);
    if (rows > kTileRows) return multiply_tiles<Bf16Products, true, kAdd>(steps / kPairs, rows, a, panel, tile, ahead);
    multiply_tiles<Bf16Products, false, kAdd>(steps / kPairs, rows, a, panel, tile, ahead);
  }

  Tiles tiles_;
};

}  // namespace ktc::amx::inline KTC_UNIT
