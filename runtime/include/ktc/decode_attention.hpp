// Attention of a few new tokens over a cache: out = softmax(scale q K^T) V, without a tensor of scores or of expanded
// keys in memory. Positions are cut into stretches, each of which keeps its own greatest score, sum and weighted sum of
// values (Flash-Decoding, Dao et al. 2023); they are put together in their order. A stretch's length depends on the
// numbers of positions and of key heads alone, so the number of threads changes no bit.
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

#include "ktc/cache_view.hpp"
#include "ktc/element.hpp"
#include "ktc/engine.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"

namespace ktc {

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
        const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
        if (arguments.chosen == nullptr) {
          call.stretches(take, own);
        } else {
          Element* block = gathered.data() + worker.index * plan.gathered;
          for (std::int64_t item = take(); item < plan.items; item = take()) call.chosen_stretch(item, own, block);
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
  // Positions whose scores are computed before their values are added: long runs of one and the other, and joint rows
  // of 576 bf16 stay in L2 between them.
  static constexpr std::int64_t kBlock = 128;
  static constexpr std::int64_t kMostRows = 64;                            // that one worker computes together
  static constexpr std::int64_t kUnit = kPaired ? 32 : kHalfPanel;         // to which widths are filled up
  static constexpr int kRows = kPaired ? 6 : Isa::kMaxRows >= 12 ? 8 : 2;  // of a tile of sums in registers
  static constexpr int kSides = kPaired ? 4 : Isa::kMaxRows >= 12 ? 3 : 2;
  static constexpr int kWide = kPaired ? 2 : kSides;  // times kUnit columns of values
  static constexpr float kUnseen = -1e30f;

  // Of one row and stretch: the greatest score, and the sum of exp(score - greatest).
  struct Sums {
    float greatest;
    float total;
  };

  template <int kCount>
  struct RowTile {};
  template <int kUnits>
  struct WideTile {};

  // Calls `body` for runs of rows, each of the largest number that has sums in registers and is left.
  template <class Body>
  static void by_rows(std::int64_t count, const Body& body) {
    std::int64_t each = 0;
    for (; each + kRows <= count; each += kRows) body(each, RowTile<kRows>{});
    if constexpr (kRows > 4) {
      for (; each + 4 <= count; each += 4) body(each, RowTile<4>{});
    }
    if constexpr (kRows > 2) {
      for (; each + 2 <= count; each += 2) body(each, RowTile<2>{});
    }
    for (; each < count; ++each) body(each, RowTile<1>{});
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
          length(std::max(kBlock * std::clamp<std::int64_t>(a.key_heads / 2, 1, 4),
                          round_up((a.positions + kMostStretches - 1) / kMostStretches, kBlock))),
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

  using Ahead = CacheAhead<Isa, Element, kBlock>;

  // One stretch of positions for up to kMostRows rows of a key head.
  struct Item {
    Item(std::int64_t item, const Plan& plan, std::int64_t positions)
        : stretch(item / plan.row_groups % plan.stretches),
          head(item / (plan.row_groups * plan.stretches)),
          first(item % plan.row_groups * kMostRows),
          count(std::min(kMostRows, plan.rows - first)),
          begin(stretch * plan.length),
          end(std::min(begin + plan.length, positions)) {}

    std::int64_t stretch;
    std::int64_t head;   // of all sequences
    std::int64_t first;  // row of the key head
    std::int64_t count;
    std::int64_t begin;
    std::int64_t end;
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

    // Stretches until `take` has none left; the next one is taken early, so that its first rows are fetched.
    template <class Take>
    void stretches(const Take& take, float* scores) const {
      Ahead ahead(head_views(0).is_joint());
      const auto taken = [&] {
        const std::int64_t found = take();
        if (found < plan.items) {
          const Item item(found, plan, a.positions);
          ahead.follow(head_views(item.head), item.begin, item.end);
        }
        return found;
      };
      for (std::int64_t item = taken(); item < plan.items;) {
        const std::int64_t following = taken();
        stretch(Item(item, plan, a.positions), scores, ahead);
        item = following;
      }
    }

    HeadViews head_views(std::int64_t head) const {
      const auto of_head = [&](CacheView view) {
        if (view.data != nullptr) {
          view.data =
              static_cast<const Element*>(view.data) + head / a.key_heads * view.batch + head % a.key_heads * view.head;
        }
        return view;
      };
      return {of_head(a.keys), of_head(a.more_keys), of_head(a.values)};
    }

    void stretch(const Item& item, float* scores, Ahead& ahead) const {
      const HeadViews views = head_views(item.head);
      const Rows rows = started(item);
      for (std::int64_t block = item.begin; block < item.end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, item.end - block);
        ahead.start_block(length, block_work(item.count, length));
        score(views, rows, block, length, scores, ahead);
        for (std::int64_t each = 0; each < item.count; ++each) {
          hide(item.head, item.first + each, block, length, scores + each * kBlock);
          exponentiate(length, scores + each * kBlock, rows.sums[each], rows.added + each * plan.value_width, ahead);
        }
        add_values(views, rows, block, length, scores, ahead);
      }
    }

    // The same of chosen positions.
    void chosen_stretch(std::int64_t number, float* scores, Element* gathered) const {
      Item item(number, plan, a.positions);
      item.end = std::min<std::int64_t>(item.end, a.counts[item.head]);
      const std::int32_t* chosen = a.chosen + item.head * a.positions;
      const Rows rows = started(item);
      Ahead nothing(false);
      for (std::int64_t block = item.begin; block < item.end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, item.end - block);
        const HeadViews views = gather(item, chosen, block, length, gathered);
        score(views, rows, 0, length, scores, nothing);
        for (std::int64_t each = 0; each < item.count; ++each) {
          fill_up(length, scores + each * kBlock);
          exponentiate(length, scores + each * kBlock, rows.sums[each], rows.added + each * plan.value_width, nothing);
        }
        add_values(views, rows, 0, length, scores, nothing);
      }
    }

    // The queries of an item's rows, and what its stretch has added for each of them.
    struct Rows {
      const Query* queries;
      std::int64_t count;
      Sums* sums;
      float* added;
    };

    Rows started(const Item& item) const {
      const std::int64_t row = item.head * plan.rows + item.first, of_stretch = item.stretch * plan.all_rows + row;
      const Rows rows{queries + row * plan.query_width, item.count, sums + of_stretch,
                      values + of_stretch * plan.value_width};
      std::fill(rows.sums, rows.sums + rows.count, Sums{kUnseen, 0.0f});
      std::fill(rows.added, rows.added + rows.count * plan.value_width, 0.0f);
      return rows;
    }

    // Work in instructions, roughly: products, loads, and adding lanes up.
    std::int64_t tile_work(std::int64_t rows, std::int64_t positions) const {
      return rows * positions * (plan.query_width / kUnit + 3);
    }
    static constexpr std::int64_t kExpWork = 40;  // of kHalfPanel weights
    static constexpr std::int64_t value_work(std::int64_t rows, std::int64_t units) { return (rows + 2) * units; }
    std::int64_t block_work(std::int64_t rows, std::int64_t positions) const {
      const std::int64_t groups = (rows + kRows - 1) / kRows;
      return tile_work(rows, positions) + rows * (round_up(positions, kHalfPanel) / kHalfPanel) * kExpWork +
             positions * value_work(rows + 2 * (groups - 1), plan.value_width / kUnit);
    }

    // Copies the keys and values of a block of chosen positions, and fetches those of the next.
    HeadViews gather(const Item& item, const std::int32_t* chosen, std::int64_t block, std::int64_t length,
                     Element* to) const {
      const std::int64_t batch = item.head / a.key_heads / a.sequences, head = item.head % a.key_heads / a.choosers;
      const auto copy = [&](const CacheView& view) -> CacheView {
        const auto* from = static_cast<const Element*>(view.data) + batch * view.batch + head * view.head;
        const std::int64_t bytes = view.width * static_cast<std::int64_t>(sizeof(Element));
        Element* const begin = to;
        for (std::int64_t each = 0; each < length; ++each, to += view.width) {
          if (const std::int64_t next = block + each + kBlock; next < item.end) {
            const auto* ahead = reinterpret_cast<const char*>(from + chosen[next] * view.position);
            for (std::int64_t line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(ahead + line, 0, 2);
          }
          std::copy_n(from + chosen[block + each] * view.position, view.width, to);
        }
        return {.data = begin, .position = view.width, .width = view.width};
      };
      HeadViews found;
      found.keys = copy(a.keys);
      if (a.more_keys.width > 0) found.more_keys = copy(a.more_keys);
      if (a.values.data == a.keys.data && a.values.position == a.keys.position) {
        found.values = found.keys;
        found.values.width = a.values.width;
      } else {
        found.values = copy(a.values);
      }
      return found;
    }

    static const Element* at(const CacheView& view, std::int64_t position) {
      return static_cast<const Element*>(view.data) + position * view.position;
    }

    void score(const HeadViews& views, const Rows& rows, std::int64_t block, std::int64_t length, float* scores,
               Ahead& ahead) const {
      by_rows(rows.count, [&]<int kCount>(std::int64_t each, RowTile<kCount>) {
        row_tile<kCount>(views, rows.queries + each * plan.query_width, block, length, scores + each * kBlock, ahead);
      });
    }

    template <int kCount>
    void row_tile(const HeadViews& views, const Query* query, std::int64_t block, std::int64_t length, float* scores,
                  Ahead& ahead) const {
      std::int64_t position = 0;
      for (; position + kSides <= length; position += kSides) {
        ahead.step(tile_work(kCount, kSides));
        tile<kCount, kSides>(views, query, block + position, scores + position);
      }
      for (; position < length; ++position) tile<kCount, 1>(views, query, block + position, scores + position);
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
    [[gnu::noinline]] void tile(const HeadViews& views, const Query* query, std::int64_t position,
                                float* scores) const {
      const CacheView &first = views.keys, &second = views.more_keys;
      const Element* keys = at(first, position);
      const Element* more = second.width > 0 ? at(second, position) : nullptr;
      if constexpr (kPaired) {
        typename Isa::template DotSums<kCount, kPositions> sum;
        sum.add(query, plan.query_width, keys, first.position, first.width);
        if (more != nullptr) {
          sum.add(query + plan.first_width, plan.query_width, more, second.position, second.width);
        }
        sum.store(scores, kBlock, a.scale);
      } else {
        Lane sum[kPositions][kCount];
        multiply<kCount, kPositions>(first, keys, query, sum);
        if (more != nullptr) multiply<kCount, kPositions>(second, more, query + plan.first_width, sum);
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

    // Marks the scores beyond a block.
    static void fill_up(std::int64_t length, float* scores) {
      std::fill(scores + length, scores + round_up(length, kHalfPanel), kUnseen);
    }

    // Marks the positions that a row does not see, and those beyond the block.
    void hide(std::int64_t head, std::int64_t row, std::int64_t block, std::int64_t length, float* scores) const {
      const std::int64_t token = row % a.tokens;
      fill_up(length, scores);
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
      for (std::int64_t half = kHalfPanel / 2; half > 0; half /= 2) {
        for (std::int64_t lane = 0; lane < half; ++lane) {
          found[lane] = found[lane] < found[lane + half] ? found[lane + half] : found[lane];
        }
      }
      return found[0];
    }

    // Turns the scores of a row into exp(score - greatest), and what it has added so far to that of the new greatest.
    void exponentiate(std::int64_t length, float* scores, Sums& sum, float* added, Ahead& ahead) const {
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
        ahead.step(kExpWork);
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

    void add_values(const HeadViews& views, const Rows& rows, std::int64_t block, std::int64_t length,
                    const float* weights, Ahead& ahead) const {
      by_rows(rows.count, [&]<int kCount>(std::int64_t each, RowTile<kCount>) {
        value_rows<kCount>(views.values, block, length, weights + each * kBlock, rows.added + each * plan.value_width,
                           ahead);
      });
    }

    template <int kCount>
    void value_rows(const CacheView& view, std::int64_t block, std::int64_t length, const float* weights, float* added,
                    Ahead& ahead) const {
      std::int64_t column = 0;
      const auto columns = [&]<int kWide>(WideTile<kWide>) {
        for (; column + kWide * kUnit <= plan.value_width; column += kWide * kUnit) {
          if constexpr (kPaired) {
            value_pairs<kCount, kWide>(view, block, length, column, weights_of(weights), added + column, ahead);
          } else {
            value_tile<kCount, kWide>(view, block, length, column, weights, added + column, ahead);
          }
        }
      };
      columns(WideTile<kWide>{});
      columns(WideTile<1>{});
    }

    template <int kCount, int kUnits>
    [[gnu::noinline]] void value_pairs(const CacheView& view, std::int64_t block, std::int64_t length,
                                       std::int64_t column, const bf16* weights, float* added, Ahead& ahead) const {
      constexpr std::int64_t kWeightStride = kBlock * sizeof(float) / sizeof(bf16);
      typename Isa::template WeightedSums<kCount, kUnits> sum(added, plan.value_width);
      Ahead own = ahead;  // by value: the address of a caller's object would keep its numbers in memory
      sum.add(weights, kWeightStride, at(view, block) + column, view.position, length, view.width - column,
              [&] { own.step(2 * value_work(kCount, kUnits)); });
      ahead = own;
      sum.store(added, plan.value_width);
    }

    template <int kCount, int kUnits>
    [[gnu::noinline]] void value_tile(const CacheView& view, std::int64_t block, std::int64_t length,
                                      std::int64_t column, const float* weights, float* added, Ahead& ahead) const {
      Lane sum[kUnits][kCount];
#pragma GCC unroll 3
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          sum[unit][each].value = Lanes::load(added + each * plan.value_width + unit * kHalfPanel);
        }
      }
      const Element* value = at(view, block) + column;
      const std::int64_t stride = view.position, left = view.width - column;
      const auto add = [&](int unit, const Element* from, std::int64_t position) {
        const Lanes values_of = widened<Lanes>(from);
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          Lanes& total = sum[unit][each].value;
          total = fused_multiply_add(values_of, Lanes(weights[each * kBlock + position]), total);
        }
      };
      Ahead own = ahead;
      for (std::int64_t position = 0; position < length; ++position, value += stride) {
        own.step(value_work(kCount, kUnits));
#pragma GCC unroll 3
        for (int unit = 0; unit < kUnits; ++unit) {
          if (left >= (unit + 1) * kHalfPanel) {
            add(unit, value + unit * kHalfPanel, position);
          } else {
            Element rest[kHalfPanel] = {};
            std::copy(value + unit * kHalfPanel, value + left, rest);
            add(unit, rest, position);
          }
        }
      }
      ahead = own;
#pragma GCC unroll 3
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma GCC unroll 8
        for (int each = 0; each < kCount; ++each) {
          sum[unit][each].value.store(added + each * plan.value_width + unit * kHalfPanel);
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
