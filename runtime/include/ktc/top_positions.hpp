// The positions of the k greatest scores, in their order; of equal scores the first ones.
//
// Scores are given as integers of the same order. The k-th greatest of the maxima of disjoint sets of scores does not
// exceed the k-th greatest score, so it excludes most positions in one pass; the rest is selected exactly.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "ktc/shape.hpp"

namespace ktc {

inline constexpr std::int32_t kHidden = std::numeric_limits<std::int32_t>::min();  // a position that is not chosen

// What is done with 16 scores at a time. The header of an instruction set may have its own.
template <class Isa>
struct ScoreLanes {
  // Integers in the order of scores in fp32, of which a NaN is greater than any number.
  [[gnu::always_inline]] static void order(const float* scores, std::int32_t* ordered) {
    std::int32_t bits[kHalfPanel];
    __builtin_memcpy(bits, scores, sizeof bits);
// A loop that is unrolled before it is vectorised stays scalar.
#pragma GCC unroll 1
    for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) {
      const std::int32_t order = bits[lane] ^ ((bits[lane] >> 31) & 0x7fffffff);
      ordered[lane] = (bits[lane] & 0x7fffffff) > 0x7f800000 ? std::numeric_limits<std::int32_t>::max() : order;
    }
  }

  // Appends the scores that reach a bound, and their positions, and returns their number. Both arrays have room for 16.
  [[gnu::always_inline]] static std::int64_t append(const std::int32_t* scores, std::int32_t bound, std::int64_t first,
                                                    std::int32_t* positions, std::int32_t* reaching) {
    std::int32_t any = 0;
#pragma GCC unroll 1
    for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) any |= scores[lane] >= bound ? 1 : 0;
    if (any == 0) return 0;
    std::int64_t count = 0;
    for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) {
      positions[count] = static_cast<std::int32_t>(first + lane);
      reaching[count] = scores[lane];
      count += scores[lane] >= bound;
    }
    return count;
  }
};

// A template, so that each instruction set has its own copy.
template <class Isa>
class TopPositions {
 public:
  // The numbers of a call's scratch memory, for up to `positions`.
  static std::int64_t scratch(std::int64_t positions) { return 2 * room(positions) + kBuckets; }

  // Writes the positions in [begin, end) of the k greatest scores, and returns their number. Fewer than k only where
  // the others are hidden.
  static std::int64_t choose(const std::int32_t* scores, std::int64_t begin, std::int64_t end, std::int64_t k,
                             std::int32_t* scratch, std::int32_t* positions) {
    if (k <= 0 || begin >= end) return 0;
    std::int32_t* candidates = scratch;
    std::int32_t* of_candidates = scratch + room(end - begin);
    std::int32_t* counts = of_candidates + room(end - begin);
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
  static constexpr int kBits = 11;                // of a distance that one pass looks at
  static constexpr std::int64_t kBuckets = 1 << kBits;

  static std::int64_t room(std::int64_t positions) { return round_up(positions, kLanes) + kLanes; }

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
    // Without the lowest bits of that maximum: more candidates, and fewer passes.
    return std::max(kth_greatest(maxima, found, k, counts, 2).value, kHidden + 1);
  }

  static std::int64_t collect(const std::int32_t* scores, std::int64_t begin, std::int64_t end, std::int32_t bound,
                              std::int32_t* candidates, std::int32_t* of_candidates) {
    std::int64_t count = 0, at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      count += ScoreLanes<Isa>::append(scores + at, bound, at, candidates + count, of_candidates + count);
    }
    for (; at < end; ++at) {
      candidates[count] = static_cast<std::int32_t>(at);
      of_candidates[count] = scores[at];
      count += scores[at] >= bound;
    }
    return count;
  }

  // Of at least k values. A pass counts values by their distance from the least, in up to 2048 equal parts of the
  // range, and the next one looks at the part with the k-th: three passes at most. With fewer, the least number of that
  // part.
  static Kth kth_greatest(const std::int32_t* values, std::int64_t count, std::int64_t k, std::int32_t* counts,
                          int passes = 3) {
    std::int32_t least = values[0], most = values[0];
    for (std::int64_t each = 1; each < count; ++each) {
      least = std::min(least, values[each]);
      most = std::max(most, values[each]);
    }
    std::uint32_t low = unsigned_of(least), range = unsigned_of(most) - low;
    std::int64_t greater = 0;
    for (;;) {
      const int shift = std::max(0, static_cast<int>(std::bit_width(range)) - kBits);
      std::uint32_t part = range >> shift;
      std::fill(counts, counts + part + 1, 0);
      for (std::int64_t each = 0; each < count; ++each) {
        if (const std::uint32_t distance = unsigned_of(values[each]) - low; distance <= range) {
          ++counts[distance >> shift];
        }
      }
      while (greater + counts[part] < k) greater += counts[part--];
      low += part << shift;
      if (--passes == 0 || shift == 0) return {static_cast<std::int32_t>(low ^ 0x80000000u), greater};
      range = std::min(range - (part << shift), (1u << shift) - 1);
    }
  }

  static std::uint32_t unsigned_of(std::int32_t value) { return static_cast<std::uint32_t>(value) ^ 0x80000000u; }
};

}  // namespace ktc
