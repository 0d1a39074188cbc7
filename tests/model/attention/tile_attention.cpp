// Compares decode attention by tiles, which are software here, with that of AVX512-BF16. Prints one line per mistake,
// and nothing where outputs agree and do not depend on the number of threads. The workspace holds NaN before a call.
#define KTC_UNIT tile_attention

#include "software_tiles.hpp"
//
#include "ktc/isa/avx512_bf16.hpp"
//
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ktc/isa/amx_attention.hpp"
#include "ktc/team.hpp"
#include "ktc/workspace.hpp"

namespace {

using ktc::bf16;
using ktc::CacheView;
using ktc::kPagePositions;

constexpr double kError = 6e-3;  // both round weights and outputs to bf16

struct Case {
  std::string name;
  std::int64_t batch, key_heads, rows, tokens, positions, width, more_width, value_width;  // 0: values are the keys
  bool masked = false, ragged = false, paged = false;
};

class Caches {
 public:
  explicit Caches(const Case& of) : case_(of), random_(static_cast<unsigned>(of.positions + of.rows)) {
    const std::int64_t pages = (of.positions + kPagePositions - 1) / kPagePositions;
    const std::int64_t all = of.batch * of.key_heads * pages * kPagePositions;
    query_ = drawn(of.batch * of.key_heads * of.rows * (of.width + of.more_width));
    keys_ = drawn(all * of.width);
    more_keys_ = drawn(all * of.more_width);
    values_ = drawn(all * of.value_width);
    const std::int64_t held = of.paged ? kPagePositions : pages * kPagePositions;
    arguments_ = {.query = query_.data(),
                  .keys = view(keys_, of.width, held),
                  .more_keys = view(more_keys_, of.more_width, held),
                  .values = of.value_width > 0 ? view(values_, of.value_width, held) : view(keys_, of.width, held),
                  .batch = of.batch,
                  .key_heads = of.key_heads,
                  .group = of.rows / of.tokens,
                  .tokens = of.tokens,
                  .positions = of.positions,
                  .scale = 0.3f};
    if (of.masked) mask();
    if (of.ragged || of.paged) cut();
    if (of.paged) shuffle(pages);
  }

  template <class Kernel>
  std::vector<float> output(const Kernel& kernel, int threads) {
    ktc::Engine engine(threads);
    const std::int64_t rows = case_.batch * case_.key_heads * case_.rows, width = arguments_.values.width;
    const std::int64_t sums = rows * width * 64 + (std::int64_t{1} << 20);  // at least all that a call takes
    exclusively(engine, [sums](const ktc::Team&, ktc::Workspace& workspace) {
      ktc::Region<float> all(sums);
      workspace.lay_out(all);
      std::fill_n(all.data(), sums, std::numeric_limits<float>::quiet_NaN());
    });
    std::vector<bf16> out(static_cast<std::size_t>(rows * width));
    arguments_.out = out.data();
    kernel.forward(engine, arguments_);
    return {out.begin(), out.end()};
  }

 private:
  std::vector<bf16> drawn(std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<bf16> found(static_cast<std::size_t>(count));
    for (bf16& each : found) each = bf16(normal(random_));
    return found;
  }

  CacheView view(const std::vector<bf16>& of, std::int64_t width, std::int64_t held) const {
    if (width == 0) return {};
    const std::int64_t head = held * width;
    return {.data = of.data(), .batch = case_.key_heads * head, .head = head, .position = width, .width = width};
  }

  // A third of the positions is seen; none of the first two blocks.
  void mask() {
    const std::int64_t tokens = case_.batch * case_.tokens;
    mask_.resize(static_cast<std::size_t>(tokens * case_.positions));
    for (std::size_t each = 0; each < mask_.size(); ++each) {
      const std::int64_t position = static_cast<std::int64_t>(each) % case_.positions;
      mask_[each] = position >= 2 * kPagePositions && random_() % 3 == 0;
    }
    arguments_.mask = mask_.data();
    arguments_.mask_batch = case_.tokens * case_.positions;
    arguments_.mask_token = case_.positions;
  }

  void cut() {
    for (std::int64_t each = 0; each < case_.batch; ++each) {
      lengths_.push_back(each == 0 ? case_.positions : std::max(case_.tokens, case_.positions / 3 + each));
    }
    arguments_.lengths = lengths_.data();
  }

  void shuffle(std::int64_t pages) {
    pages_.resize(static_cast<std::size_t>(case_.batch * pages));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), random_);
    arguments_.pages = pages_.data();
    arguments_.pages_of_sequence = pages;
  }

  Case case_;
  std::mt19937 random_;
  std::vector<bf16> query_, keys_, more_keys_, values_;
  std::vector<std::uint8_t> mask_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int32_t> pages_;
  ktc::AttentionArguments arguments_;
};

// The largest relative error of a row.
double error(const std::vector<float>& found, const std::vector<float>& wanted, std::int64_t width) {
  double largest = 0;
  for (std::size_t row = 0; row < found.size(); row += static_cast<std::size_t>(width)) {
    double difference = 0, whole = 0;
    for (std::size_t each = row; each < row + static_cast<std::size_t>(width); ++each) {
      difference += std::pow(double{found[each]} - double{wanted[each]}, 2);
      whole += std::pow(double{wanted[each]}, 2);
    }
    const double of_row = std::sqrt(difference / whole);
    if (std::isnan(of_row)) return of_row;
    largest = std::max(largest, of_row);
  }
  return largest;
}

void check(const Case& of) {
  Caches caches(of);
  const ktc::amx::Attention tiles;
  const std::int64_t before = software_tiles::products;
  const std::vector<float> found = caches.output(tiles, 1);
  if (software_tiles::products == before) std::printf("%s: no tiles\n", of.name.c_str());
  const std::vector<float> wanted = caches.output(ktc::DecodeAttention<ktc::avx512_bf16::Isa, bf16>(), 1);
  const double wrong = error(found, wanted, of.value_width > 0 ? of.value_width : of.width);
  if (!(wrong <= kError)) std::printf("%s: a relative error of %.2g\n", of.name.c_str(), wrong);
  if (caches.output(tiles, 3) != found) std::printf("%s: three threads differ\n", of.name.c_str());
}

}  // namespace

int main() {
  // Stretches are one block, up to four and two.
  const std::vector<std::pair<std::int64_t, std::int64_t>> lengths = {{1, 333}, {8, 700}, {1, 8500}};
  for (const auto& [key_heads, positions] : lengths) {
    for (const std::int64_t rows : {9, 16, 40, 70}) {
      const std::string name = std::to_string(rows) + " rows, " + std::to_string(positions) + " positions";
      check({name, 1, key_heads, rows, 1, positions, 64, 32, 128});
      check({name + ", masked", 2, key_heads, rows, 1, positions, 64, 0, 64, true});
      check({name + ", ragged", 2, key_heads, rows, 1, positions, 32, 0, 64, false, true});
      check({name + ", in pages", 2, key_heads, rows, 1, positions, 32, 32, 64, false, false, true});
    }
  }
  check({"several tokens", 2, 8, 36, 3, 901, 96, 0, 64});
  check({"several tokens, masked", 2, 8, 36, 3, 901, 96, 0, 64, true});
  check({"latents", 1, 1, 128, 1, 8500, 512, 64, 0});
}
