// Products of a cache's codes in plain C++.
#pragma once

#include "ktc/cache_code_products.hpp"
#include "ktc/isa/scalar.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <class Element>
struct CacheCodeProducts<scalar::Isa<Element>> : PlainCodeProducts {};

}  // namespace ktc::inline KTC_UNIT
