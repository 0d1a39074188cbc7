// Numbers in messages.
#pragma once

#include <cstdint>
#include <string>

namespace ktc {

// In place of `std::to_string`, an inline function that units of several instruction sets would share.
std::string decimal(std::int64_t number);

}  // namespace ktc
