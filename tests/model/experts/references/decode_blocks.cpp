// Reads blocks of 32 rows of 512 weights from standard input and writes the weights as fp32, row by row, decoded by the
// `Lanes` of one instruction set: before they are rounded to bf16. `test_block_formats.py` builds it with KTC_LANES,
// KTC_UNIT, KTC_PANELS (a list of panel types) and their headers, and names the format.

#include "ktc/weight_format/decode_blocks.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "ktc/shape.hpp"

namespace {

using namespace ktc;
using namespace ktc::weight_format;
using Lanes = KTC_LANES;

constexpr std::int64_t kColumns = 512;

struct alignas(64) Line {
  std::byte bytes[64];
};

template <class Panel>
bool decode(const char* name) {
  using Format = typename Panel::Format;
  if (std::string(name) != Format::kName) return false;
  std::vector<std::uint8_t> stored(kPanelWidth * kColumns / Format::kWeights * Format::kStoredBytes);
  if (std::fread(stored.data(), 1, stored.size(), stdin) != stored.size()) return false;
  std::vector<Line> panel(static_cast<std::size_t>(Panel::bytes(kColumns) / 64));
  auto* bytes = reinterpret_cast<std::byte*>(panel.data());
  Panel::pack_blocks(MatrixView<const std::uint8_t>(stored.data(), kPanelWidth, stored.size() / kPanelWidth),
                     {.panels = bytes, .num_panels = 1, .padded_k = kColumns, .first_lane = 0, .lanes = kPanelWidth});

  std::vector<float> rows(kPanelWidth * kColumns);
  for (std::int64_t block = 0; block < kColumns / kPanelWidth; ++block) {
    float weights[kBlock];
    float* next = weights;
    for_weights<Lanes, Panel>(bytes, block, [&](const Lanes& lanes) {
      lanes.store(next);
      next += kHalfPanel;
    });
    for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
      for (std::int64_t k = 0; k < kPanelWidth; ++k) {
        rows[static_cast<std::size_t>(lane * kColumns + block * kPanelWidth + k)] =
            weights[panel_offset<bf16>(lane, k)];
      }
    }
  }
  return std::fwrite(rows.data(), sizeof(float), rows.size(), stdout) == rows.size();
}

template <class... Panels>
bool decode_one_of(const char* name) {
  return (decode<Panels>(name) || ...);
}

}  // namespace

int main(int count, char** arguments) {
  return count == 2 && decode_one_of<KTC_PANELS>(arguments[1]) ? 0 : 1;
}
