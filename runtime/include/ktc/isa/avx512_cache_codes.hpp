// Products of a cache's codes with AVX-512 but not VNNI.
#pragma once

#include "ktc/isa/avx512.hpp"
#include "ktc/isa/avx512_cache_words.hpp"
#include "ktc/unit.hpp"
#include "ktc/word_code_products.hpp"

namespace ktc::inline KTC_UNIT {

template <>
struct CacheCodeProducts<avx512::Isa> : WordCodeProducts<avx512::CacheWords<avx512::Words>, 4, 4, 2> {};

}  // namespace ktc::inline KTC_UNIT
