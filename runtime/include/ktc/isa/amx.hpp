// AMX: TDPBF16PS multiplies 16 rows of 32 bf16 with 16 outputs. Groups of up to 32 rows take 2 x 2 tiles of sums and
// four loads per four products. An expert with a handful of tokens is limited by memory either way, and its few rows
// would leave the tiles empty. AVX512-BF16 computes it, from the same packed weights.
//
// The weights' tiles are loaded from a packed panel: [k / 2][32 outputs][2], two tiles side by side.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/isa/amx_tiles.hpp"
#include "ktc/isa/amx_transpose.hpp"
#include "ktc/isa/avx512_bf16.hpp"
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

// The micro-kernel of these products. `FewRows` is that of groups with up to kStreamRows rows, and `Self`, the class
// that derives from this one, has the tiles.
template <class Self, class Products, class FewRows>
class TileKernel {
 public:
  using Element = typename Products::Row;
  using Weight = typename Products::Weight;
  using Accumulator = typename Products::Sum;
  static constexpr int kMaxRows = 2 * kTileRows;
  static constexpr int kStreamRows = FewRows::kStreamRows;
  // At 512 of k (bf16) and 12 groups, the rows (384 KB) and the sums of 16 panels (768 KB) stay in L2 and a stretch of
  // a panel (32 KB) in L1. Memory limits an expert with fewer rows, which is best read panel by panel. So is one whose
  // rows stay in L2 beside two panels, because sums are then kept in tiles: 12 % less time at 192 rows of 2048. Blocks
  // save the same at 64 rows of 7168.
  static constexpr bool kBlocked = true;
  static constexpr int kTileDepth = Products::kDepth;
  static constexpr Blocking kBlocking{.panels = 16, .groups = 12, .contraction = 16 * kTileDepth};
  static constexpr std::int64_t kBlockedRows = 48;
  static constexpr std::int64_t kBlockedBytes = 6 << 18;

  static constexpr bool multiplies_tiles(int rows) { return rows > kStreamRows; }

  template <class Ahead>
  void multiply(int rows, std::int64_t steps, const Element* a, const Weight* panel, Accumulator* tile, Ahead& ahead) {
    if (!multiplies_tiles(rows)) {
      return FewRows::template multiply<FetchedLines<kStreamLocality>>(rows, steps, a, panel, tile, ahead);
    }
    by_tiles<false>(rows, steps, a, panel, tile, ahead);
  }

  template <class Ahead>
  void multiply_add(int rows, std::int64_t steps, const Element* a, const Weight* panel, Accumulator* tile,
                    Ahead& ahead) {
    by_tiles<true>(rows, steps, a, panel, tile, ahead);
  }

  static constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
    return multiplies_tiles(rows) ? steps / kSteps : FewRows::steps_ahead(rows, steps);
  }

 private:
  // The prefetch for few rows goes into L2. These cores have 16 lines in flight to L1, and 48 to L2: 139 instead of 72
  // GB/s at one token with 16 threads.
  static constexpr int kStreamLocality = 2;
  static constexpr std::int64_t kSteps = kTileDepth / ElementTraits<Element>::kDepth;  // of a row of a tile

  template <bool kAdd, class Ahead>
  void by_tiles(int rows, std::int64_t steps, const Element* a, const Weight* panel, Accumulator* tile, Ahead& ahead) {
    static_cast<Self*>(this)->tiles().shape_for(rows);
    const std::int64_t depth_steps = steps / kSteps;
    if (rows > kTileRows) return multiply_tiles<Products, true, kAdd>(depth_steps, rows, a, panel, tile, ahead);
    multiply_tiles<Products, false, kAdd>(depth_steps, rows, a, panel, tile, ahead);
  }
};

class Isa : public TileKernel<Isa, Bf16Products, avx512_bf16::Isa> {
 public:
  using Lanes = avx512_bf16::Lanes;
  using Words = avx512_bf16::Words;
  template <class Stored, int kRows, int kColumns>
  using DotSums = avx512_bf16::Isa::DotSums<Stored, kRows, kColumns>;
  template <int kRows, int kUnits>
  using WeightedSums = avx512_bf16::WeightedSums<kRows, kUnits>;
  static constexpr bool kBf16Products = true;
  static constexpr int kCodeRows = kStreamRows;  // larger groups are packed in the order of the tiles
  static constexpr int kWordRows = 0;
  static constexpr int kNumberRows = 0;
  static constexpr int kFp32Rows = avx512_bf16::Isa::kFp32Rows;
  static constexpr int kFp32Halves = avx512_bf16::Isa::kFp32Halves;

  static void require() { request_tiles(); }

  // All products of a worker share the one shape of the registers, so each sets the shape that it needs through these.
  Tiles& tiles() { return tiles_; }

  [[gnu::always_inline]] static void transpose_piece(const bf16* source, bf16* target, unsigned piece) {
    amx::transpose_piece(source, target, piece);
  }

 private:
  Tiles tiles_;
};
static_assert(InstructionSet<Isa>);

}  // namespace ktc::amx::inline KTC_UNIT
