// Decode attention by tiles, for many query heads of one key head, as latent attention has them. A tile of scores has
// 16 positions as its rows, read from the cache as they are stored, and 16 rows of queries as its columns, packed once
// per call. Values are interleaved in pairs of positions, block by block, and weights multiply them.
//
// Few rows would leave the tiles empty: AVX512-BF16 computes them, and widths that are not whole tiles.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "ktc/attention_plan.hpp"
#include "ktc/cache_view.hpp"
#include "ktc/decode_attention.hpp"
#include "ktc/element.hpp"
#include "ktc/engine.hpp"
#include "ktc/isa/amx.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/shape.hpp"

namespace ktc::amx {

// For fewer rows than fill a tile: a type of its own, since it is compiled with other flags.
struct FewRows : avx512_bf16::Isa {};

// Transposes a matrix of 16 x 16 numbers of 32 bits.
[[gnu::always_inline]] inline void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16];
#pragma GCC unroll 8
  for (int row = 0; row < 16; row += 2) {
    pairs[row] = _mm512_unpacklo_epi32(rows[row], rows[row + 1]);
    pairs[row + 1] = _mm512_unpackhi_epi32(rows[row], rows[row + 1]);
  }
  // Four rows of a column follow each other; a register has them of four columns.
#pragma GCC unroll 4
  for (int row = 0; row < 16; row += 4) {
    rows[row] = _mm512_unpacklo_epi64(pairs[row], pairs[row + 2]);
    rows[row + 1] = _mm512_unpackhi_epi64(pairs[row], pairs[row + 2]);
    rows[row + 2] = _mm512_unpacklo_epi64(pairs[row + 1], pairs[row + 3]);
    rows[row + 3] = _mm512_unpackhi_epi64(pairs[row + 1], pairs[row + 3]);
  }
#pragma GCC unroll 4
  for (int column = 0; column < 4; ++column) {
    const __m512i even = _mm512_shuffle_i32x4(rows[column], rows[column + 4], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(rows[column], rows[column + 4], 0xdd);
    const __m512i more_even = _mm512_shuffle_i32x4(rows[column + 8], rows[column + 12], 0x88);
    const __m512i more_odd = _mm512_shuffle_i32x4(rows[column + 8], rows[column + 12], 0xdd);
    rows[column] = _mm512_shuffle_i32x4(even, more_even, 0x88);
    rows[column + 4] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
    rows[column + 8] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
    rows[column + 12] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
}

class Attention final : public AttentionKernel {
  using Lanes = Isa::Lanes;
  static constexpr std::int64_t kDepth = kTileBytes / sizeof(bf16);  // numbers of a row of a tile
  static constexpr std::int64_t kTile = kTileRows * kDepth;
  static constexpr std::int64_t kGroup = 4 * kTileRows;  // positions, or columns of values, in the four tiles of sums
  using Plan = AttentionPlan<Isa, kDepth>;
  using Item = Plan::Item;
  using Sums = Plan::Sums;
  using Ahead = CacheAhead<FewRows, bf16, Plan::kBlock>;
  static constexpr std::int64_t kBlock = Plan::kBlock;
  static constexpr std::int64_t kMostRows = Plan::kMostRows;
  static_assert(kBlock % kGroup == 0 && kMostRows % kTileRows == 0);

 public:
  Attention() { request_tiles(); }

  void forward(Engine& engine, const AttentionArguments& arguments) const override {
    if (!fills_tiles(arguments)) return few_rows_.forward(engine, arguments);
    const Plan plan(arguments);
    engine.exclusively([&](const Team& team, Workspace& workspace) {
      const std::int64_t packed_rows = round_up(plan.rows, kTileRows);
      Region<bf16> queries(arguments.batch * arguments.key_heads * packed_rows * plan.query_width);
      Region<Sums> sums(plan.all_rows * plan.stretches);
      Region<float> values(plan.all_rows * plan.stretches * plan.value_width);
      Region<Scratch> scratch(team.threads());
      Region<float> added(team.threads() * kMostRows * plan.value_width);
      Region<bf16> rest(team.threads() * kGroup * plan.query_width);
      workspace.lay_out(queries, sums, values, scratch, added, rest);
      pack_queries(arguments, plan, packed_rows, queries.data());
      std::atomic<std::int64_t> next{0};
      std::atomic<std::int64_t> next_row{0};
      team.run([&](const Worker& worker) {
        Tiles tiles;
        tiles.shape_for(2 * kTileRows);
        Scratch& own = scratch.data()[worker.index];
        const Call call{arguments,
                        plan,
                        queries.data(),
                        packed_rows,
                        sums.data(),
                        values.data(),
                        own,
                        added.data() + worker.index * kMostRows * plan.value_width,
                        rest.data() + worker.index * kGroup * plan.query_width};
        Ahead::Order order(Plan::head_views<bf16>(arguments, 0));
        Ahead ahead(order);
        const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
        plan.for_each_stretch<bf16>(arguments, take, ahead, [&](const Item& item) { call.stretch(item, ahead); });
        worker.barrier.arrive_and_wait();
        plan.put_together<bf16>(arguments, sums.data(), values.data(), next_row, place);
      });
    });
  }

 private:
  static constexpr std::int64_t kFewRows = 8;

  struct Scratch {
    alignas(64) float scores[kMostRows * kBlock];
    alignas(64) float sums[kGroup * kTileRows];
    alignas(64) bf16 pairs[kBlock * kGroup];
  };

  static bool fills_tiles(const AttentionArguments& a) {
    return a.chosen == nullptr && a.group * a.tokens > kFewRows && a.keys.width % kDepth == 0 &&
           a.more_keys.width % kDepth == 0 && a.values.width % kGroup == 0;
  }

  // Where interleaving puts a column of values: of every eight, the first four come into one tile.
  static std::int64_t place(std::int64_t column) {
    const std::int64_t four = column % kDepth / 4;
    return column / kDepth * kDepth + four % 2 * kHalfPanel + four / 2 * 4 + column % 4;
  }

  // Of each 16 rows tiles of 32 columns: [column / 2][row][2]; zeros after the last row.
  static void pack_queries(const AttentionArguments& a, const Plan& plan, std::int64_t packed_rows, bf16* target) {
    const auto* query = static_cast<const bf16*>(a.query);
    for (std::int64_t head = 0; head < a.batch * a.key_heads; ++head, query += plan.rows * plan.query_width) {
      for (std::int64_t first = 0; first < packed_rows; first += kTileRows) {
        const std::int64_t count = std::min<std::int64_t>(kTileRows, plan.rows - first);
        for (std::int64_t column = 0; column < plan.query_width; column += kDepth, target += kTile) {
          pack_tile(query + first * plan.query_width + column, plan.query_width, count, target);
        }
      }
    }
  }

  static void pack_tile(const bf16* rows, std::int64_t stride, std::int64_t count, bf16* target) {
    __m512i tile[kTileRows];
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      tile[row] = row < count ? _mm512_loadu_si512(rows + row * stride) : _mm512_setzero_si512();
    }
    transpose(tile);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) _mm512_store_si512(target + row * kDepth, tile[row]);
  }

  // scores[row][position] = scale * sums[position][row], of 16 each.
  static void store_scores(const float* sums, float scale, float* scores) {
    __m512i tile[kTileRows];
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) tile[row] = _mm512_load_si512(sums + row * kTileRows);
    transpose(tile);
    const __m512 factor = _mm512_set1_ps(scale);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      _mm512_storeu_ps(scores + row * kBlock, _mm512_mul_ps(_mm512_castsi512_ps(tile[row]), factor));
    }
  }

  struct Call {
    const AttentionArguments& a;
    const Plan& plan;
    const bf16* queries;
    std::int64_t packed_rows;
    Sums* sums;
    float* values;
    Scratch& scratch;
    float* added;
    bf16* rest;

    void stretch(const Item& item, Ahead& ahead) const {
      const HeadViews views = Plan::head_views<bf16>(a, item.head);
      const std::int64_t tiles = (item.count + kTileRows - 1) / kTileRows, of_stretch = plan.row_of(item);
      const bf16* packed = queries + (item.head * packed_rows + item.first) * plan.query_width;
      Sums* of_rows = sums + of_stretch;
      std::fill(of_rows, of_rows + item.count, Sums{Plan::kUnseen, 0.0f});
      std::fill(added, added + tiles * kTileRows * plan.value_width, 0.0f);
      for (std::int64_t block = item.begin; block < item.end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, item.end - block);
        const HeadViews own = views.of_block<bf16>(block);
        ahead.start_block(length, block_work(tiles, item.count, length));
        score(own, packed, tiles, length, ahead);
        weigh(item, block, length, of_rows, ahead);
        add_values(own.values, tiles, length, ahead);
      }
      std::copy_n(added, item.count * plan.value_width, values + of_stretch * plan.value_width);
    }

    // Work in cycles, roughly.
    static constexpr std::int64_t kProducts = 4 * 16;  // of four tiles
    static constexpr std::int64_t kExponentials = 16;  // of kHalfPanel weights
    static constexpr std::int64_t kPair = 8;           // of two rows of kGroup values
    std::int64_t block_work(std::int64_t tiles, std::int64_t rows, std::int64_t length) const {
      const std::int64_t scores = (length + kGroup - 1) / kGroup * tiles * (plan.query_width / kDepth) * kProducts;
      const std::int64_t weights = rows * (round_up(length, kHalfPanel) / kHalfPanel) * kExponentials;
      const std::int64_t steps = (length + kDepth - 1) / kDepth;
      return scores + weights + plan.value_width / kGroup * steps * (tiles * kProducts + kDepth / 2 * kPair);
    }

    // The keys of up to kGroup positions; fewer are copied, since tiles have 16 rows, and followed by zeros.
    CacheView group_of(const CacheView& keys, std::int64_t position, std::int64_t count, bf16* target) const {
      if (keys.width == 0) return keys;
      const auto* from = static_cast<const bf16*>(keys.data) + position * keys.position;
      if (count == kGroup) return {.data = from, .position = keys.position, .width = keys.width};
      for (std::int64_t each = 0; each < count; ++each) {
        std::copy_n(from + each * keys.position, keys.width, target + each * keys.width);
      }
      std::fill(target + count * keys.width, target + kGroup * keys.width, bf16(0.0f));
      return {.data = target, .position = keys.width, .width = keys.width};
    }

    void score(const HeadViews& views, const bf16* packed, std::int64_t tiles, std::int64_t length,
               Ahead& ahead) const {
      for (std::int64_t first = 0; first < length; first += kGroup) {
        const std::int64_t count = std::min(kGroup, length - first);
        const CacheView keys = group_of(views.keys, first, count, rest);
        const CacheView more = group_of(views.more_keys, first, count, rest + kGroup * views.keys.width);
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
          score_group(keys, more, packed + tile * kTileRows * plan.query_width, ahead);
          float* const of_tile = scratch.scores + tile * kTileRows * kBlock + first;
          for (std::int64_t part = 0; part < 4; ++part) {
            store_scores(scratch.sums + part * kTileRows * kTileRows, a.scale, of_tile + part * kTileRows);
          }
        }
      }
    }

    // sums[position][row] of kGroup positions and 16 rows.
    [[gnu::noinline]] void score_group(const CacheView& keys, const CacheView& more, const bf16* packed,
                                       Ahead& ahead) const {
      Ahead own = ahead;
      settle_memory();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (const CacheView* part : {&keys, &more}) {
        const auto* rows = static_cast<const bf16*>(part->data);
        const std::int64_t stride = part->position * static_cast<std::int64_t>(sizeof(bf16));
        const std::int64_t tile = kTileRows * part->position;
        for (std::int64_t column = 0; column < part->width; column += kDepth, packed += kTile, rows += kDepth) {
          own.step(kProducts);
          _tile_loadd(4, packed, kTileBytes);
          _tile_loadd(5, rows, stride);
          _tile_dpbf16ps(0, 5, 4);
          _tile_loadd(6, rows + tile, stride);
          _tile_dpbf16ps(1, 6, 4);
          _tile_loadd(7, rows + 2 * tile, stride);
          _tile_dpbf16ps(2, 7, 4);
          _tile_loadd(5, rows + 3 * tile, stride);
          _tile_dpbf16ps(3, 5, 4);
        }
      }
      zero_operands();
      store_sums(scratch.sums, kTileBytes, kTileRows * kTileRows);
      ahead = own;
    }

    // Zeros need no register (amx.hpp).
    [[gnu::always_inline]] static void zero_operands() {
      _tile_zero(4);
      _tile_zero(5);
      _tile_zero(6);
      _tile_zero(7);
    }

    [[gnu::always_inline]] static void store_sums(float* target, std::int64_t stride, std::int64_t next) {
      _tile_stored(0, target, stride);
      _tile_stored(1, target + next, stride);
      _tile_stored(2, target + 2 * next, stride);
      _tile_stored(3, target + 3 * next, stride);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      settle_memory();
    }

    // Overwrites scores by weights in bf16; rows without queries, and positions up to a whole tile, have 0.
    void weigh(const Item& item, std::int64_t block, std::int64_t length, Sums* of_rows, Ahead& ahead) const {
      const std::int64_t whole = round_up(length, kDepth);
      for (std::int64_t row = 0; row < round_up(item.count, kTileRows); ++row) {
        float* scores = scratch.scores + row * kBlock;
        if (row >= item.count) {
          std::fill(scores, scores + whole / 2, 0.0f);
          continue;
        }
        Plan::hide(a, item.head, item.first + row, block, length, scores);
        const std::int64_t seen = round_up(length, kHalfPanel);
        plan.exponentiate<bf16>(seen, scores, of_rows[row], added + row * plan.value_width,
                                [&] { ahead.step(kExponentials); });
        std::fill(reinterpret_cast<bf16*>(scores) + seen, reinterpret_cast<bf16*>(scores) + whole, bf16(0.0f));
      }
    }

    void add_values(const CacheView& view, std::int64_t tiles, std::int64_t length, Ahead& ahead) const {
      const auto* from = static_cast<const bf16*>(view.data);
      const std::int64_t steps = (length + kDepth - 1) / kDepth;
      for (std::int64_t column = 0; column < plan.value_width; column += kGroup) {
        interleave(from + column, view.position, length, steps, ahead);
        for (std::int64_t tile = 0; tile < tiles; ++tile) {
          add_group(scratch.scores + tile * kTileRows * kBlock, steps,
                    added + tile * kTileRows * plan.value_width + column, ahead);
        }
      }
    }

    // pairs[quarter][step][position / 2][16 columns][2] of kGroup columns.
    void interleave(const bf16* from, std::int64_t stride, std::int64_t length, std::int64_t steps,
                    Ahead& ahead) const {
      Ahead own = ahead;
      const std::int64_t quarter = steps * kTile;
      bf16* target = scratch.pairs;
      for (std::int64_t position = 0; position < steps * kDepth; position += 2, target += kDepth) {
        own.step(kPair);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const bf16* row = from + position * stride + half * kDepth;
          const __m512i one = position < length ? _mm512_loadu_si512(row) : _mm512_setzero_si512();
          const __m512i other = position + 1 < length ? _mm512_loadu_si512(row + stride) : _mm512_setzero_si512();
          _mm512_store_si512(target + 2 * half * quarter, _mm512_unpacklo_epi16(one, other));
          _mm512_store_si512(target + (2 * half + 1) * quarter, _mm512_unpackhi_epi16(one, other));
        }
      }
      ahead = own;
    }

    // to[16 rows][kGroup columns] += weights[16 rows][positions] pairs.
    [[gnu::noinline]] void add_group(const float* weights, std::int64_t steps, float* to, Ahead& ahead) const {
      constexpr std::int64_t kWeightStride = kBlock * sizeof(float);
      const std::int64_t stride = plan.value_width * static_cast<std::int64_t>(sizeof(float)), quarter = steps * kTile;
      const bf16* pairs = scratch.pairs;
      Ahead own = ahead;
      settle_memory();
      _tile_loadd(0, to, stride);
      _tile_loadd(1, to + kHalfPanel, stride);
      _tile_loadd(2, to + 2 * kHalfPanel, stride);
      _tile_loadd(3, to + 3 * kHalfPanel, stride);
      for (std::int64_t step = 0; step < steps; ++step, pairs += kTile) {
        own.step(kProducts);
        _tile_loadd(4, reinterpret_cast<const bf16*>(weights) + step * kDepth, kWeightStride);
        _tile_loadd(5, pairs, kTileBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, pairs + quarter, kTileBytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, pairs + 2 * quarter, kTileBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, pairs + 3 * quarter, kTileBytes);
        _tile_dpbf16ps(3, 4, 5);
      }
      zero_operands();
      store_sums(to, stride, kHalfPanel);
      ahead = own;
    }
  };

  DecodeAttention<FewRows, bf16> few_rows_;
};

}  // namespace ktc::amx
