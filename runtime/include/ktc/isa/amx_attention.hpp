// Decode attention by tiles, for many query heads of one key head, as latent attention has them. A tile of scores has
// 16 positions as its rows, read from the cache as they are stored, and 16 rows of queries as its columns, packed once
// per call. Values are interleaved in pairs of positions, step by step before weights multiply them.
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
#include "ktc/isa/amx.hpp"
#include "ktc/isa/avx512_bf16.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::amx::inline KTC_UNIT {

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
  static constexpr std::int64_t kSums = kTileRows * kHalfPanel;  // of a tile
  static constexpr std::int64_t kGroup = 4 * kTileRows;  // positions, or columns of values, in the four tiles of sums
  using Plan = AttentionPlan<Isa, kDepth>;
  using Item = Plan::Item;
  using Sums = Plan::Sums;
  using Ahead = CacheAhead<bf16, Plan::kBlock>;
  static constexpr std::int64_t kBlock = Plan::kBlock;
  static constexpr std::int64_t kMostRows = Plan::kMostRows;
  static_assert(kBlock % kGroup == 0 && kMostRows % kTileRows == 0);

 public:
  Attention() { request_tiles(); }

  void forward(Engine& engine, const AttentionArguments& arguments) const override {
    if (!fills_tiles(arguments)) return few_rows_.forward(engine, arguments);
    const Plan plan(arguments);
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      const std::int64_t packed_rows = round_up(plan.rows, kTileRows);
      Region<bf16> queries(arguments.batch * arguments.key_heads * packed_rows * plan.query_width);
      Region<Sums> sums(plan.all_rows * plan.splits);
      Region<float> values(plan.all_rows * plan.splits * plan.value_width);
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
        Scratch& scratch_of_worker = scratch.data()[worker.index];
        const Call call{arguments,
                        plan,
                        queries.data(),
                        packed_rows,
                        sums.data(),
                        values.data(),
                        scratch_of_worker,
                        added.data() + worker.index * kMostRows * plan.value_width,
                        rest.data() + worker.index * kGroup * plan.query_width};
        Ahead::Order order(Plan::head_views<bf16>(arguments, 0));
        Ahead ahead(order);
        const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
        plan.for_each_split<bf16>(arguments, take, ahead, [&](const Item& item) { call.split(item, ahead); });
        worker.barrier.arrive_and_wait();
        plan.combine<bf16>(arguments, sums.data(), values.data(), next_row, place);
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

  // Where four tiles of sums are: the distance from a row to the next, and from a tile to the next.
  struct SumTiles {
    float* data;
    std::int64_t row;
    std::int64_t tile;
  };

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

    void split(const Item& item, Ahead& ahead) const {
      const HeadViews views = Plan::head_views<bf16>(a, item.head);
      const std::int64_t tiles = (item.count + kTileRows - 1) / kTileRows;
      const bf16* packed = queries + (item.head * packed_rows + item.first) * plan.query_width;
      Sums* of_rows = sums + plan.row_of(item);
      std::fill(of_rows, of_rows + item.count, Sums{Plan::kUnseen, 0.0f});
      for (std::int64_t block = item.begin; block < item.end; block += kBlock) {
        const std::int64_t length = std::min(kBlock, item.end - block);
        const HeadViews of_block = views.of_block<bf16>(block);
        ahead.start_block(length, block_work(tiles, item.count, length));
        score(of_block, packed, tiles, length, ahead);
        weigh(item, block, length, of_rows, ahead);
        add_values(of_block.values, item, block, length, ahead);
      }
    }

    // Estimates of work in cycles.
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
      for (std::int64_t index = 0; index < count; ++index) {
        std::copy_n(from + index * keys.position, keys.width, target + index * keys.width);
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
            store_scores(scratch.sums + part * kSums, a.scale, of_tile + part * kTileRows);
          }
        }
      }
    }

    // sums[position][row] of kGroup positions and 16 rows.
    [[gnu::noinline]] void score_group(const CacheView& keys, const CacheView& more, const bf16* packed,
                                       Ahead& ahead) const {
      Ahead local_ahead = ahead;
      settle_memory();
      zero_sums();
      for (const CacheView* part : {&keys, &more}) {
        const auto* rows = static_cast<const bf16*>(part->data);
        const std::int64_t stride = part->position * static_cast<std::int64_t>(sizeof(bf16));
        const std::int64_t tile = kTileRows * part->position;
        for (std::int64_t column = 0; column < part->width; column += kDepth, packed += kTile, rows += kDepth) {
          local_ahead.step(kProducts);
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
      store_sums({scratch.sums, kHalfPanel, kSums});
      ahead = local_ahead;
    }

    // Zeros need no register (amx.hpp).
    [[gnu::always_inline]] static void zero_operands() {
      _tile_zero(4);
      _tile_zero(5);
      _tile_zero(6);
      _tile_zero(7);
    }

    [[gnu::always_inline]] static void zero_sums() {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }

    [[gnu::always_inline]] static void store_sums(const SumTiles& to) {
      const std::int64_t stride = to.row * static_cast<std::int64_t>(sizeof(float));
      _tile_stored(0, to.data, stride);
      _tile_stored(1, to.data + to.tile, stride);
      _tile_stored(2, to.data + 2 * to.tile, stride);
      _tile_stored(3, to.data + 3 * to.tile, stride);
      zero_sums();
      settle_memory();
    }

    // Overwrites scores with weights in bf16. Rows without queries, and positions up to a whole tile, become 0.
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
        plan.exponentiate<bf16>(seen, scores, of_rows[row], {sums_of(row), kSums}, [&] { ahead.step(kExponentials); });
        std::fill(reinterpret_cast<bf16*>(scores) + seen, reinterpret_cast<bf16*>(scores) + whole, bf16(0.0f));
      }
    }

    // Where the sums of a row begin. Until the last block of a split they are tile after tile of 16 rows, [row / 16]
    // [column / 16][row % 16][16]. In rows of 512 the 64 lines of four tiles would be in 8 sets of the L1 cache: with
    // 128 heads adding values took 1.5 times as long.
    float* sums_of(std::int64_t row) const {
      return added + row / kTileRows * kTileRows * plan.value_width + row % kTileRows * kHalfPanel;
    }

    void add_values(const CacheView& view, const Item& item, std::int64_t block, std::int64_t length,
                    Ahead& ahead) const {
      const auto* from = static_cast<const bf16*>(view.data);
      const bool is_last = block + length == item.end;
      for (std::int64_t column = 0; column < plan.value_width; column += kGroup) {
        const Values group{from + column, view.position, length, (length + kDepth - 1) / kDepth};
        for (std::int64_t row = 0; row < item.count; row += kTileRows) {
          float* const tiles = sums_of(row) + column * kTileRows;
          float* const rows = values + (plan.row_of(item) + row) * plan.value_width + column;
          const float* const before = block == item.begin ? nullptr : tiles;
          const bool is_whole = row + kTileRows <= item.count;
          const SumTiles to =
              is_last && is_whole ? SumTiles{rows, plan.value_width, kHalfPanel} : SumTiles{tiles, kHalfPanel, kSums};
          if (row == 0) {
            add_group<true>(group, scratch.scores, before, to, ahead);
          } else {
            add_group<false>(group, scratch.scores + row * kBlock, before, to, ahead);
          }
          if (is_last && !is_whole) copy_rows(tiles, item.count - row, rows);
        }
      }
    }

    // The first rows of four tiles.
    void copy_rows(const float* tiles, std::int64_t count, float* target) const {
      for (std::int64_t row = 0; row < count; ++row, tiles += kHalfPanel, target += plan.value_width) {
        for (std::int64_t tile = 0; tile < 4; ++tile) {
          std::copy_n(tiles + tile * kSums, kHalfPanel, target + tile * kHalfPanel);
        }
      }
    }

    // kGroup columns of the values of a block's first `length` positions, `steps` times kDepth of them.
    struct Values {
      const bf16* data;
      std::int64_t stride;
      std::int64_t length;
      std::int64_t steps;

      std::int64_t quarter() const { return steps * kTile; }
    };

    // pairs[quarter][step][position / 2][16 columns][2]; zeros after the last position.
    [[gnu::always_inline]] static void interleave(const Values& values, std::int64_t step, bf16* pairs, Ahead& ahead) {
      const std::int64_t stride = values.stride, count = values.length - step * kDepth;
      const bf16* rows = values.data + step * kDepth * stride;
      bf16* target = pairs + step * kTile;
      if (count >= kDepth) {
        for (std::int64_t four = 0; four < kDepth / 8; ++four) {
          ahead.step(4 * kPair);
#pragma GCC unroll 4
          for (int pair = 0; pair < 4; ++pair, rows += 2 * stride, target += kDepth) {
            interleave_pair(_mm512_loadu_si512(rows), _mm512_loadu_si512(rows + stride), target, values.quarter());
            interleave_pair(_mm512_loadu_si512(rows + kDepth), _mm512_loadu_si512(rows + stride + kDepth),
                            target + 2 * values.quarter(), values.quarter());
          }
        }
        return;
      }
      ahead.step(kDepth / 2 * kPair);
      const auto row_of = [&](std::int64_t position, int half) {
        return position < count ? _mm512_loadu_si512(rows + position * stride + half * kDepth) : _mm512_setzero_si512();
      };
      for (std::int64_t position = 0; position < kDepth; position += 2, target += kDepth) {
        interleave_pair(row_of(position, 0), row_of(position + 1, 0), target, values.quarter());
        interleave_pair(row_of(position, 1), row_of(position + 1, 1), target + 2 * values.quarter(), values.quarter());
      }
    }

    [[gnu::always_inline]] static void interleave_pair(__m512i one, __m512i other, bf16* target, std::int64_t next) {
      _mm512_store_si512(target, _mm512_unpacklo_epi16(one, other));
      _mm512_store_si512(target + next, _mm512_unpackhi_epi16(one, other));
    }

    // to[16 rows][kGroup columns] = weights[16 rows][positions] values, plus the four tiles of `before` if any. The
    // first rows interleave the values, a step ahead of their products, so that a core does both at the same
    // time: 1.6 times as fast as one after the other.
    template <bool kInterleaves>
    [[gnu::noinline]] void add_group(const Values& values, const float* weights, const float* before,
                                     const SumTiles& to, Ahead& ahead) const {
      bf16* const pairs = scratch.pairs;
      const std::int64_t quarter = values.quarter();
      Ahead local_ahead = ahead;
      settle_memory();
      if (before == nullptr) {
        zero_sums();
      } else {
        _tile_loadd(0, before, kTileBytes);
        _tile_loadd(1, before + kSums, kTileBytes);
        _tile_loadd(2, before + 2 * kSums, kTileBytes);
        _tile_loadd(3, before + 3 * kSums, kTileBytes);
      }
      if constexpr (kInterleaves) interleave(values, 0, pairs, local_ahead);
      for (std::int64_t step = 0; step < values.steps; ++step) {
        if constexpr (kInterleaves) {
          if (step + 1 < values.steps) interleave(values, step + 1, pairs, local_ahead);
          settle_memory();
        }
        local_ahead.step(kProducts);
        const bf16* const of_step = pairs + step * kTile;
        _tile_loadd(4, reinterpret_cast<const bf16*>(weights) + step * kDepth, kBlock * sizeof(float));
        _tile_loadd(5, of_step, kTileBytes);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, of_step + quarter, kTileBytes);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, of_step + 2 * quarter, kTileBytes);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, of_step + 3 * quarter, kTileBytes);
        _tile_dpbf16ps(3, 4, 5);
      }
      zero_operands();
      store_sums(to);
      ahead = local_ahead;
    }
  };

  DecodeAttention<avx512_bf16::Isa, bf16> few_rows_;
};

}  // namespace ktc::amx::inline KTC_UNIT
