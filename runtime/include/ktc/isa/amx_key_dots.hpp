// Products of keys' codes beside attention by tiles: those of AVX512-BF16. One query has too few rows for a tile.
#pragma once

#include "ktc/isa/amx_attention.hpp"
#include "ktc/isa/avx512_bf16_key_dots.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <>
struct KeyDots<amx::FewRows> : KeyDots<avx512_bf16::Isa> {};

template <>
struct ScoreLanes<amx::FewRows> : ScoreLanes<avx512_bf16::Isa> {};

}  // namespace ktc::inline KTC_UNIT
