// Addresses cross to Python as integers, so that no Torch header is needed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ktc/unit.hpp"

namespace ktc_python::inline KTC_UNIT {

using Address = std::uintptr_t;

template <class T = std::byte>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace ktc_python::inline KTC_UNIT
