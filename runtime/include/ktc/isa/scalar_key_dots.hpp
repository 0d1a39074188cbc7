// Products of keys' codes in plain C++.
#pragma once

#include "ktc/isa/scalar.hpp"
#include "ktc/key_dots.hpp"
