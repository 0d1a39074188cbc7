// Integer products with AMX: TDPBUSD multiplies 16 rows of 64 bytes with 16 outputs, from panels in the layout of bf16.
// An expert with a handful of tokens is multiplied with VNNI.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/isa/amx.hpp"
#include "ktc/isa/avx512_bf16_int8.hpp"
#include "ktc/isa/integer.hpp"
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

class IntegerIsa : public TileKernel<IntegerIsa, ByteProducts, avx512_bf16::IntegerIsa> {
 public:
  Isa& elements() { return elements_; }
  Tiles& tiles() { return elements_.tiles(); }

 private:
  Isa elements_;
};
static_assert(IntegerKernel<IntegerIsa>);

}  // namespace ktc::amx::inline KTC_UNIT

namespace ktc::inline KTC_UNIT {

template <>
struct IntegerIsa<amx::Isa> {
  using type = amx::IntegerIsa;
};

}  // namespace ktc::inline KTC_UNIT
