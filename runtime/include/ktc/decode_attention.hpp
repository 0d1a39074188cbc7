// Attention of a few new tokens over a cache: out = softmax(scale q K^T) V, without a tensor of scores or of expanded
// keys in memory. Positions are cut into splits, each of which keeps its own greatest score, sum and weighted sum of
// values (Flash-Decoding, Dao et al. 2023); they are combined in order. A split's length depends on the
// numbers of positions and of key heads alone, so the number of threads changes no bit.
//
// Keys may be in two parts, and values may be the first of them. So latent attention (MLA) reads latents once, as keys
// and as values, and rotary keys besides, with all heads as rows of one key head. Sums are fp32.
//
// With lists of positions, the softmax is over these alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "ktc/attention_plan.hpp"
#include "ktc/cache_view.hpp"
#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/lane_dots.hpp"
#include "ktc/linear.hpp"
#include "ktc/listed_rows.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/tile_sizes.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, class Element>
class DecodeAttention final : public AttentionKernel {
  using Lanes = typename Isa::Lanes;
  // Products of bf16 as it is stored, where the instruction set has them; otherwise products of fp32.
  using Query = typename Isa::template DotSums<Element, 1, 1>::Query;
  static constexpr bool kPaired = std::is_same_v<Query, bf16>;
  using Weight = Query;
  static constexpr std::int64_t kUnit = kPaired ? 32 : kHalfPanel;  // to which widths are filled up
  using Plan = AttentionPlan<Isa, kUnit>;
  using Item = typename Plan::Item;
  using Sums = typename Plan::Sums;
  static constexpr std::int64_t kBlock = Plan::kBlock;
  static constexpr std::int64_t kMostRows = Plan::kMostRows;

 public:
  void forward(Engine& engine, const AttentionArguments& arguments) const override {
    const Plan plan(arguments);
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      Region<Query> queries(plan.all_rows * plan.query_width);
      Region<Sums> sums(plan.all_rows * plan.splits);
      Region<float> values(plan.all_rows * plan.splits * plan.value_width);
      Region<float> scores(team.threads() * kMostRows * kBlock);
      workspace.lay_out(queries, sums, values, scores);
      widen(arguments, plan, queries.data());
      const Call call{arguments, plan, queries.data(), sums.data(), values.data()};
      std::atomic<std::int64_t> next{0};
      std::atomic<std::int64_t> next_row{0};
      team.run([&](const Worker& worker) {
        float* scores_of_worker = scores.data() + worker.index * kMostRows * kBlock;
        const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
        if (arguments.chosen == nullptr) {
          call.splits(take, scores_of_worker);
        } else {
          call.chosen_splits(take, scores_of_worker);
        }
        worker.barrier.arrive_and_wait();
        plan.template combine<Element>(arguments, sums.data(), values.data(), next_row, std::identity{});
      });
    });
  }

 private:
  // The sizes of a tile of sums in registers: kRows rows, by kSides positions of scores or kWide vectors of kUnit
  // values. An instruction set whose micro-kernel takes fewer than 12 rows has 16 registers, and its Lanes take two
  // each. Scores then have 8 or 12 sums, and 16 to 24 in 32 registers.
  static constexpr bool kManyRegisters = Isa::kMaxRows >= 12;
  static constexpr int kRows = kPaired ? 6 : kManyRegisters ? 8 : 4;
  template <int kCount>
  static constexpr int kSides = kPaired || kCount <= 2 || (kManyRegisters && kCount <= 4) ? 4 : 3;
  template <int kCount>
  static constexpr int kWide = kPaired          ? 2
                               : kManyRegisters ? 3
                               : kCount > 2     ? 1
                                                : 2;

  using Ahead = CacheAhead<Element, kBlock>;
  using Chosen = ListedRows<Element>;
  using ChosenAhead = ListedAhead<Element>;

  // Widens queries. Those in fp32 are scaled here: a sum that is finite when scaled then does not overflow. Zeros
  // follow each part.
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

  // The keys and values of a block of positions.
  template <class RowsOf>
  struct Block {
    RowsOf keys;
    RowsOf more_keys;
    RowsOf values;
  };

  // The queries of an item's rows, and the running sums of its split for each of them.
  struct Rows {
    const Query* queries;
    std::int64_t count;
    Sums* sums;
    float* added;
  };

  struct Call {
    const AttentionArguments& a;
    const Plan& plan;
    const Query* queries;
    Sums* sums;
    float* values;

    template <class Take>
    void splits(const Take& take, float* scores) const {
      typename Ahead::Order order(Plan::template head_views<Element>(a, 0));
      Ahead ahead(order);
      plan.template for_each_split<Element>(a, take, ahead, [&](const Item& item) { split(item, scores, ahead); });
    }

    void split(const Item& item, float* scores, Ahead& ahead) const {
      const HeadViews views = Plan::template head_views<Element>(a, item.head);
      const Rows rows = started(item);
      for (std::int64_t block = item.begin; block < item.end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, item.end - block);
        const HeadViews of_block = views.of_block<Element>(block);
        using Near = AdjoiningRows<Element>;
        const Block<Near> rows_of_block{Near::of(of_block.keys), Near::of(of_block.more_keys),
                                        Near::of(of_block.values)};
        ahead.start_block(length, block_work(item.count, length));
        attend(rows_of_block, rows, length, scores, ahead, [&](std::int64_t row, float* of_row) {
          Plan::hide(a, item.head, item.first + row, block, length, of_row);
        });
      }
    }

    // The same for chosen positions.
    template <class Take>
    void chosen_splits(const Take& take, float* scores) const {
      for (std::int64_t item = take(); item < plan.items; item = take()) {
        chosen_split(Item(item, plan, a), scores);
      }
    }

    HeadViews views_of_chosen(std::int64_t head) const {
      const std::int64_t sequence = head / a.key_heads / a.sequences, key_head = head % a.key_heads / a.choosers;
      const auto of_head = [&](CacheView view) {
        if (view.data != nullptr) {
          view.data = static_cast<const Element*>(view.data) + sequence * view.batch + key_head * view.head;
        }
        return view;
      };
      return {of_head(a.keys), of_head(a.more_keys), of_head(a.values)};
    }

    void chosen_split(const Item& item, float* scores) const {
      const HeadViews cache = views_of_chosen(item.head);
      const std::int32_t* list = a.chosen + item.head * a.positions;
      const std::int64_t count = a.counts[item.head], end = std::min(item.end, count);
      ChosenAhead ahead(a.keys.width + a.more_keys.width);
      const Rows rows = started(item);
      for (std::int64_t block = item.begin; block < end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, end - block);
        const auto rows_of = [&](const CacheView& view) {
          return Chosen{static_cast<const Element*>(view.data), view.position, list + block, count - block};
        };
        const Block<Chosen> rows_of_block{rows_of(cache.keys), rows_of(cache.more_keys), rows_of(cache.values)};
        attend(rows_of_block, rows, length, scores, ahead,
               [&](std::int64_t, float* of_row) { Plan::fill_up(length, of_row); });
      }
    }

    // Adds a block to the running sums of some rows. `hide` masks scores of a row.
    template <class RowsOf, class AnyAhead, class Hide>
    void attend(const Block<RowsOf>& block, const Rows& rows, std::int64_t length, float* scores, AnyAhead& ahead,
                const Hide& hide) const {
      score(block, rows, length, scores, ahead);
      for (std::int64_t row = 0; row < rows.count; ++row) {
        hide(row, scores + row * kBlock);
        exponentiate(length, scores + row * kBlock, rows.sums[row], rows.added + row * plan.value_width, ahead);
      }
      add_values(block, rows, length, scores, ahead);
    }

    Rows started(const Item& item) const {
      const std::int64_t row = item.head * plan.rows + item.first, of_split = plan.row_of(item);
      const Rows rows{queries + row * plan.query_width, item.count, sums + of_split,
                      values + of_split * plan.value_width};
      std::fill(rows.sums, rows.sums + rows.count, Sums{Plan::kUnseen, 0.0f});
      std::fill(rows.added, rows.added + rows.count * plan.value_width, 0.0f);
      return rows;
    }

    // Estimates of work in instructions: products, loads, and sums over lanes.
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

    template <class RowsOf, class AnyAhead>
    void score(const Block<RowsOf>& block, const Rows& rows, std::int64_t length, float* scores,
               AnyAhead& ahead) const {
      by_rows<kRows, 4, 2, 1>(rows.count, [&]<int kCount>(std::int64_t row, TileSize<kCount>) {
        ahead.from_memory(row == 0);
        row_tile<kCount>(block, rows.queries + row * plan.query_width, length, scores + row * kBlock, ahead);
      });
    }

    template <int kCount, class RowsOf, class AnyAhead>
    void row_tile(const Block<RowsOf>& block, const Query* query, std::int64_t length, float* scores,
                  AnyAhead& ahead) const {
      std::int64_t position = 0;
      const auto tiles = [&]<int kTogether>(TileSize<kTogether>) {
        for (; position + kTogether <= length; position += kTogether) {
          ahead.step(tile_work(kCount, kTogether));
          ahead.template fetch<kTogether>(block.keys, position, 0, a.keys.width);
          if (a.more_keys.width > 0) ahead.template fetch<kTogether>(block.more_keys, position, 0, a.more_keys.width);
          tile<kCount, kTogether>(block, query, position, scores + position);
        }
      };
      tiles(TileSize<kSides<kCount>>{});
      if constexpr (kSides<kCount> == 3) tiles(TileSize<2>{});  // kBlock is not a multiple of 3
      tiles(TileSize<1>{});
    }

    template <int kCount, int kPositions, class RowsOf>
    [[gnu::noinline]] void tile(const Block<RowsOf>& block, const Query* query, std::int64_t position,
                                float* scores) const {
      typename Isa::template DotSums<Element, kCount, kPositions> sums;
      sums.add(query, plan.query_width, block.keys.from(position), a.keys.width);
      if (a.more_keys.width > 0) {
        sums.add(query + plan.first_width, plan.query_width, block.more_keys.from(position), a.more_keys.width);
      }
      if constexpr (kPaired) {
        sums.store(scores, kBlock, a.scale);
      } else {
        sums.store(scores, kBlock);
      }
    }

    // The weights of a row as bf16, stored over its scores.
    static bf16* weights_of(float* scores) { return reinterpret_cast<bf16*>(scores); }
    static const bf16* weights_of(const float* scores) { return reinterpret_cast<const bf16*>(scores); }

    template <class AnyAhead>
    void exponentiate(std::int64_t length, float* scores, Sums& sum, float* added, AnyAhead& ahead) const {
      plan.template exponentiate<Weight>(length, scores, sum, {added}, [&] { ahead.step(kExpWork); });
    }

    template <class RowsOf, class AnyAhead>
    void add_values(const Block<RowsOf>& block, const Rows& rows, std::int64_t length, const float* weights,
                    AnyAhead& ahead) const {
      by_rows<kRows, 4, 2, 1>(rows.count, [&]<int kCount>(std::int64_t row, TileSize<kCount>) {
        ahead.from_memory(row == 0 && block.values.data != block.keys.data);
        value_rows<kCount>(block.values, length, weights + row * kBlock, rows.added + row * plan.value_width, ahead);
      });
    }

    template <int kCount, class RowsOf, class AnyAhead>
    void value_rows(const RowsOf& of_values, std::int64_t length, const float* weights, float* added,
                    AnyAhead& ahead) const {
      std::int64_t column = 0;
      const auto columns = [&]<int kUnits>(TileSize<kUnits>) {
        for (; column + kUnits * kUnit <= plan.value_width; column += kUnits * kUnit) {
          if constexpr (kPaired) {
            value_pairs<kCount, kUnits>(of_values, length, column, weights_of(weights), added + column, ahead);
          } else if (column + kUnits * kUnit <= a.values.width) {
            value_tile<kCount, kUnits, true>(of_values, length, column, weights, added + column, ahead);
          } else {
            value_tile<kCount, kUnits, false>(of_values, length, column, weights, added + column, ahead);
          }
        }
      };
      columns(TileSize<kWide<kCount>>{});
      if constexpr (kWide<kCount> > 2) columns(TileSize<2>{});
      columns(TileSize<1>{});
    }

    template <int kCount, int kUnits, class RowsOf, class AnyAhead>
    [[gnu::noinline]] void value_pairs(const RowsOf& of_values, std::int64_t length, std::int64_t column,
                                       const bf16* weights, float* added, AnyAhead& ahead) const {
      constexpr std::int64_t kWeightStride = kBlock * sizeof(float) / sizeof(bf16);
      typename Isa::template WeightedSums<kCount, kUnits> sum(added, plan.value_width);
      AnyAhead local_ahead =
          ahead;  // a copy: the caller's object has an address, which would keep its members in memory
      sum.add(weights, kWeightStride, of_values, length, column, a.values.width - column, [&](std::int64_t position) {
        local_ahead.step(2 * value_work(kCount, kUnits));
        local_ahead.template fetch<2>(of_values, position, column, std::min(column + kUnits * kUnit, a.values.width));
      });
      ahead = local_ahead;
      sum.store(added, plan.value_width);
    }

    // Vector `unit` of a row with `width` values left, filled up with zeros.
    static Lanes cut(const Element* row, std::int64_t unit, std::int64_t width) {
      Element rest[kHalfPanel] = {};
      const std::int64_t begin = std::min(unit * kHalfPanel, width);
      std::copy(row + begin, row + std::min(begin + kHalfPanel, width), rest);
      return widened<Lanes>(rest);
    }

    // `kWhole`: no column is padding. A variant of its own, since the loop would otherwise compare for every vector.
    template <int kCount, int kUnits, bool kWhole, class RowsOf, class AnyAhead>
    [[gnu::noinline]] void value_tile(const RowsOf& of_values, std::int64_t length, std::int64_t column,
                                      const float* weights, float* added, AnyAhead& ahead) const {
      struct Lane {
        Lanes value{0.0f};
      };
      Lane sum[kUnits][kCount];
#pragma GCC unroll 3
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma GCC unroll 8
        for (int row = 0; row < kCount; ++row) {
          sum[unit][row].value = Lanes::load(added + row * plan.value_width + unit * kHalfPanel);
        }
      }
      const std::int64_t left = a.values.width - column;
      AnyAhead local_ahead = ahead;
      for (std::int64_t position = 0; position < length; ++position) {
        const Element* value = of_values[position] + column;
        local_ahead.step(value_work(kCount, kUnits));
        local_ahead.template fetch<1>(of_values, position, column, std::min(column + kUnits * kUnit, a.values.width));
#pragma GCC unroll 3
        for (int unit = 0; unit < kUnits; ++unit) {
          const Lanes values_of = kWhole ? widened<Lanes>(value + unit * kHalfPanel) : cut(value, unit, left);
#pragma GCC unroll 8
          for (int row = 0; row < kCount; ++row) {
            Lanes& total = sum[unit][row].value;
            total = fused_multiply_add(values_of, Lanes(weights[row * kBlock + position]), total);
          }
        }
      }
      ahead = local_ahead;
#pragma GCC unroll 3
      for (int unit = 0; unit < kUnits; ++unit) {
#pragma GCC unroll 8
        for (int row = 0; row < kCount; ++row) {
          sum[unit][row].value.store(added + row * plan.value_width + unit * kHalfPanel);
        }
      }
    }
  };
};

}  // namespace ktc::inline KTC_UNIT
