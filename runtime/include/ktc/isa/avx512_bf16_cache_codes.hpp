// Products of a cache's codes with VNNI, which every CPU with AVX512-BF16 has: VPDPWSSD adds two products of words.
// VPDPBUSD would add four of bytes, but words are two of them, so it takes as many instructions and twice the sums.
#pragma once

#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/isa/avx512_bf16_words.hpp"
#include "ktc/isa/avx512_cache_words.hpp"
#include "ktc/unit.hpp"
#include "ktc/word_code_products.hpp"

namespace ktc::inline KTC_UNIT {

template <>
struct CacheCodeProducts<avx512_bf16::Isa> : WordCodeProducts<avx512::CacheWords<avx512_bf16::Words>, 4, 4, 2> {};

}  // namespace ktc::inline KTC_UNIT
