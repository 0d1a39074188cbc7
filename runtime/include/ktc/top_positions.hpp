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
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

inline constexpr std::int32_t kHidden = std::numeric_limits<std::int32_t>::min();  // a position that is not chosen

// What is done with 16 scores at a time; the header `ktc/isa/NAME_key_dots.hpp` chooses it.
template <class Isa>
struct ScoreLanes;

// In plain C++.
struct PlainScoreLanes {
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

  // Appends the positions of scores that reach a bound, and returns their number. There is room for 16.
  [[gnu::always_inline]] static std::int64_t append(const std::int32_t* scores, std::int32_t bound, std::int64_t first,
                                                    std::int32_t* positions) {
    std::int32_t any = 0;
#pragma GCC unroll 1
    for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) any |= scores[lane] >= bound ? 1 : 0;
    if (any == 0) return 0;
    std::int64_t count = 0;
    for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) {
      positions[count] = static_cast<std::int32_t>(first + lane);
      count += scores[lane] >= bound;
    }
    return count;
  }

  // Copies the scores that reach a bound, of 16, and their positions to `reaching` and `kept`, which may overlap the
  // source from the front. Returns their number.
  [[gnu::always_inline]] static std::int64_t keep(const std::int32_t* scores, std::int32_t bound,
                                                  const std::int32_t* positions, std::int32_t* kept,
                                                  std::int32_t* reaching) {
    std::int64_t count = 0;
    for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) {
      const std::int32_t score = scores[lane];
      kept[count] = positions[lane];
      reaching[count] = score;
      count += score >= bound;
    }
    return count;
  }
};

template <class Isa>
class TopPositions {
 public:
  // The size of a call's scratch memory, for up to `positions`.
  static std::int64_t scratch(std::int64_t positions) { return 2 * room(positions); }

  // Writes the positions in [begin, end) of the k greatest scores, and returns their number. Fewer than k only where
  // the others are hidden.
  static std::int64_t choose(const std::int32_t* scores, std::int64_t begin, std::int64_t end, std::int64_t k,
                             std::int32_t* scratch, std::int32_t* positions) {
    if (k <= 0 || begin >= end) return 0;
    std::int32_t* candidates = scratch;
    std::int32_t* of_candidates = scratch + room(end - begin);
    const std::int32_t bound = lower_bound(scores + begin, end - begin, k, candidates);
    const std::int64_t count = collect(scores, begin, end, bound, candidates, of_candidates);
    const std::int64_t num_chosen = count <= k ? count : reduce(candidates, of_candidates, count, k);
    std::copy(candidates, candidates + num_chosen, positions);
    return num_chosen;
  }

 private:
  static constexpr std::int64_t kLanes = kHalfPanel;
  static constexpr std::int64_t kMostDepth = 32;  // scores of one maximum
  static constexpr int kBoundBits = 18;           // of a range that hidden positions may widen

  // Half of the lanes, in a register: a loop over an array of maxima would wait for its last stores.
  static constexpr std::int64_t kHalf = kLanes / 2;
  using Half [[gnu::vector_size(kHalf * sizeof(std::int32_t))]] = std::int32_t;
  [[gnu::always_inline]] static void raise(Half& greatest, const std::int32_t* scores) {
    Half half;
    __builtin_memcpy(&half, scores, sizeof half);
    greatest = half > greatest ? half : greatest;
  }

  static std::int64_t room(std::int64_t positions) { return round_up(positions, kLanes) + kLanes; }

  // A number that at least k scores reach, unless fewer are visible.
  static std::int32_t lower_bound(const std::int32_t* scores, std::int64_t count, std::int64_t k,
                                  std::int32_t* maxima) {
    const std::int64_t depth = std::min(kMostDepth, count / (2 * k));
    if (depth < 4) return kHidden + 1;
    const std::int64_t stretch = depth * kLanes;
    std::int64_t num_maxima = 0;
    for (std::int64_t at = 0; at + stretch <= count; at += stretch, num_maxima += kLanes) {
      Half left, right;
      __builtin_memcpy(&left, scores + at, sizeof left);
      __builtin_memcpy(&right, scores + at + kHalf, sizeof right);
      for (std::int64_t row = at + kLanes; row < at + stretch; row += kLanes) {
        raise(left, scores + row);
        raise(right, scores + row + kHalf);
      }
      __builtin_memcpy(maxima + num_maxima, &left, sizeof left);
      __builtin_memcpy(maxima + num_maxima + kHalf, &right, sizeof right);
    }
    if (num_maxima < k) return kHidden + 1;
    return std::max(kth_greatest(maxima, num_maxima, k, kBoundBits), kHidden + 1);
  }

  static std::int64_t collect(const std::int32_t* scores, std::int64_t begin, std::int64_t end, std::int32_t bound,
                              std::int32_t* candidates, std::int32_t* of_candidates) {
    std::int64_t count = 0, at = begin;
    for (; at + kLanes <= end; at += kLanes) {
      count += ScoreLanes<Isa>::append(scores + at, bound, at, candidates + count);
    }
    for (; at < end; ++at) {
      candidates[count] = static_cast<std::int32_t>(at);
      count += scores[at] >= bound;
    }
    for (std::int64_t index = 0; index < count; ++index) of_candidates[index] = scores[candidates[index]];
    return count;
  }

  // Keeps those of the k greatest scores at the beginning of the arrays, in their order, and returns k.
  static std::int64_t reduce(std::int32_t* positions, std::int32_t* scores, std::int64_t count, std::int64_t k) {
    const std::int32_t value = kth_greatest(scores, count, k);
    std::int64_t kept = 0, index = 0;
    for (; index + kLanes <= count; index += kLanes) {
      kept += ScoreLanes<Isa>::keep(scores + index, value, positions + index, positions + kept, scores + kept);
    }
    for (; index < count; ++index) {
      positions[kept] = positions[index];
      scores[kept] = scores[index];
      kept += scores[index] >= value;
    }
    if (kept > k) drop_ties(positions, scores, kept, kept - k, value);
    return k;
  }

  // Drops the last `excess` positions among those with this score.
  static void drop_ties(std::int32_t* positions, const std::int32_t* scores, std::int64_t count, std::int64_t excess,
                        std::int32_t value) {
    std::int64_t left = std::count(scores, scores + count, value) - excess, kept = 0;
    for (std::int64_t index = 0; index < count; ++index) {
      if (scores[index] == value && left-- <= 0) continue;
      positions[kept++] = positions[index];
    }
  }

  // The k-th greatest of at least k values, or a number below it by less than 2 / 2^bits of their range: found bit by
  // bit from the least value, since counting the values that reach a number takes few instructions for each.
  static std::int32_t kth_greatest(const std::int32_t* values, std::int64_t count, std::int64_t k, int bits = 32) {
    std::int32_t least = values[0], most = values[0];
    for (std::int64_t index = 1; index < count; ++index) {
      least = std::min(least, values[index]);
      most = std::max(most, values[index]);
    }
    std::int64_t bound = least;
    const int width = std::bit_width(static_cast<std::uint64_t>(std::int64_t{most} - least));
    for (int bit = width - 1; bit >= std::max(0, width - bits); --bit) {
      const std::int64_t next = bound + (std::int64_t{1} << bit);
      if (next <= most && reaching(values, count, static_cast<std::int32_t>(next)) >= k) bound = next;
    }
    return static_cast<std::int32_t>(bound);
  }

  static std::int64_t reaching(const std::int32_t* values, std::int64_t count, std::int32_t bound) {
    std::int32_t reached = 0;
    for (std::int64_t index = 0; index < count; ++index) reached += values[index] >= bound ? 1 : 0;
    return reached;
  }
};

}  // namespace ktc::inline KTC_UNIT
