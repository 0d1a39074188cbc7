// Reads fp32 weights from standard input and writes the blocks that a format makes of them. `test_block_formats.py`
// builds it with the flags of one instruction set, KTC_UNIT, KTC_PANELS (a list of panel types) and their headers, and
// names the format.

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

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

template <class... Panels>
bool quantise_as_one_of(const char* name) {
  return (quantise<typename Panels::Format>(name) || ...);
}

}  // namespace

int main(int count, char** arguments) {
  return count == 2 && quantise_as_one_of<KTC_PANELS>(arguments[1]) ? 0 : 1;
}
