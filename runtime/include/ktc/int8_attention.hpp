// Attention of a few new tokens over a cache of codes: signed bytes with a scale for each position and head, and the
// codes of new keys and values. A number is code * scale.
//
// Nothing is decoded. A query becomes words, round(q * 16383 / largest), and its products with codes are sums of
// integers; the scale of a key is applied to its score. The weights of a block, times the scales of their values, are
// rounded to 15 bits of the largest, and their products with codes are sums of integers too. So the errors beyond those
// of the cache are 2^-15 of a query's largest number and 2^-16 of a block's largest weight. Every instruction set
// computes the same sums. Splits are those of `decode_attention.hpp`.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "ktc/attention_plan.hpp"
#include "ktc/cache_code_products.hpp"
#include "ktc/cache_view.hpp"
#include "ktc/concepts.hpp"
#include "ktc/element.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/tile_sizes.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <class Kernel>
std::unique_ptr<Int8AttentionKernel> make_int8_attention() {
  return std::make_unique<Kernel>();
}

template <InstructionSet Isa, class Element>
class Int8Attention final : public Int8AttentionKernel {
  using Lanes = typename Isa::Lanes;
  using Products = CacheCodeProducts<Isa>;
  using Plan = AttentionPlan<Isa, Products::kUnit>;
  using Item = typename Plan::Item;
  using Sums = typename Plan::Sums;
  static constexpr std::int64_t kBlock = Plan::kBlock;
  static constexpr std::int64_t kMostRows = Plan::kMostRows;

 public:
  // `scales` of keys and values is not null; `chosen` is.
  void forward(Engine& engine, const AttentionArguments& arguments) const override {
    const Plan plan(arguments);
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      Region<std::int16_t> queries(plan.all_rows * plan.query_width);
      Region<float> factors(plan.all_rows * 2);
      Region<float> numbers(plan.query_width);
      Region<Sums> sums(plan.all_rows * plan.splits);
      Region<float> values(plan.all_rows * plan.splits * plan.value_width);
      Region<Scratch> scratch(team.threads());
      workspace.lay_out(queries, factors, numbers, sums, values, scratch);
      encode_queries(arguments, plan, numbers.data(), queries.data(), factors.data());
      const Call call{arguments, plan, queries.data(), factors.data(), sums.data(), values.data()};
      std::atomic<std::int64_t> next{0};
      std::atomic<std::int64_t> next_row{0};
      team.run([&](const Worker& worker) {
        Scratch& scratch_of_worker = scratch.data()[worker.index];
        typename Ahead::Order order(Plan::template head_views<std::int8_t>(arguments, 0));
        Ahead ahead(order);
        const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
        plan.template for_each_split<std::int8_t>(
            arguments, take, ahead, [&](const Item& item) { call.split(item, scratch_of_worker, ahead); });
        worker.barrier.arrive_and_wait();
        plan.template combine<Element>(arguments, sums.data(), values.data(), next_row,
                                       [](std::int64_t column) { return Products::place(column); });
      });
    });
  }

  // codes = round(row * (127 / largest)), scale = largest / 127. A row whose largest magnitude is below 2^-100 is zero,
  // since the factor might not be finite. A row with an infinity or a NaN has the scale NaN and codes of 0.
  void quantise(const QuantiseArguments& arguments) const override {
    const std::int64_t width = arguments.codes.width;
    std::vector<float> numbers(static_cast<std::size_t>(round_up(width, kHalfPanel)));
    std::vector<std::uint8_t> shifted(numbers.size());
    for (std::int64_t batch = 0; batch < arguments.batch; ++batch) {
      for (std::int64_t head = 0; head < arguments.heads; ++head) {
        for (std::int64_t token = 0; token < arguments.tokens; ++token) {
          const auto* row = static_cast<const Element*>(arguments.rows) + batch * arguments.batch_stride +
                            head * arguments.head_stride + token * arguments.token_stride;
          const CacheView& to = arguments.codes;
          auto* codes = static_cast<std::int8_t*>(const_cast<void*>(to.data)) + batch * to.batch + head * to.head +
                        token * to.position;
          auto* scale =
              const_cast<float*>(to.scales) + batch * to.scale_batch + head * to.scale_head + token * to.scale_position;
          std::transform(row, row + width, numbers.data(), [](Element value) { return static_cast<float>(value); });
          *scale = quantised(numbers, shifted);
          std::transform(shifted.data(), shifted.data() + width, codes,
                         [](std::uint8_t code) { return static_cast<std::int8_t>(code ^ 0x80); });
        }
      }
    }
  }

 private:
  using Ahead = CacheAhead<std::int8_t, kBlock>;
  static constexpr float kLeast = 0x1p-100f;

  // The memory of one worker.
  struct Scratch {
    float scores[kMostRows][kBlock];
    float more_scores[kMostRows][kBlock];
    std::int16_t weights[kMostRows][kBlock];
    float factors[kMostRows];
    float key_scales[kBlock];
    float more_scales[kBlock];
    float value_scales[kBlock];
  };

  static float largest_of(const float* numbers, std::int64_t count) {
    Lanes largest(0.0f);
    for (std::int64_t at = 0; at < count; at += kHalfPanel) {
      largest = greater(largest, absolute(Lanes::load(numbers + at)));
    }
    return largest.greatest();
  }

  // Zeros follow the row in `numbers`.
  static float quantised(const std::vector<float>& numbers, std::vector<std::uint8_t>& shifted) {
    const auto count = static_cast<std::int64_t>(numbers.size());
    const float largest = largest_of(numbers.data(), count);
    const bool finite = largest <= std::numeric_limits<float>::max();
    if (!finite || largest < kLeast) {
      std::fill(shifted.begin(), shifted.end(), std::uint8_t{0x80});
      return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    const Lanes inverse(127.0f / largest);
    for (std::int64_t at = 0; at < count; at += kHalfPanel) {
      (Lanes::load(numbers.data() + at) * inverse).to_codes(shifted.data() + at);
    }
    return largest / 127.0f;
  }

  static void encode_queries(const AttentionArguments& a, const Plan& plan, float* numbers, std::int16_t* codes,
                             float* factors) {
    const auto* from = static_cast<const Element*>(a.query);
    for (std::int64_t row = 0; row < plan.all_rows; ++row, codes += plan.query_width, factors += 2) {
      factors[0] = encode(from, a.keys.width, a.scale, numbers, codes);
      from += a.keys.width;
      factors[1] = encode(from, a.more_keys.width, a.scale, numbers, codes + plan.first_width);
      from += a.more_keys.width;
    }
  }

  // Encodes a part of a query as words, and returns the factor that its products with codes are multiplied by.
  static float encode(const Element* from, std::int64_t width, float scale, float* numbers, std::int16_t* codes) {
    const std::int64_t whole = round_up(width, Products::kUnit);
    std::transform(from, from + width, numbers, [](Element value) { return static_cast<float>(value); });
    std::fill(numbers + width, numbers + whole, 0.0f);
    const float largest = largest_of(numbers, whole);
    const bool finite = largest <= std::numeric_limits<float>::max();
    if (!finite || largest < kLeast) {
      std::fill(codes, codes + whole, std::int16_t{0});
      return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    }
    const auto most = static_cast<float>(width <= kCodeColumns ? kQueryCode : kQueryCode * kCodeColumns / width);
    Products::to_codes(numbers, most / largest, whole, codes);
    return largest / most * scale;
  }

  struct Call {
    const AttentionArguments& a;
    const Plan& plan;
    const std::int16_t* queries;
    const float* query_factors;  // of both parts
    Sums* sums;
    float* values;

    void split(const Item& item, Scratch& scratch, Ahead& ahead) const {
      const HeadViews views = Plan::template head_views<std::int8_t>(a, item.head);
      const std::int64_t first = item.head * plan.rows + item.first;
      Sums* const of_rows = sums + plan.row_of(item);
      float* const added = values + plan.row_of(item) * plan.value_width;
      std::fill(of_rows, of_rows + item.count, Sums{Plan::kUnseen, 0.0f});
      std::fill(added, added + item.count * plan.value_width, 0.0f);
      for (std::int64_t block = item.begin; block < item.end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, item.end - block);
        const HeadViews here = views.of_block<std::int8_t>(block);
        ahead.start_block(length, block_work(item.count, length));
        score(here.keys, first, 0, item.count, length, scratch.scores, scratch.key_scales, ahead);
        if (views.more_keys.width > 0) {
          score(here.more_keys, first, 1, item.count, length, scratch.more_scores, scratch.more_scales, ahead);
        }
        load_scales(here.values, length, scratch.value_scales);
        for (std::int64_t row = 0; row < item.count; ++row) {
          scale(first + row, length, scratch, row);
          Plan::hide(a, item.head, item.first + row, block, length, scratch.scores[row]);
          weigh(length, scratch, row, of_rows[row], added + row * plan.value_width, ahead);
        }
        add_values(here.values, item.count, length, scratch, added, ahead);
      }
    }

    // Estimates of work in instructions.
    std::int64_t tile_work(std::int64_t rows, std::int64_t positions, std::int64_t width) const {
      return rows * positions * (width / Products::kUnit * 3 / 2 + 6);
    }
    static constexpr std::int64_t kExpWork = 55;  // of kHalfPanel weights
    // Of two positions.
    static constexpr std::int64_t value_work(std::int64_t rows, std::int64_t units) { return (2 * rows + 4) * units; }
    std::int64_t block_work(std::int64_t rows, std::int64_t positions) const {
      const std::int64_t tiles = (rows + Products::kRows - 1) / Products::kRows;
      return tile_work(rows, positions, plan.query_width) +
             rows * (round_up(positions, kHalfPanel) / kHalfPanel) * kExpWork +
             (positions + 1) / 2 * value_work(rows + 2 * (tiles - 1), plan.value_width / Products::kUnit);
    }

    static const std::int8_t* at(const CacheView& view, std::int64_t position) {
      return static_cast<const std::int8_t*>(view.data) + position * view.position;
    }

    // The scales of a block, zeros after them.
    static void load_scales(const CacheView& view, std::int64_t length, float* scales) {
      if (view.scale_position == 1) {
        std::copy_n(view.scales, length, scales);
      } else {
        for (std::int64_t position = 0; position < length; ++position)
          scales[position] = view.scales[position * view.scale_position];
      }
      std::fill(scales + length, scales + round_up(length, kHalfPanel), 0.0f);
    }

    // Products of one part of the queries with the codes of a block.
    void score(const CacheView& view, std::int64_t first_row, int part, std::int64_t count, std::int64_t length,
               float (*scores)[kBlock], float* scales, Ahead& ahead) const {
      load_scales(view, length, scales);
      const std::int16_t* query = queries + first_row * plan.query_width + part * plan.first_width;
      by_rows<Products::kRows, 2, 1>(count, [&]<int kCount>(std::int64_t row, TileSize<kCount>) {
        constexpr int kSides = Products::kSides;
        const auto tile = [&]<int kWide>(std::int64_t position, TileSize<kWide>) {
          Products::template dots<kCount, kWide>(query + row * plan.query_width, plan.query_width, at(view, position),
                                                 view.position, view.width, &scores[row][position], kBlock);
        };
        std::int64_t position = 0;
        for (; position + kSides <= length; position += kSides) {
          ahead.step(tile_work(kCount, kSides, round_up(view.width, Products::kUnit)));
          tile(position, TileSize<kSides>{});
        }
        for (; position < length; ++position) tile(position, TileSize<1>{});
      });
    }

    // Scales the products of a row to scores.
    // `query` is the row among those of all heads.
    void scale(std::int64_t query, std::int64_t length, Scratch& scratch, std::int64_t row) const {
      const Lanes factor(query_factors[2 * query]), more_factor(query_factors[2 * query + 1]);
      float* const scores = scratch.scores[row];
      for (std::int64_t at = 0; at < length; at += kHalfPanel) {
        Lanes score = Lanes::load(scores + at) * (factor * Lanes::load(scratch.key_scales + at));
        if (a.more_keys.width > 0) {
          const Lanes more = more_factor * Lanes::load(scratch.more_scales + at);
          score = fused_multiply_add(Lanes::load(scratch.more_scores[row] + at), more, score);
        }
        score.store(scores + at);
      }
    }

    // Turns the scores of a row into codes of exp(score - greatest) times the scale of the value.
    void weigh(std::int64_t length, Scratch& scratch, std::int64_t row, Sums& sum, float* added, Ahead& ahead) const {
      float* const scores = scratch.scores[row];
      const float greatest = plan.raise(scores, length, sum, {added}), zero = Plan::without_weight(greatest);
      const Lanes shift(greatest);
      Lanes total(0.0f), most(0.0f), all(0.0f);
      for (std::int64_t at = 0; at < length; at += kHalfPanel) {
        ahead.step(kExpWork);
        const Lanes score = Lanes::load(scores + at);
        const Lanes weight = zero_up_to(zero, score, exp(score - shift));
        total = total + weight;
        const Lanes scaled = weight * Lanes::load(scratch.value_scales + at);
        scaled.store(scores + at);
        most = greater(most, scaled);
      }
      sum.total += total.sum();
      const float largest = most.greatest();
      const bool finite = largest <= std::numeric_limits<float>::max();
      std::int16_t* const weights = scratch.weights[row];
      if (!finite || largest < kLeast) {
        std::fill(weights, weights + kBlock, std::int16_t{0});
        scratch.factors[row] = finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
        return;
      }
      scratch.factors[row] = largest / kWeightCode;
      Products::to_codes(scores, kWeightCode / largest, round_up(length, kHalfPanel), weights);
    }

    void add_values(const CacheView& view, std::int64_t count, std::int64_t length, const Scratch& scratch,
                    float* added, Ahead& ahead) const {
      by_rows<Products::kRows, 2, 1>(count, [&]<int kCount>(std::int64_t row, TileSize<kCount>) {
        std::int64_t column = 0;
        const auto units = [&]<int kUnits>(TileSize<kUnits>) {
          for (; column + kUnits * Products::kUnit <= plan.value_width; column += kUnits * Products::kUnit) {
            Products::template add_rows<kCount, kUnits>(scratch.weights[row], kBlock, at(view, 0) + column,
                                                        view.position, length, view.width - column,
                                                        scratch.factors + row, added + row * plan.value_width + column,
                                                        plan.value_width, ahead, value_work(kCount, kUnits));
          }
        };
        units(TileSize<Products::kWide>{});
        if constexpr (Products::kWide > 1) units(TileSize<1>{});
      });
    }
  };
};

}  // namespace ktc::inline KTC_UNIT
