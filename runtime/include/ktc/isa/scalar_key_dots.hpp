// Products of keys' codes in plain C++.
#pragma once

#include "ktc/isa/scalar.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/top_positions.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <class Element>
struct KeyDots<scalar::Isa<Element>> : PlainKeyDots {};

template <class Element>
struct ScoreLanes<scalar::Isa<Element>> : PlainScoreLanes {};

}  // namespace ktc::inline KTC_UNIT
