// Reads fp32 weights from standard input and writes the blocks that a format makes of them. `test_block_formats.py`
// builds it with the flags of one instruction set, and names the format.

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ktc/weight_format/mxfp4.hpp"
#include "ktc/weight_format/q4_0.hpp"
#include "ktc/weight_format/q8_0.hpp"

namespace {

using namespace ktc::weight_format;

template <class Format>
bool quantise(const std::string& name) {
  if (name != Format::kName) return false;
  std::vector<float> weights(Format::kWeights);
  std::vector<std::uint8_t> stored(Format::kStoredBytes);
  while (std::fread(weights.data(), sizeof(float), weights.size(), stdin) == weights.size()) {
    Format::quantise(weights.data(), stored.data());
    if (std::fwrite(stored.data(), 1, stored.size(), stdout) != stored.size()) return false;
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 1;
  const std::string name = arguments[1];
  return quantise<Q8_0>(name) || quantise<Q4_0>(name) || quantise<MXFP4>(name) ? 0 : 1;
}
