// What kernels of decode attention share: their interface, how positions are cut into splits (Flash-Decoding), which
// scores are masked, and how the results of splits are combined.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "ktc/cache_view.hpp"
#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/interface/attention.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The number of positions of a sequence that are read.
inline std::int64_t length_of(const AttentionArguments& a, std::int64_t sequence) {
  return a.lengths == nullptr ? a.positions : a.lengths[sequence];
}

template <class Kernel>
std::unique_ptr<AttentionKernel> make_attention() {
  return std::make_unique<Kernel>();
}

// Widths are filled up to multiples of `kUnit`.
template <InstructionSet Isa, std::int64_t kUnit>
struct AttentionPlan {
  using Lanes = typename Isa::Lanes;

  // Positions whose scores are computed before their values are added. Both loops are then long, and joint rows of 576
  // bf16 stay in L2 between them.
  static constexpr std::int64_t kBlock = 128;
  static_assert(kBlock == kPagePositions);
  static constexpr std::int64_t kMostRows = 64;  // of one worker at a time
  static constexpr std::int64_t kMaxSplits = 64;
  static constexpr float kUnseen = -1e30f;
  // Weights of less than exp of this, 2^-99.5 times the greatest, are zero. Near 2^-126 products with values would be
  // denormal numbers: processors of Intel took 12 times as long, where scores differ as much as those of random
  // latents.
  static constexpr float kLeastExponent = -69.0f;

  // The running softmax of one row in one split: its greatest score, and the sum of exp(score - greatest).
  struct Sums {
    float greatest;
    float total;
  };

  // The weighted values that a row has summed: kHalfPanel columns at `data`, the following ones `next` further.
  struct Added {
    float* data;
    std::int64_t next = kHalfPanel;
  };

  explicit AttentionPlan(const AttentionArguments& a)
      : first_width(round_up(a.keys.width, kUnit)),
        query_width(first_width + round_up(a.more_keys.width, kUnit)),
        value_width(round_up(a.values.width, kUnit)),
        rows(a.group * a.tokens),
        all_rows(a.batch * a.key_heads * rows),
        row_groups((rows + kMostRows - 1) / kMostRows),
        shortest(kBlock * std::clamp<std::int64_t>(a.key_heads / 2, 1, 4)),
        splits(std::min(kMaxSplits, (a.positions + shortest - 1) / shortest)),
        items(a.batch * a.key_heads * splits * row_groups) {}

  std::int64_t first_width;  // of a query, its parts filled up
  std::int64_t query_width;
  std::int64_t value_width;
  std::int64_t rows;  // of a key head
  std::int64_t all_rows;
  std::int64_t row_groups;
  std::int64_t shortest;  // positions of a split
  std::int64_t splits;    // at most, of a sequence
  std::int64_t items;

  // The positions of a split for a sequence of this length. Other sequences have no influence, so they change no bit.
  std::int64_t split_size(std::int64_t length) const {
    return std::max(shortest, round_up((length + kMaxSplits - 1) / kMaxSplits, kBlock));
  }

  // One split of positions for up to kMostRows rows of a key head.
  struct Item {
    Item(std::int64_t item, const AttentionPlan& plan, const AttentionArguments& a)
        : split(item / plan.row_groups % plan.splits),
          head(item / (plan.row_groups * plan.splits)),
          first(item % plan.row_groups * kMostRows),
          count(std::min(kMostRows, plan.rows - first)) {
      const std::int64_t whole = length_of(a, head / a.key_heads), length = plan.split_size(whole);
      begin = split * length;
      end = std::min(begin + length, whole);
    }

    // Whether the sequence ends before the split begins.
    bool is_empty() const { return begin >= end; }

    std::int64_t split;
    std::int64_t head;   // of all sequences
    std::int64_t first;  // row of the key head
    std::int64_t count;
    std::int64_t begin;  // among the positions of the sequence
    std::int64_t end;
  };

  // The first of an item's rows, among those of all splits.
  std::int64_t row_of(const Item& item) const { return item.split * all_rows + item.head * rows + item.first; }

  // The keys and values of key head `head`, counted over all sequences, whose elements are `Stored`.
  template <class Stored>
  static HeadViews head_views(const AttentionArguments& a, std::int64_t head) {
    const std::int64_t key_head = head % a.key_heads, number = head / a.key_heads;
    const std::int64_t sequence = a.pages == nullptr ? number : 0;
    const std::int64_t first = a.pages == nullptr ? a.positions - length_of(a, number) : 0;
    const auto of_head = [&](CacheView view) {
      if (view.data != nullptr) {
        view.data = static_cast<const Stored*>(view.data) + sequence * view.batch + key_head * view.head;
        if (view.scales != nullptr) view.scales += sequence * view.scale_batch + key_head * view.scale_head;
      }
      return view_from<Stored>(view, nullptr, first);
    };
    return {of_head(a.keys), of_head(a.more_keys), of_head(a.values),
            a.pages == nullptr ? nullptr : a.pages + number * a.pages_of_sequence};
  }

  // Calls `body` with splits until `take` has none left. The next one is taken early and given to `ahead`, so that its
  // first rows are fetched.
  template <class Stored, class Take, class Ahead, class Body>
  void for_each_split(const AttentionArguments& a, const Take& take, Ahead& ahead, const Body& body) const {
    const auto taken = [&] {
      std::int64_t index = take();
      while (index < items && Item(index, *this, a).is_empty()) index = take();
      if (index < items) {
        const Item item(index, *this, a);
        ahead.follow(head_views<Stored>(a, item.head), item.begin, item.end);
      }
      return index;
    };
    for (std::int64_t item = taken(); item < items;) {
      const std::int64_t following = taken();
      body(Item(item, *this, a));
      item = following;
    }
  }

  // Masks the scores beyond the end of a block.
  static void fill_up(std::int64_t length, float* scores) {
    std::fill(scores + length, scores + round_up(length, kHalfPanel), kUnseen);
  }

  // Masks the positions of a block that a row does not attend to, and those beyond its end.
  static void hide(const AttentionArguments& a, std::int64_t head, std::int64_t row, std::int64_t block,
                   std::int64_t length, float* scores) {
    const std::int64_t token = row % a.tokens, sequence = head / a.key_heads, whole = length_of(a, sequence);
    fill_up(length, scores);
    if (a.mask != nullptr) {
      const std::uint8_t* seen =
          a.mask + sequence * a.mask_batch + token * a.mask_token + (a.positions - whole + block);
      for (std::int64_t position = 0; position < length; ++position)
        scores[position] = seen[position] != 0 ? scores[position] : kUnseen;
      return;
    }
    const std::int64_t last = whole - a.tokens + token;
    for (std::int64_t position = std::max<std::int64_t>(0, last + 1 - block); position < length; ++position) {
      scores[position] = kUnseen;
    }
  }

  // The greatest of the scores, which are filled up to whole lanes.
  static float greatest_of(const float* scores, std::int64_t length) {
    Lanes greatest(kUnseen);
    for (std::int64_t at = 0; at < length; at += kHalfPanel) greatest = larger(greatest, Lanes::load(scores + at));
    return greatest.largest();
  }

  // exp(score - greatest). A NaN stays a NaN.
  static float weight_of(float score, float greatest) {
    const float exponent = score - greatest;
    return exponent < kLeastExponent ? 0.0f : std::exp(exponent);
  }

  // Scores up to this one have weight zero: they are masked or too small. Where `greatest` absorbs the difference, as
  // infinity does, exp makes the other weights zero.
  static float without_weight(float greatest) {
    constexpr float kNotSeen = 0.5f * kUnseen;
    const float least = greatest + kLeastExponent;
    return least < greatest ? std::max(kNotSeen, least) : kNotSeen;
  }

  // Rescales what a row has summed to the greatest score that includes a block, and returns that score.
  float raise(const float* scores, std::int64_t positions, Sums& sum, Added added) const {
    const float greatest = std::max(sum.greatest, greatest_of(scores, positions));
    if (greatest > sum.greatest) {
      if (sum.total != 0.0f) {  // otherwise nothing was added
        const float factor = weight_of(sum.greatest, greatest);
        sum.total *= factor;
        const Lanes scale(factor);
        for (std::int64_t column = 0; column < value_width; column += kHalfPanel, added.data += added.next) {
          (Lanes::load(added.data) * scale).store(added.data);
        }
      }
      sum.greatest = greatest;
    }
    return greatest;
  }

  // Overwrites the scores of a row with its weights exp(score - greatest), in fp32 or packed as bf16. Rescales the sums
  // of earlier blocks. Calls `step` once per kHalfPanel scores.
  template <class Weight, class Step>
  void exponentiate(std::int64_t length, float* scores, Sums& sum, Added added, const Step& step) const {
    const float greatest = raise(scores, length, sum, added), zero = without_weight(greatest);
    const Lanes shift(greatest);
    Lanes total(0.0f);
    for (std::int64_t at = 0; at < length; at += kHalfPanel) {
      step();
      const Lanes score = Lanes::load(scores + at);
      const Lanes weight = zero_up_to(zero, score, exp(score - shift));
      if constexpr (std::is_same_v<Weight, bf16>) {
        weight.to_elements(reinterpret_cast<bf16*>(scores) + at);  // over scores that were read
      } else {
        weight.store(scores + at);
      }
      total = total + weight;
    }
    sum.total += total.sum();
  }

  // Combines the splits of rows until no row is left for a thread to take. `place(column)` is where a column of the
  // values was summed.
  template <class Element, class Place>
  void combine(const AttentionArguments& a, const Sums* sums, float* values, std::atomic<std::int64_t>& next_row,
               const Place& place) const {
    for (;;) {
      const std::int64_t row = next_row.fetch_add(1, std::memory_order_relaxed);
      if (row >= all_rows) return;
      combine_row<Element>(a, sums, values, row, place);
    }
  }

 private:
  // Combines the splits of one row, in their order.
  template <class Element, class Place>
  void combine_row(const AttentionArguments& a, const Sums* sums, float* values, std::int64_t row,
                   const Place& place) const {
    const std::int64_t head = row / rows, of_head = row % rows;
    const std::int64_t query_head = head % a.key_heads * a.group + of_head / a.tokens;
    const std::int64_t whole_length = length_of(a, head / a.key_heads), length = split_size(whole_length);
    const std::int64_t num_splits = (whole_length + length - 1) / length;  // splits of the sequence
    float greatest = a.sinks == nullptr ? kUnseen : a.sinks[query_head];
    for (std::int64_t split = 0; split < num_splits; ++split) {
      greatest = std::max(greatest, sums[split * all_rows + row].greatest);
    }
    float total = a.sinks == nullptr ? 0.0f : std::exp(a.sinks[query_head] - greatest);
    float* whole = values + row * value_width;              // of the first split
    const std::int64_t following = all_rows * value_width;  // from a split to the next
    for (std::int64_t split = 0; split < num_splits; ++split) {
      const Sums& sum = sums[split * all_rows + row];
      const float factor = weight_of(sum.greatest, greatest);
      const Lanes scale(factor);
      total += sum.total * factor;
      const float* from = whole + split * following;
      const std::int64_t ahead = split + 1 < num_splits ? following : 0;
      for (std::int64_t column = 0; column < value_width; column += kHalfPanel) {
        __builtin_prefetch(from + column + ahead);  // the next split is in the cache of another core
        const Lanes scaled = Lanes::load(from + column) * scale;
        (split == 0 ? scaled : Lanes::load(whole + column) + scaled).store(whole + column);
      }
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const std::int64_t batch = head / a.key_heads, token = of_head % a.tokens;
    Element* out = static_cast<Element*>(a.out) +
                   ((batch * a.tokens + token) * a.key_heads * a.group + query_head) * a.values.width;
    for (std::int64_t column = 0; column < a.values.width; column += kHalfPanel) {
      float run[kHalfPanel];
      for (int lane = 0; lane < kHalfPanel; ++lane) run[lane] = whole[place(column + lane)];
      const Lanes scaled = Lanes::load(run) * Lanes(inverse);
      if constexpr (requires { scaled.to_elements(out); }) {
        if (column + kHalfPanel <= a.values.width) {
          scaled.to_elements(out + column);  // on AVX512-BF16, denormal results are zero
          continue;
        }
      }
      scaled.store(run);
      const std::int64_t count = std::min<std::int64_t>(kHalfPanel, a.values.width - column);
      std::transform(run, run + count, out + column, narrowed<Element>);
    }
  }
};

}  // namespace ktc::inline KTC_UNIT
