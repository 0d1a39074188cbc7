// Products of keys' codes beside attention by tiles: those of AVX512-BF16. One query has too few rows for a tile.
#pragma once

#include "ktc/isa/amx_attention.hpp"
#include "ktc/isa/avx512_bf16_key_dots.hpp"
