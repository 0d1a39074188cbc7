// Attention of a few new tokens over a cache: out = softmax(scale q K^T) V, without a tensor of scores or of expanded
// keys in memory. Positions are cut into stretches, each of which keeps its own greatest score, sum and weighted sum of
// values (Flash-Decoding, Dao et al. 2023); they are put together in their order. A stretch's length depends on the
// number of positions alone, so the number of threads changes no bit.
//
// Keys may be in two parts, and values may be the first of them: latent attention (MLA) reads latents once for both,
// and rotary keys beside them, with all heads as rows of one key head. Sums are fp32.
//
// With lists of positions, the softmax is over these alone. Their keys and values are copied block by block.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "ktc/element.hpp"
#include "ktc/engine.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"

namespace ktc {

// (batch, key heads, positions, width); the elements of a position are neighbours. Strides count elements.
struct CacheView {
  const void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t position = 0;
  std::int64_t width = 0;
};

// query (batch, key heads, rows, keys.width + more_keys.width) is contiguous, where the rows of a key head are its
// query heads and their tokens; out (batch, tokens, query heads, values.width) is too. Without a mask, the new tokens
// are the last positions and see those up to their own. mask (batch, tokens, positions) has a byte for each, 0 where it
// is not seen, and strides of its first two dimensions; sinks (query heads) are further scores without a value.
struct AttentionArguments {
  const void* query = nullptr;
  CacheView keys;
  CacheView more_keys;
  CacheView values;
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_batch = 0;
  std::int64_t mask_token = 0;
  const float* sinks = nullptr;
  void* out = nullptr;
  std::int64_t batch = 0;
  std::int64_t key_heads = 0;
  std::int64_t group = 0;  // query heads of a key head
  std::int64_t tokens = 0;
  std::int64_t positions = 0;
  float scale = 1.0f;
  // Lists (batch, key heads, positions), of which the first counts (batch, key heads) are attended to; null for all
  // positions of the cache. Then there is one token and no mask, `sequences` neighbours of the batch share a sequence
  // of the cache, and `choosers` neighbours of the key heads share a key head of it.
  const std::int32_t* chosen = nullptr;
  const std::int32_t* counts = nullptr;
  std::int64_t sequences = 1;
  std::int64_t choosers = 1;
};

class AttentionKernel {
 public:
  virtual ~AttentionKernel() = default;
  virtual void forward(Engine& engine, const AttentionArguments& arguments) const = 0;
};

struct AttentionEntry {
  const char* name;
  std::unique_ptr<AttentionKernel> (*make)();
};

template <class Kernel>
std::unique_ptr<AttentionKernel> make_attention() {
  return std::make_unique<Kernel>();
}

template <class Isa, class Element>
class DecodeAttention final : public AttentionKernel {
  using Lanes = typename Isa::Lanes;
  // Products of bf16 as it is stored, where the instruction set has them; otherwise products of fp32.
  static constexpr bool kPaired = std::is_same_v<Element, bf16> && requires { typename Isa::template DotSums<1, 1>; };
  using Query = std::conditional_t<kPaired, bf16, float>;

 public:
  void forward(Engine& engine, const AttentionArguments& arguments) const override {
    const Plan plan(arguments);
    engine.exclusively([&](const Team& team, Workspace& workspace) {
      Region<Query> queries(plan.all_rows * plan.query_width);
      Region<Sums> sums(plan.all_rows * plan.stretches);
      Region<float> values(plan.all_rows * plan.stretches * plan.value_width);
      Region<float> scores(team.threads() * kMostRows * kBlock);
      Region<Element> gathered(arguments.chosen == nullptr ? 0 : team.threads() * plan.gathered);
      workspace.lay_out(queries, sums, values, scores, gathered);
      widen(arguments, plan, queries.data());
      const Call call{arguments, plan, queries.data(), sums.data(), values.data()};
      std::atomic<std::int64_t> next{0};
      std::atomic<std::int64_t> next_row{0};
      team.run([&](const Worker& worker) {
        float* own = scores.data() + worker.index * kMostRows * kBlock;
        for (;;) {
          const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
          if (item >= plan.items) break;
          if (arguments.chosen == nullptr) {
            call.stretch(item, own);
          } else {
            call.chosen_stretch(item, own, gathered.data() + worker.index * plan.gathered);
          }
        }
        worker.barrier.arrive_and_wait();
        for (;;) {
          const std::int64_t row = next_row.fetch_add(1, std::memory_order_relaxed);
          if (row >= plan.all_rows) break;
          call.put_together(row);
        }
      });
    });
  }

 private:
  static constexpr std::int64_t kBlock = 64;     // positions whose scores are computed before their values are added
  static constexpr std::int64_t kMostRows = 64;  // that one worker computes together
  static constexpr std::int64_t kUnit = kPaired ? 32 : kHalfPanel;         // to which widths are filled up
  static constexpr int kRows = kPaired ? 6 : Isa::kMaxRows >= 12 ? 8 : 2;  // of a tile of sums in registers
  static constexpr int kSides = kPaired ? 4 : Isa::kMaxRows >= 12 ? 3 : 2;
  static constexpr float kUnseen = -1e30f;

  // Of one row and stretch: the greatest score, and the sum of exp(score - greatest).
  struct Sums {
    float greatest;
    float total;
  };

  template <int kCount>
  struct Rows {};

  // Calls `body` for runs of rows, each of the largest number that has sums in registers and is left.
  template <class Body>
  static void by_rows(std::int64_t count, const Body& body) {
    std::int64_t each = 0;
    for (; each + kRows <= count; each += kRows) body(each, Rows<kRows>{});
    if constexpr (kRows > 4) {
      for (; each + 4 <= count; each += 4) body(each, Rows<4>{});
    }
    if constexpr (kRows > 2) {
      for (; each + 2 <= count; each += 2) body(each, Rows<2>{});
    }
    for (; each < count; ++each) body(each, Rows<1>{});
  }

  // How a call is cut.
  struct Plan {
    explicit Plan(const AttentionArguments& a)
        : first_width(round_up(a.keys.width, kUnit)),
          query_width(first_width + round_up(a.more_keys.width, kUnit)),
          value_width(round_up(a.values.width, kUnit)),
          rows(a.group * a.tokens),
          all_rows(a.batch * a.key_heads * rows),
          row_groups((rows + kMostRows - 1) / kMostRows),
          length(std::max<std::int64_t>(128, round_up((a.positions + kMostStretches - 1) / kMostStretches, kBlock))),
          stretches((a.positions + length - 1) / length),
          items(a.batch * a.key_heads * stretches * row_groups),
          gathered(kBlock * (a.keys.width + a.more_keys.width + a.values.width)) {}

    static constexpr std::int64_t kMostStretches = 64;
    std::int64_t first_width;  // of a query, its parts filled up
    std::int64_t query_width;
    std::int64_t value_width;
    std::int64_t rows;  // of a key head
    std::int64_t all_rows;
    std::int64_t row_groups;
    std::int64_t length;  // positions of a stretch
    std::int64_t stretches;
    std::int64_t items;
    std::int64_t gathered;  // numbers of a block of chosen positions
  };

  // Queries, scaled where they are fp32; each part is followed by zeros.
  static void widen(const AttentionArguments& a, const Plan& plan, Query* target) {
    const auto* from = static_cast<const Element*>(a.query);
    const auto part = [&](std::int64_t width, Query* to) {
      if constexpr (kPaired) {
        std::copy(from, from + width, to);
      } else {
        std::transform(from, from + width, to, [&](Element value) { return static_cast<float>(value) * a.scale; });
      }
      std::fill(to + width, to + round_up(width, kUnit), Query(0.0f));
      from += width;
    };
    for (std::int64_t row = 0; row < plan.all_rows; ++row, target += plan.query_width) {
      part(a.keys.width, target);
      part(a.more_keys.width, target + plan.first_width);
    }
  }

  struct Lane {
    Lanes value{0.0f};
  };

  struct Call {
    const AttentionArguments& a;
    const Plan& plan;
    const Query* queries;
    Sums* sums;
    float* values;

    // One stretch of positions for up to kMostRows rows of a key head.
    void stretch(std::int64_t item, float* scores) const {
      const std::int64_t group = item % plan.row_groups;
      const std::int64_t stretch = item / plan.row_groups % plan.stretches;
      const std::int64_t head = item / (plan.row_groups * plan.stretches);  // of all sequences
      const std::int64_t first = group * kMostRows, count = std::min(kMostRows, plan.rows - first);
      const std::int64_t begin = stretch * plan.length, end = std::min(begin + plan.length, a.positions);
      const std::int64_t row = head * plan.rows + first;
      Sums* of_rows = sums + stretch * plan.all_rows + row;
      float* added = values + (stretch * plan.all_rows + row) * plan.value_width;
      std::fill(of_rows, of_rows + count, Sums{kUnseen, 0.0f});
      std::fill(added, added + count * plan.value_width, 0.0f);
      for (std::int64_t block = begin; block < end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, end - block);
        score(head, row, count, block, length, scores);
        for (std::int64_t each = 0; each < count; ++each) {
          hide(head, first + each, block, length, scores + each * kBlock);
          exponentiate(length, scores + each * kBlock, of_rows[each], added + each * plan.value_width);
        }
        add_values(head, count, block, length, scores, added);
      }
    }

    // The same of chosen positions.
    void chosen_stretch(std::int64_t item, float* scores, Element* gathered) const {
      const std::int64_t group = item % plan.row_groups;
      const std::int64_t stretch = item / plan.row_groups % plan.stretches;
      const std::int64_t head = item / (plan.row_groups * plan.stretches);
      const std::int64_t first = group * kMostRows, count = std::min(kMostRows, plan.rows - first);
      const std::int64_t begin = stretch * plan.length;
      const std::int64_t end = std::min<std::int64_t>(begin + plan.length, a.counts[head]);
      const std::int64_t row = head * plan.rows + first;
      const std::int32_t* chosen = a.chosen + head * a.positions;
      Sums* of_rows = sums + stretch * plan.all_rows + row;
      float* added = values + (stretch * plan.all_rows + row) * plan.value_width;
      std::fill(of_rows, of_rows + count, Sums{kUnseen, 0.0f});
      std::fill(added, added + count * plan.value_width, 0.0f);
      for (std::int64_t block = begin; block < end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, end - block);
        const AttentionArguments copied = gather(head, chosen, block, length, end, gathered);
        const Call of_block{copied, plan, queries, sums, values};
        of_block.score(0, row, count, 0, length, scores);
        for (std::int64_t each = 0; each < count; ++each) {
          of_block.hide(0, 0, 0, length, scores + each * kBlock);
          of_block.exponentiate(length, scores + each * kBlock, of_rows[each], added + each * plan.value_width);
        }
        of_block.add_values(0, count, 0, length, scores, added);
      }
    }

    // Copies the keys and values of a block of chosen positions, and fetches those of the next. The result describes
    // them as a cache of one sequence and one head.
    AttentionArguments gather(std::int64_t head, const std::int32_t* chosen, std::int64_t block, std::int64_t length,
                              std::int64_t end, Element* to) const {
      const std::int64_t batch = head / a.key_heads / a.sequences, key_head = head % a.key_heads / a.choosers;
      const auto copy = [&](const CacheView& view) -> CacheView {
        const auto* from = static_cast<const Element*>(view.data) + batch * view.batch + key_head * view.head;
        const std::int64_t bytes = view.width * static_cast<std::int64_t>(sizeof(Element));
        Element* const begin = to;
        for (std::int64_t each = 0; each < length; ++each, to += view.width) {
          if (const std::int64_t next = block + each + kBlock; next < end) {
            const auto* ahead = reinterpret_cast<const char*>(from + chosen[next] * view.position);
            for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
          }
          std::copy_n(from + chosen[block + each] * view.position, view.width, to);
        }
        return {.data = begin, .position = view.width, .width = view.width};
      };
      AttentionArguments found = a;
      found.keys = copy(a.keys);
      if (a.more_keys.width > 0) found.more_keys = copy(a.more_keys);
      if (a.values.data == a.keys.data && a.values.position == a.keys.position) {
        found.values = found.keys;
        found.values.width = a.values.width;
      } else {
        found.values = copy(a.values);
      }
      found.mask = nullptr;
      found.tokens = 1;
      found.positions = length;
      return found;
    }

    const Element* at(const CacheView& view, std::int64_t head, std::int64_t position) const {
      return static_cast<const Element*>(view.data) + head / a.key_heads * view.batch + head % a.key_heads * view.head +
             position * view.position;
    }

    void score(std::int64_t head, std::int64_t row, std::int64_t count, std::int64_t block, std::int64_t length,
               float* scores) const {
      by_rows(count, [&]<int kCount>(std::int64_t each, Rows<kCount>) {
        row_tile<kCount>(head, row + each, block, length, scores + each * kBlock, each == 0);
      });
    }

    // What is read next: the values of these positions, and keys one block ahead. Blocks of keys and of values
    // alternate, which the hardware does not prefetch as a stream.
    [[gnu::always_inline]] void fetch(std::int64_t head, std::int64_t position, std::int64_t count) const {
      const auto lines = [&](const CacheView& view, std::int64_t first) {
        const auto* from = reinterpret_cast<const char*>(at(view, head, first));
        const std::int64_t bytes = view.width * static_cast<std::int64_t>(sizeof(Element));
        const std::int64_t stride = view.position * static_cast<std::int64_t>(sizeof(Element));
        for (std::int64_t each = 0; each < count && first + each < a.positions; ++each, from += stride) {
          for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
        }
      };
      if (a.values.data != a.keys.data) lines(a.values, position);
      lines(a.keys, position + kBlock);
      if (a.more_keys.width > 0) lines(a.more_keys, position + kBlock);
    }

    template <int kCount>
    void row_tile(std::int64_t head, std::int64_t row, std::int64_t block, std::int64_t length, float* scores,
                  bool fetching) const {
      std::int64_t position = 0;
      for (; position + kSides <= length; position += kSides) {
        if (fetching) fetch(head, block + position, kSides);
        tile<kCount, kSides>(head, row, block + position, scores + position);
      }
      for (; position < length; ++position) tile<kCount, 1>(head, row, block + position, scores + position);
    }

    // sum[position][row] += query[row] . key[position], over one part of the keys.
    template <int kCount, int kPositions>
    [[gnu::always_inline]] void multiply(const CacheView& view, const Element* key, const float* query,
                                         Lane (&sum)[kPositions][kCount]) const {
      const std::int64_t width = view.width, whole = width / kHalfPanel * kHalfPanel;
      const std::int64_t stride = view.position, query_stride = plan.query_width;
      const auto add = [&](int side, const Element* from, std::int64_t column) {
        const Lanes keys = widened<Lanes>(from);
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          Lanes& total = sum[side][each].value;
          total = fused_multiply_add(keys, Lanes::load(query + each * query_stride + column), total);
        }
      };
      for (std::int64_t column = 0; column < whole; column += kHalfPanel) {
#pragma GCC unroll 3
        for (int side = 0; side < kPositions; ++side) add(side, key + side * stride + column, column);
      }
      if (whole == width) return;
#pragma GCC unroll 3
      for (int side = 0; side < kPositions; ++side) {
        Element rest[kHalfPanel] = {};
        std::copy(key + side * stride + whole, key + side * stride + width, rest);
        add(side, rest, whole);
      }
    }

    template <int kCount, int kPositions>
    [[gnu::noinline]] void tile(std::int64_t head, std::int64_t row, std::int64_t position, float* scores) const {
      const Query* query = queries + row * plan.query_width;
      const Element* keys = at(a.keys, head, position);
      const Element* more = a.more_keys.width > 0 ? at(a.more_keys, head, position) : nullptr;
      if constexpr (kPaired) {
        typename Isa::template DotSums<kCount, kPositions> sum;
        sum.add(query, plan.query_width, keys, a.keys.position, a.keys.width);
        if (more != nullptr) {
          sum.add(query + plan.first_width, plan.query_width, more, a.more_keys.position, a.more_keys.width);
        }
        sum.store(scores, kBlock, a.scale);
      } else {
        Lane sum[kPositions][kCount];
        multiply<kCount, kPositions>(a.keys, keys, query, sum);
        if (more != nullptr) multiply<kCount, kPositions>(a.more_keys, more, query + plan.first_width, sum);
#pragma GCC unroll 3
        for (int side = 0; side < kPositions; ++side) {
#pragma GCC unroll 8
          for (int each = 0; each < kCount; ++each) scores[each * kBlock + side] = sum[side][each].value.sum();
        }
      }
    }

    // The weights of a row as bf16, in the place of its scores.
    static bf16* weights_of(float* scores) { return reinterpret_cast<bf16*>(scores); }
    static const bf16* weights_of(const float* scores) { return reinterpret_cast<const bf16*>(scores); }

    // Marks the positions that a row does not see, and those beyond the block.
    void hide(std::int64_t head, std::int64_t row, std::int64_t block, std::int64_t length, float* scores) const {
      const std::int64_t token = row % a.tokens;
      std::fill(scores + length, scores + round_up(length, kHalfPanel), kUnseen);
      if (a.mask != nullptr) {
        const std::uint8_t* seen = a.mask + head / a.key_heads * a.mask_batch + token * a.mask_token + block;
        for (std::int64_t each = 0; each < length; ++each) scores[each] = seen[each] != 0 ? scores[each] : kUnseen;
        return;
      }
      const std::int64_t last = a.positions - a.tokens + token;
      for (std::int64_t each = std::max<std::int64_t>(0, last + 1 - block); each < length; ++each) {
        scores[each] = kUnseen;
      }
    }

    // Of scores up to whole lanes; side by side, since one chain of comparisons would wait for its own latency.
    static float greatest_of(const float* scores, std::int64_t length) {
      float found[kHalfPanel];
      std::fill(found, found + kHalfPanel, kUnseen);
      for (std::int64_t each = 0; each < length; each += kHalfPanel) {
        for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) {
          found[lane] = found[lane] < scores[each + lane] ? scores[each + lane] : found[lane];
        }
      }
      return *std::max_element(found, found + kHalfPanel);
    }

    // Turns the scores of a row into exp(score - greatest), and what it has added so far to that of the new greatest.
    void exponentiate(std::int64_t length, float* scores, Sums& sum, float* added) const {
      const float greatest = std::max(sum.greatest, greatest_of(scores, length));
      if (greatest > sum.greatest) {
        const float factor = std::exp(sum.greatest - greatest);
        sum.total *= factor;
        const Lanes scale(factor);
        for (std::int64_t each = 0; each < plan.value_width; each += kHalfPanel) {
          (Lanes::load(added + each) * scale).store(added + each);
        }
        sum.greatest = greatest;
      }
      Lanes total(0.0f);
      const Lanes shift(greatest);
      for (std::int64_t each = 0; each < length; each += kHalfPanel) {
        const Lanes score = Lanes::load(scores + each);
        const Lanes weight = zero_up_to(0.5f * kUnseen, score, exp(score - shift));
        if constexpr (kPaired) {
          weight.to_elements(weights_of(scores) + each);  // over scores that were read
        } else {
          weight.store(scores + each);
        }
        total = total + weight;
      }
      sum.total += total.sum();
    }

    void add_values(std::int64_t head, std::int64_t count, std::int64_t block, std::int64_t length,
                    const float* weights, float* added) const {
      by_rows(count, [&]<int kCount>(std::int64_t each, Rows<kCount>) {
        value_rows<kCount>(head, block, length, weights + each * kBlock, added + each * plan.value_width);
      });
    }

    template <int kCount>
    void value_rows(std::int64_t head, std::int64_t block, std::int64_t length, const float* weights,
                    float* added) const {
      std::int64_t column = 0;
      if constexpr (kPaired) {
        for (; column < a.values.width; column += kUnit) {
          value_pairs<kCount>(head, block, length, column, weights_of(weights), added + column);
        }
        return;
      }
      for (; column + kSides * kHalfPanel <= a.values.width; column += kSides * kHalfPanel) {
        value_tile<kCount, kSides>(head, block, length, column, weights, added);
      }
      for (; column < a.values.width; column += kHalfPanel) {
        value_tile<kCount, 1>(head, block, length, column, weights, added);
      }
    }

    template <int kCount>
    [[gnu::noinline]] void value_pairs(std::int64_t head, std::int64_t block, std::int64_t length, std::int64_t column,
                                       const bf16* weights, float* added) const {
      typename Isa::template WeightedSums<kCount> sum(added, plan.value_width);
      constexpr std::int64_t kWeightStride = kBlock * sizeof(float) / sizeof(bf16);
      const Element* value = at(a.values, head, block) + column;
      sum.add(weights, kWeightStride, value, a.values.position, length, a.values.width - column);
      sum.store(added, plan.value_width);
    }

    template <int kCount, int kWide>
    [[gnu::noinline]] void value_tile(std::int64_t head, std::int64_t block, std::int64_t length, std::int64_t column,
                                      const float* weights, float* added) const {
      Lane sum[kWide][kCount];
#pragma GCC unroll 3
      for (int wide = 0; wide < kWide; ++wide) {
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          sum[wide][each].value = Lanes::load(added + each * plan.value_width + column + wide * kHalfPanel);
        }
      }
      const Element* value = at(a.values, head, block) + column;
      const std::int64_t stride = a.values.position, left = a.values.width - column;
      const auto add = [&](int wide, const Element* from, std::int64_t position) {
        const Lanes values_of = widened<Lanes>(from);
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          Lanes& total = sum[wide][each].value;
          total = fused_multiply_add(values_of, Lanes(weights[each * kBlock + position]), total);
        }
      };
      if (left >= kWide * kHalfPanel) {
        for (std::int64_t position = 0; position < length; ++position, value += stride) {
#pragma GCC unroll 3
          for (int wide = 0; wide < kWide; ++wide) add(wide, value + wide * kHalfPanel, position);
        }
      } else {
        for (std::int64_t position = 0; position < length; ++position, value += stride) {
          Element rest[kHalfPanel] = {};
          std::copy(value, value + left, rest);
          add(0, rest, position);
        }
      }
#pragma GCC unroll 3
      for (int wide = 0; wide < kWide; ++wide) {
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          sum[wide][each].value.store(added + each * plan.value_width + column + wide * kHalfPanel);
        }
      }
    }

    // The stretches of one row, in their order.
    void put_together(std::int64_t row) const {
      const std::int64_t head = row / plan.rows, of_head = row % plan.rows;
      const std::int64_t query_head = head % a.key_heads * a.group + of_head / a.tokens;
      float greatest = a.sinks == nullptr ? kUnseen : a.sinks[query_head];
      for (std::int64_t each = 0; each < plan.stretches; ++each) {
        greatest = std::max(greatest, sums[each * plan.all_rows + row].greatest);
      }
      float total = a.sinks == nullptr ? 0.0f : std::exp(a.sinks[query_head] - greatest);
      float* whole = values + row * plan.value_width;  // of the first stretch
      for (std::int64_t each = 0; each < plan.stretches; ++each) {
        const Sums& sum = sums[each * plan.all_rows + row];
        const float factor = std::exp(sum.greatest - greatest);
        const Lanes scale(factor);
        total += sum.total * factor;
        const float* from = values + (each * plan.all_rows + row) * plan.value_width;
        for (std::int64_t column = 0; column < plan.value_width; column += kHalfPanel) {
          const Lanes scaled = Lanes::load(from + column) * scale;
          (each == 0 ? scaled : Lanes::load(whole + column) + scaled).store(whole + column);
        }
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      const std::int64_t batch = head / a.key_heads, token = of_head % a.tokens;
      Element* out = static_cast<Element*>(a.out) +
                     ((batch * a.tokens + token) * a.key_heads * a.group + query_head) * a.values.width;
      for (std::int64_t column = 0; column < a.values.width; ++column) {
        out[column] = narrowed<Element>(whole[column] * inverse);
      }
    }
  };
};

}  // namespace ktc
