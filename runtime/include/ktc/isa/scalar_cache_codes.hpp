// Products of a cache's codes in plain C++.
#pragma once

#include "ktc/cache_code_products.hpp"
#include "ktc/isa/scalar.hpp"
