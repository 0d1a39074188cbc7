// Half a panel in registers: every operation of `VectorLanes`, beside plain C++ on each lane.
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "check.hpp"
#include "ktc/shape.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace unit_tests {
namespace {

using ktc::bf16;
using ktc::kHalfPanel;
using ktc::weight_format::fp16;
using Values = std::array<float, kHalfPanel>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLow = -1.5f, kHigh = 2.5f;

Values values_of(const Lanes& lanes) {
  Values values;
  lanes.store(values.data());
  return values;
}

Lanes lanes_of(const Values& values) {
  return Lanes::load(values.data());
}

// Normal numbers of all magnitudes, then zeros, infinities, NaN, and those about which functions turn.
std::vector<Values> samples() {
  Random random(1);
  std::vector<Values> computed(64);
  for (Values& values : computed) {
    for (float& value : values) {
      value = std::ldexp(random.normal(), random.integer(-60, 60));
    }
  }
  computed.push_back({0.0f, -0.0f, 1.0f, -1.0f, kInfinity, -kInfinity, kNan, 0.5f, 1.5f, 2.5f, -0.5f, -2.5f, 88.0f,
                      -88.0f, 0x1p-126f, 0x1.fffffep127f});
  return computed;
}

// Calls `check(lane, values...)` for each lane of all samples, shifted against each other.
template <class Check>
void for_pairs(const Check& check) {
  const std::vector<Values> all = samples();
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, all.size() / 2})
      check(all[i], all[(i + shift) % all.size()]);
  }
}

float flushed(float value) {
  return Isa::kBf16Products && std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

const Test load_and_store("lanes: load and store keep all bits", [] {
  Random random(2);
  for (int i = 0; i < 1000; ++i) {
    Values values;
    for (float& value : values) value = std::bit_cast<float>(random.bits());
    const Values computed = values_of(lanes_of(values));
    CHECK(std::equal(values.begin(), values.end(), computed.begin(), [](float a, float b) {
      return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
    }));
  }
});

const Test widening("lanes: all bf16 and fp16 are widened exactly", [] {
  for (unsigned first = 0; first < 0x10000; first += kHalfPanel) {
    bf16 stored[kHalfPanel];
    fp16 halves[kHalfPanel];
    for (unsigned lane = 0; lane < kHalfPanel; ++lane) {
      stored[lane].bits = static_cast<std::uint16_t>(first + lane);
      halves[lane].bits = static_cast<std::uint16_t>(first + lane);
    }
    const Values of_bf16 = values_of(Lanes::from_elements(stored)), of_fp16 = values_of(Lanes::from_elements(halves));
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) {
      CHECK_SAME(of_bf16[lane], static_cast<float>(stored[lane]));
      CHECK_SAME(of_fp16[lane], static_cast<float>(halves[lane]));
    }
  }
});

const Test rounding("lanes: to bf16, nearest even", [] {
  Random random(3);
  for (int i = 0; i < 100000; ++i) {
    Values values;
    for (float& value : values) value = std::bit_cast<float>(i % 2 == 0 ? random.bits() : random.bits() & 0xffff8000u);
    bf16 computed[kHalfPanel];
    lanes_of(values).to_elements(computed);
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) {
      CHECK_SAME(flushed(static_cast<float>(computed[lane])), flushed(static_cast<float>(bf16(flushed(values[lane])))));
    }
  }
});

const Test codes("lanes: to bytes, nearest even, and from differences of integers", [] {
  for (int first = -256; first + kHalfPanel <= 254; ++first) {
    Values values;
    std::int32_t sums[kHalfPanel], offsets[kHalfPanel];
    for (int lane = 0; lane < kHalfPanel; ++lane) {
      values[static_cast<std::size_t>(lane)] = static_cast<float>(first + lane) / 2;
      sums[lane] = 0x7f000001 + lane;
      offsets[lane] = 0x7f000001 - first;
    }
    std::uint8_t computed[kHalfPanel];
    lanes_of(values).to_codes(computed);
    const Values differences = values_of(Lanes::from_integers(sums, offsets));
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) {
      CHECK(computed[lane] == static_cast<int>(std::nearbyint(values[lane])) + 128);
      CHECK_SAME(differences[lane], static_cast<float>(first + static_cast<int>(lane)));
    }
  }
});

const Test arithmetic("lanes: arithmetic is that of fp32", [] {
  for_pairs([](const Values& a, const Values& b) {
    const Lanes x = lanes_of(a), y = lanes_of(b);
    const Values sum = values_of(x + y), difference = values_of(x - y), product = values_of(x * y);
    const Values quotient = values_of(x / y), fused = values_of(fused_multiply_add(x, y, x));
    const Values magnitude = values_of(absolute(x)), larger_one = values_of(larger(x, y));
    const Values greater_one = values_of(greater(absolute(x), absolute(y)));
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) {
      CHECK_SAME(sum[lane], a[lane] + b[lane]);
      CHECK_SAME(difference[lane], a[lane] - b[lane]);
      CHECK_SAME(product[lane], a[lane] * b[lane]);
      CHECK_SAME(quotient[lane], a[lane] / b[lane]);
      const float once = std::fma(a[lane], b[lane], a[lane]), twice = a[lane] * b[lane] + a[lane];
      CHECK(same(fused[lane], once) || same(fused[lane], twice));
      CHECK_SAME(magnitude[lane], std::abs(a[lane]));
      CHECK_SAME(larger_one[lane] + 0.0f, (a[lane] < b[lane] ? b[lane] : a[lane]) + 0.0f);
      const float either = std::isnan(b[lane]) ? b[lane] : std::max(std::abs(a[lane]), std::abs(b[lane]));
      CHECK_SAME(greater_one[lane], std::isnan(a[lane]) ? a[lane] : either);
    }
  });
});

const Test selection("lanes: what is outside of bounds, and NaN", [] {
  for_pairs([](const Values& a, const Values& b) {
    const Lanes x = lanes_of(a), y = lanes_of(b);
    const Values bounded = values_of(clamped(x, kLow, kHigh)), inside = values_of(zero_outside(kLow, kHigh, x, y));
    const Values above = values_of(zero_up_to(kHigh, x, y)), bits = values_of(of_bits(x));
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) {
      CHECK_SAME(bounded[lane], std::isnan(a[lane]) ? a[lane] : std::clamp(a[lane], kLow, kHigh));
      CHECK_SAME(inside[lane], a[lane] >= kLow && a[lane] <= kHigh ? b[lane] : 0.0f);
      CHECK_SAME(above[lane], a[lane] <= kHigh ? 0.0f : b[lane]);
      const float within = std::isnan(a[lane]) ? ktc::kMostBits : std::clamp(a[lane], ktc::kLeastBits, ktc::kMostBits);
      CHECK_SAME(bits[lane], std::bit_cast<float>(static_cast<std::int32_t>(within)));
    }
  });
});

const Test reductions("lanes: sums and greatest values", [] {
  Random random(4);
  for (int i = 0; i < 1000; ++i) {
    std::array<Values, 4> rows;
    for (Values& row : rows) {
      for (float& value : row) value = static_cast<float>(random.integer(-1000, 1000));
    }
    float sums[4];
    Lanes::store_sums(lanes_of(rows[0]), lanes_of(rows[1]), lanes_of(rows[2]), lanes_of(rows[3]), sums);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      float expected = 0;
      for (const float value : rows[row]) expected += value;
      CHECK_SAME(lanes_of(rows[row]).sum(), expected);
      CHECK_SAME(sums[row], expected);
      CHECK_SAME(lanes_of(rows[row]).largest(), *std::max_element(rows[row].begin(), rows[row].end()));
    }
    Values magnitudes = values_of(absolute(lanes_of(rows[0])));
    CHECK_SAME(lanes_of(magnitudes).greatest(), *std::max_element(magnitudes.begin(), magnitudes.end()));
    magnitudes[static_cast<std::size_t>(i) % kHalfPanel] = kNan;
    CHECK_SAME(lanes_of(magnitudes).greatest(), kNan);
  }
});

const Test one_order("lanes: a sum of four does not depend on the others", [] {
  const std::vector<Values> all = samples();
  for (std::size_t i = 0; i + 1 < all.size(); ++i) {
    const Lanes x = lanes_of(all[i]), zero(0.0f);
    float alone[4], beside[4];
    Lanes::store_sums(x, zero, zero, x, alone);
    Lanes::store_sums(x, x, x, zero, beside);
    CHECK_SAME(alone[0], beside[0]);
    CHECK_SAME(alone[3], beside[1]);
    CHECK_SAME(alone[0], beside[2]);
  }
});

const Test functions("lanes: exp to about a unit in the last place, erf to 6e-7", [] {
  for (float x = -104.0f; x < 90.0f; x += 0.37f) {
    Values values;
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) values[lane] = x + static_cast<float>(lane) * 0.021f;
    const Values powers = values_of(exp(lanes_of(values))), errors = values_of(erf(lanes_of(values)));
    for (std::size_t lane = 0; lane < kHalfPanel; ++lane) {
      const double expected = std::exp(static_cast<double>(values[lane]));
      if (expected < std::numeric_limits<float>::max()) CHECK_NEAR(powers[lane], expected, expected * 3e-7 + 0x1p-126);
      CHECK_NEAR(errors[lane], std::erf(static_cast<double>(values[lane])), 6e-7);
    }
  }
  const Values special = values_of(exp(lanes_of({kInfinity, -kInfinity, kNan, 0.0f})));
  CHECK_SAME(special[0], kInfinity);
  CHECK_SAME(special[1], 0.0f);
  CHECK_SAME(special[2], kNan);
  CHECK_SAME(special[3], 1.0f);
});

}  // namespace
}  // namespace unit_tests
