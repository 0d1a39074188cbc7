// The positions of the k greatest scores, in their order; of equal scores the first ones.
//
// Scores are given as integers of the same order. The k-th greatest of the maxima of disjoint sets of scores does not
// exceed the k-th greatest score, so it excludes most positions in one pass; the rest is selected exactly.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "ktc/shape.hpp"

namespace ktc {

inline constexpr std::int32_t kHidden = std::numeric_limits<std::int32_t>::min();  // a position that is not chosen

// A template, so that each instruction set has its own copy.
template <class Isa>
class TopPositions {
 public:
  // An integer in the order of the scores, of the bits of one in fp32; a NaN is greater than any number.
  [[gnu::always_inline]] static std::int32_t ordered(std::int32_t bits) {
    const std::int32_t order = bits ^ ((bits >> 31) & 0x7fffffff);
    return (bits & 0x7fffffff) > 0x7f800000 ? std::numeric_limits<std::int32_t>::max() : order;
  }

  // The numbers of a call's scratch memory, for up to `positions`.
  static std::int64_t scratch(std::int64_t positions) { return 2 * round_up(positions, kLanes) + kBuckets; }

  // Writes the positions in [begin, end) of the k greatest scores, and returns their number. Fewer than k only where
  // the others are hidden.
  static std::int64_t choose(const std::int32_t* scores, std::int64_t begin, std::int64_t end, std::int64_t k,
                             std::int32_t* scratch, std::int32_t* positions) {
    if (k <= 0 || begin >= end) return 0;
    std::int32_t* candidates = scratch;
    std::int32_t* of_candidates = scratch + round_up(end - begin, kLanes);
    std::int32_t* counts = of_candidates + round_up(end - begin, kLanes);
    const std::int32_t bound = lower_bound(scores + begin, end - begin, k, candidates, counts);
    const std::int64_t count = collect(scores, begin, end, bound, candidates, of_candidates);
    if (count <= k) {
      std::copy(candidates, candidates + count, positions);
      return count;
    }
    const auto [value, greater] = kth_greatest(of_candidates, count, k, counts);
    std::int64_t ties = k - greater, found = 0;
    for (std::int64_t each = 0; each < count; ++each) {
      const bool tie = of_candidates[each] == value && ties > 0;
      ties -= tie;
      if (tie || of_candidates[each] > value) positions[found++] = candidates[each];
    }
    return found;
  }

 private:
  static constexpr std::int64_t kLanes = kHalfPanel;
  static constexpr std::int64_t kMostDepth = 32;  // scores of one maximum
  static constexpr int kBits = 11;                // of an integer that one pass looks at
  static constexpr std::int64_t kBuckets = 1 << kBits;

  struct Kth {
    std::int32_t value;
    std::int64_t greater;  // the number of greater ones
  };

  // A number that at least k scores reach, unless fewer are visible.
  static std::int32_t lower_bound(const std::int32_t* scores, std::int64_t count, std::int64_t k, std::int32_t* maxima,
                                  std::int32_t* counts) {
    const std::int64_t depth = std::min(kMostDepth, count / (2 * k));
    if (depth < 4) return kHidden + 1;
    const std::int64_t stretch = depth * kLanes;
    std::int64_t found = 0;
    for (std::int64_t at = 0; at + stretch <= count; at += stretch, found += kLanes) {
      std::int32_t greatest[kLanes];
      std::copy(scores + at, scores + at + kLanes, greatest);
      for (std::int64_t row = kLanes; row < stretch; row += kLanes) {
#pragma GCC unroll 1
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
          const std::int32_t each = scores[at + row + lane], held = greatest[lane];
          greatest[lane] = each > held ? each : held;
        }
      }
      std::copy(greatest, greatest + kLanes, maxima + found);
    }
    if (found < k) return kHidden + 1;
    // Without the lowest bits of that maximum: more candidates, and a pass less.
    return std::max(kth_greatest(maxima, found, k, counts, 2).value, kHidden + 1);
  }

  static std::int64_t collect(const std::int32_t* scores, std::int64_t begin, std::int64_t end, std::int32_t bound,
                              std::int32_t* candidates, std::int32_t* of_candidates) {
    std::int64_t count = 0;
    const auto take = [&](std::int64_t at) {
      candidates[count] = static_cast<std::int32_t>(at);
      of_candidates[count] = scores[at];
      count += scores[at] >= bound;
    };
    std::int64_t at = begin;
    for (; at + kLanes < end; at += kLanes) {
      std::int32_t any = 0;
#pragma GCC unroll 1
      for (std::int64_t lane = 0; lane < kLanes; ++lane) any |= scores[at + lane] >= bound ? 1 : 0;
      if (any == 0) continue;
      for (std::int64_t lane = 0; lane < kLanes; ++lane) take(at + lane);
    }
    for (; at < end; ++at) take(at);
    return count;
  }

  // Of at least k values, by their bits from the highest on. After two of three passes the lowest bits are zeros.
  static Kth kth_greatest(const std::int32_t* values, std::int64_t count, std::int64_t k, std::int32_t* counts,
                          int passes = 3) {
    constexpr std::array<int, 3> kShifts{32 - kBits, 32 - 2 * kBits, 0};
    std::uint32_t known = 0, mask = 0;
    std::int64_t greater = 0;
    for (int pass = 0; pass < passes; ++pass) {
      const int shift = kShifts[static_cast<std::size_t>(pass)];
      const std::uint32_t digits = shift == 0 ? (1u << (32 - 2 * kBits)) - 1 : kBuckets - 1;
      std::fill(counts, counts + kBuckets, 0);
      for (std::int64_t each = 0; each < count; ++each) {
        const std::uint32_t value = unsigned_of(values[each]);
        if ((value & mask) == known) ++counts[value >> shift & digits];
      }
      std::uint32_t digit = digits;
      while (greater + counts[digit] < k) greater += counts[digit--];
      known |= digit << shift;
      mask |= digits << shift;
    }
    return {static_cast<std::int32_t>(known ^ 0x80000000u), greater};
  }

  static std::uint32_t unsigned_of(std::int32_t value) { return static_cast<std::uint32_t>(value) ^ 0x80000000u; }
};

}  // namespace ktc
