// Integer products with AMX: TDPBUSD multiplies 16 rows of 64 bytes with 16 outputs, from panels in the layout of bf16.
// An expert with a handful of tokens is multiplied with VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/isa/amx.hpp"
#include "ktc/isa/avx512_bf16_int8.hpp"
#include "ktc/isa/integer.hpp"
#include "ktc/moe_sweep.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::amx::inline KTC_UNIT {

struct ByteProducts {
  using Row = std::uint8_t;
  using Weight = std::int8_t;
  using Sum = std::int32_t;
  static constexpr int kDepth = kTileBytes / sizeof(Row);

  [[gnu::always_inline]] static void upper_left() { _tile_dpbusd(0, 4, 6); }
  [[gnu::always_inline]] static void upper_right() { _tile_dpbusd(1, 4, 7); }
  [[gnu::always_inline]] static void lower_left() { _tile_dpbusd(2, 5, 6); }
  [[gnu::always_inline]] static void lower_right() { _tile_dpbusd(3, 5, 7); }
};

class IntegerIsa {
 public:
  using Element = std::uint8_t;
  using Accumulator = std::int32_t;
  static constexpr int kMaxRows = Isa::kMaxRows;
  static constexpr int kStreamRows = Isa::kStreamRows;

  // The bytes of a block are those of bf16 blocks.
  static constexpr bool kBlocked = true;
  static constexpr Blocking kBlocking{
      .panels = Isa::kBlocking.panels, .groups = Isa::kBlocking.groups, .contraction = 2 * Isa::kBlocking.contraction};
  static constexpr std::int64_t kBlockedRows = Isa::kBlockedRows;
  static constexpr std::int64_t kBlockedBytes = Isa::kBlockedBytes;

  static constexpr int kTileDepth = ByteProducts::kDepth;
  static constexpr bool multiplies_tiles(int rows) { return Isa::multiplies_tiles(rows); }

  Isa& elements() { return elements_; }

  // tile[row][32] = sum over k of a[k][row] * panel[k][32]; `steps` times four of k, a multiple of 16; tile, panel
  // aligned.
  template <class Ahead>
  void multiply(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel, std::int32_t* tile,
                Ahead& ahead) {
    if (!multiplies_tiles(rows)) {
      return Few::multiply<FetchedLines<Isa::kStreamLocality>>(rows, steps, a, panel, tile, ahead);
    }
    by_tiles<false>(rows, steps, a, panel, tile, ahead);
  }

  // Adds the same to `tile`.
  template <class Ahead>
  void multiply_add(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel, std::int32_t* tile,
                    Ahead& ahead) {
    by_tiles<true>(rows, steps, a, panel, tile, ahead);
  }

  static constexpr std::int64_t steps_ahead(int rows, std::int64_t steps) {
    return multiplies_tiles(rows) ? steps / kQuads : Few::steps_ahead(rows, steps);
  }

 private:
  using Few = avx512_bf16::IntegerIsa;
  static constexpr std::int64_t kQuads = kTileDepth / 4;

  template <bool kAdd, class Ahead>
  void by_tiles(int rows, std::int64_t steps, const std::uint8_t* a, const std::int8_t* panel, std::int32_t* tile,
                Ahead& ahead) {
    elements_.tiles().shape_for(rows);
    if (rows > kTileRows) return multiply_tiles<ByteProducts, true, kAdd>(steps / kQuads, rows, a, panel, tile, ahead);
    multiply_tiles<ByteProducts, false, kAdd>(steps / kQuads, rows, a, panel, tile, ahead);
  }

  Isa elements_;
};

}  // namespace ktc::amx::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct IntegerIsa<amx::Isa> {
  using type = amx::IntegerIsa;
};

}  // namespace ktc::inline KTC_UNIT
