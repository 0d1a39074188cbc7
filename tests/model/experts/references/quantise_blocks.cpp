// Reads fp32 weights from standard input and writes the blocks that a format makes of them. `test_block_formats.py`
// builds it with the flags of one instruction set, KTC_UNIT, KTC_PANELS (a list of panel types) and their headers, and
// names the format.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace {

using namespace ktc::weight_format;

template <class Format>
bool quantise(const std::string& name) {
  if (name != Format::kName) return false;
  std::vector<float> weights, block(Format::kWeights);
  while (std::fread(block.data(), sizeof(float), block.size(), stdin) == block.size()) {
    weights.insert(weights.end(), block.begin(), block.end());
  }
  std::vector<std::uint8_t> stored(Format::kStoredBytes);
  float largest = 0;
  for (const float weight : weights) largest = std::max(largest, std::abs(weight));
  for (std::size_t at = 0; at < weights.size(); at += block.size()) {
    if constexpr (requires { Format::matrix_scale(largest); }) {
      Format::quantise(&weights[at], stored.data(), Format::matrix_scale(largest));
    } else {
      Format::quantise(&weights[at], stored.data());
    }
    if (std::fwrite(stored.data(), 1, stored.size(), stdout) != stored.size()) return false;
  }
  return true;
}

template <class... Panels>
bool quantise_as_one_of(const char* name) {
  return (quantise<typename Panels::Format>(name) || ...);
}

}  // namespace

int main(int count, char** arguments) {
  return count == 2 && quantise_as_one_of<KTC_PANELS>(arguments[1]) ? 0 : 1;
}
