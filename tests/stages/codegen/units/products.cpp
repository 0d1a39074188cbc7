// Micro-kernels, and the products beside them, against sums in plain C++.
#include <cstdint>
#include <vector>

#include "check.hpp"
#include "ktc/cache_code_products.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/lane_dots.hpp"
#include "ktc/packed_slots.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/panel.hpp"

namespace unit_tests {
namespace {

using ktc::bf16;
using ktc::kHalfPanel;
using ktc::kPanelWidth;

constexpr std::int64_t kContraction = 128;

struct CountedSteps {
  std::int64_t steps = 0;
  void step() { ++steps; }
  void finish() {}
};

template <class T>
struct alignas(64) Aligned {
  T data[64 / sizeof(T)];
};

// Memory on cache lines.
template <class T>
class Lines {
 public:
  explicit Lines(std::int64_t count) : lines_((static_cast<std::size_t>(count) * sizeof(T) + 63) / 64) {}
  T* data() { return lines_.front().data; }

 private:
  std::vector<Aligned<T>> lines_;
};

template <class T>
T random_value(Random& random) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random.bits());
  } else {
    return T(random.normal());
  }
}

template <class T>
double number(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<double>(value);
  } else {
    return static_cast<double>(static_cast<float>(value));
  }
}

// Groups of every size: each sum, the same bits in every group that is multiplied in the same way, and the steps.
template <ktc::MicroKernel Kernel>
void check_kernel(Kernel& kernel, double tolerance) {
  using Element = typename Kernel::Element;
  using Weight = typename Kernel::Weight;
  using Accumulator = typename Kernel::Accumulator;
  constexpr int kDepth = ktc::ElementTraits<Element>::kDepth;
  Random random(1);
  std::vector<Element> values(Kernel::kMaxRows * kContraction);
  for (Element& value : values) value = random_value<Element>(random);
  Lines<Weight> panel(kContraction * kPanelWidth);
  for (std::int64_t i = 0; i < kContraction * kPanelWidth; ++i) panel.data()[i] = random_value<Weight>(random);
  for (int rows = 1; rows <= Kernel::kMaxRows; ++rows) {
    Lines<Element> packed(rows * kContraction);
    Lines<Accumulator> tile(Kernel::kMaxRows * kPanelWidth), again(Kernel::kMaxRows * kPanelWidth);
    ktc::pack_group<Kernel>(
        {0, rows}, [&](std::int64_t row) { return values.data() + row * kContraction; }, kContraction, kContraction,
        packed.data());
    CountedSteps work;
    kernel.multiply(rows, kContraction / kDepth, packed.data(), panel.data(), tile.data(), work);
    CHECK(work.steps == Kernel::steps_ahead(rows, kContraction / kDepth));
    for (int row = 0; row < rows; ++row) {
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        double expected = 0;
        for (std::int64_t k = 0; k < kContraction; ++k) {
          expected += number(values[static_cast<std::size_t>(row * kContraction + k)]) *
                      number(panel.data()[ktc::weight_format::panel_offset<Element>(lane, k)]);
        }
        CHECK_NEAR(static_cast<double>(tile.data()[row * kPanelWidth + lane]), expected, tolerance);
      }
    }
    if constexpr (Kernel::kBlocked) {
      if (!Kernel::multiplies_tiles(rows)) continue;
      std::copy_n(tile.data(), rows * kPanelWidth, again.data());
      kernel.multiply_add(rows, kContraction / kDepth, packed.data(), panel.data(), again.data(), work);
      for (int i = 0; i < rows * kPanelWidth; ++i) {
        CHECK_NEAR(static_cast<double>(again.data()[i]), 2.0 * static_cast<double>(tile.data()[i]), tolerance);
      }
    } else if (rows > 1) {
      Lines<Element> alone(kContraction);
      ktc::pack_group<Kernel>(
          {0, 1}, [&](std::int64_t) { return values.data() + (rows - 1) * kContraction; }, kContraction, kContraction,
          alone.data());
      kernel.multiply(1, kContraction / kDepth, alone.data(), panel.data(), again.data(), work);
      for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
        CHECK(again.data()[lane] == tile.data()[(rows - 1) * kPanelWidth + lane]);
      }
    }
  }
}

const Test elements("products: elements, in groups of every size", [] {
  Isa isa;
  Isa::require();
  check_kernel(isa, 1e-4);
});

const Test integers("products: integers are exact", [] {
  ktc::IntegerIsaOf<Isa> kernel;
  Isa::require();
  check_kernel(kernel, 0);
  check_kernel(kernel.elements(), 1e-4);
});

const Test transposed("products: a block with outputs and k exchanged", [] {
  Lines<bf16> source(ktc::weight_format::kBlock), target(ktc::weight_format::kBlock);
  for (std::int64_t i = 0; i < ktc::weight_format::kBlock; ++i) source.data()[i].bits = static_cast<std::uint16_t>(i);
  for (unsigned piece = 0; piece < ktc::weight_format::kBlockPieces; ++piece) {
    Isa::transpose_piece(source.data(), target.data(), piece);
  }
  for (std::int64_t lane = 0; lane < kPanelWidth; ++lane) {
    for (std::int64_t k = 0; k < kPanelWidth; ++k) {
      CHECK(target.data()[ktc::weight_format::panel_offset<bf16>(k, lane)].bits ==
            source.data()[ktc::weight_format::panel_offset<bf16>(lane, k)].bits);
    }
  }
});

template <int kRows, int kColumns, class Stored>
void check_dots(std::int64_t width) {
  using Sums = typename Isa::template DotSums<Stored, kRows, kColumns>;
  using Query = typename Sums::Query;
  constexpr std::int64_t kStride = 160;
  Random random(5);
  std::vector<Query> queries(kRows * kStride, Query(0.0f));
  std::vector<Stored> keys(kColumns * kStride);
  for (int row = 0; row < kRows; ++row) {
    for (std::int64_t k = 0; k < width; ++k)
      queries[static_cast<std::size_t>(row * kStride + k)] = Query(random.normal());
  }
  for (Stored& key : keys) key = Stored(random.normal());
  struct Keys {
    const Stored* data;
    const Stored* operator[](std::int64_t column) const { return data + column * kStride; }
  };
  Sums sums;
  sums.add(queries.data(), kStride, Keys{keys.data()}, width);
  float computed[kRows * kColumns];
  if constexpr (std::is_same_v<Query, bf16>) {
    sums.store(computed, kColumns, 1.0f);
  } else {
    sums.store(computed, kColumns);
  }
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) {
      double expected = 0;
      for (std::int64_t k = 0; k < width; ++k) {
        expected += number(queries[static_cast<std::size_t>(row * kStride + k)]) *
                    number(keys[static_cast<std::size_t>(column * kStride + k)]);
      }
      CHECK_NEAR(computed[row * kColumns + column], expected, 1e-4);
    }
  }
}

const Test dots("products: queries with stored keys of any width", [] {
  for (const std::int64_t width : {16, 32, 64, 96, 128, 1, 7, 33, 100}) {
    check_dots<1, 1, bf16>(width);
    check_dots<4, 3, bf16>(width);
    check_dots<2, 4, ktc::weight_format::fp16>(width);
    check_dots<1, 2, float>(width);
  }
});

template <int kRows, int kBlocks, class Multiply, class Plain>
void check_key_dots(std::int64_t width, int largest, std::int64_t groups, const Multiply& multiply,
                    const Plain& plain) {
  Random random(6);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(kBlocks * groups * ktc::kGroupBytes));
  for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random.bits());
  std::vector<std::int8_t> queries(static_cast<std::size_t>(kRows * width));
  for (std::int8_t& query : queries) query = static_cast<std::int8_t>(random.integer(-largest, largest));
  std::int32_t computed[kBlocks * kRows * ktc::kKeysTogether], expected[kRows * ktc::kKeysTogether];
  multiply(codes.data(), queries.data(), computed);
  for (int block = 0; block < kBlocks; ++block) {
    plain(codes.data() + block * groups * ktc::kGroupBytes, queries.data(), expected);
    for (int i = 0; i < kRows * ktc::kKeysTogether; ++i)
      CHECK(computed[block * kRows * ktc::kKeysTogether + i] == expected[i]);
  }
}

template <class Dots, int kRows, int kBlocks>
void check_keys(std::int64_t groups) {
  using Plain = ktc::PlainKeyDots;
  check_key_dots<kRows, kBlocks>(
      groups * 8, 127, groups,
      [=](auto* codes, auto* query, auto* sums) {
        Dots::template of_nibbles<kRows, kBlocks>(codes, groups, query, groups * 8, sums);
      },
      [=](auto* codes, auto* query, auto* sums) {
        Plain::of_nibbles<kRows, 1>(codes, groups, query, groups * 8, sums);
      });
  check_key_dots<kRows, kBlocks>(
      groups * 32, ktc::kLargestBesideBits, groups,
      [=](auto* codes, auto* query, auto* sums) {
        if constexpr (Dots::kTables) {
          std::vector<std::uint8_t> tables(static_cast<std::size_t>(kRows * groups * ktc::SignTables::kBytes));
          const std::int64_t stride = groups * ktc::SignTables::kBytes;
          for (int row = 0; row < kRows; ++row) {
            ktc::SignTables::fill(query + row * groups * 32, groups, tables.data() + row * stride);
          }
          Dots::template of_tables<kRows, kBlocks>(codes, groups, tables.data(), stride, sums);
        } else {
          Dots::template of_bits<kRows, kBlocks>(codes, groups, query, groups * 32, sums);
        }
      },
      [=](auto* codes, auto* query, auto* sums) { Plain::of_bits<kRows, 1>(codes, groups, query, groups * 32, sums); });
}

// The instruction set of tiles leaves these products to another one.
template <class Tested>
void check_key_codes() {
  if constexpr (!Tested::kBlocked) {
    using Dots = ktc::KeyDots<Tested>;
    for (const std::int64_t groups : {1, 2, 9, 40, 75}) {
      check_keys<Dots, 1, 1>(groups);
      check_keys<Dots, Dots::kMostRows, Dots::kMostBlocks>(groups);
    }
  }
}

const Test key_codes("products: codes of keys are exact, of widths beyond 16 bits too", [] { check_key_codes<Isa>(); });

template <class Tested>
void check_cache_codes() {
  using Products = ktc::CacheCodeProducts<Tested>;
  using Plain = ktc::PlainCodeProducts;
  constexpr int kRows = Products::kRows, kSides = Products::kSides, kUnits = Products::kWide;
  constexpr std::int64_t kStride = 192, kPositions = 33;
  Random random(7);
  std::vector<std::int16_t> queries(kRows * kStride);
  std::vector<std::int8_t> keys(kPositions * kStride);
  for (std::int16_t& query : queries)
    query = static_cast<std::int16_t>(random.integer(-ktc::kQueryCode, ktc::kQueryCode));
  for (std::int8_t& key : keys) key = static_cast<std::int8_t>(random.bits());
  for (int row = 0; row < kRows; ++row)
    queries[static_cast<std::size_t>(row * kStride + kPositions)] = 0;  // see `add_rows`
  for (const std::int64_t width : {std::int64_t{128}, std::int64_t{100}, std::int64_t{7}}) {
    const std::int64_t whole = ktc::round_up(width, Products::kUnit);
    std::vector<std::int16_t> padded = queries;
    for (int row = 0; row < kRows; ++row)
      std::fill_n(padded.begin() + row * kStride + width, whole - width, std::int16_t{0});
    float computed[kRows * kSides], expected[kRows * kSides];
    Products::template dots<kRows, kSides>(padded.data(), kStride, keys.data(), kStride, width, computed, kSides);
    Plain::dots<kRows, kSides>(padded.data(), kStride, keys.data(), kStride, width, expected, kSides);
    for (int i = 0; i < kRows * kSides; ++i) CHECK_SAME(computed[i], expected[i]);
  }
  struct Ahead {
    void step(std::int64_t) {}
  } ahead;
  const std::int64_t columns = kUnits * Products::kUnit;
  const float factors[8] = {1.0f, 0.5f, 2.0f, 4.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  std::vector<float> added(static_cast<std::size_t>(kRows * columns), 1.0f);
  Products::template add_rows<kRows, kUnits>(queries.data(), kStride, keys.data(), kStride, kPositions, columns,
                                             factors, added.data(), columns, ahead, 1);
  for (int row = 0; row < kRows; ++row) {
    for (std::int64_t column = 0; column < columns; ++column) {
      std::int32_t sum = 0;
      for (std::int64_t k = 0; k < kPositions; ++k) {
        sum +=
            queries[static_cast<std::size_t>(row * kStride + k)] * keys[static_cast<std::size_t>(k * kStride + column)];
      }
      const double expected = 1.0 + factors[row] * static_cast<double>(sum);
      CHECK_NEAR(added[static_cast<std::size_t>(row * columns + Products::place(column))], expected,
                 std::abs(expected) * 1e-6);
    }
  }
}

template <class Tested>
void check_cache_codes_of() {
  if constexpr (!Tested::kBlocked) check_cache_codes<Tested>();
}

const Test cache_codes("products: codes of a cache are exact", [] { check_cache_codes_of<Isa>(); });

}  // namespace
}  // namespace unit_tests
