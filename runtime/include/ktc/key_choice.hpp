// The positions that an index estimates to have the greatest scores: of each query head, or of the query heads of a key
// head together. Every step rounds as in `ktc/model/attention/key_codes.py` and `selection.py`, so the choice is equal
// on every machine, for any number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ktc/concepts.hpp"
#include "ktc/key_codes.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/linear.hpp"
#include "ktc/shape.hpp"
#include "ktc/shared_scores.hpp"
#include "ktc/team.hpp"
#include "ktc/tile_sizes.hpp"
#include "ktc/top_positions.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, class Element>
class KeyChoice {
  using Lanes = typename Isa::Lanes;
  using Codes = KeyCodes;
  using Dots = KeyDots<Isa>;
  using Top = TopPositions<Isa>;
  using Shared = SharedScores<Isa>;

 public:
  static void choose(Engine& engine, const SelectArguments& a) {
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      const Sizes sizes(a, team.threads());
      const std::int64_t width = round_up(a.index.layout.width, kHalfPanel);
      Region<std::int8_t> codes(sizes.all_rows * padded_width(a.index.layout));
      Region<std::uint8_t> tables(sizes.all_rows * sizes.of_tables);
      Region<Row> rows(sizes.all_rows);
      Region<Bounds> bounds(a.batch * a.tokens);
      Region<float> numbers(team.threads() * width);
      Region<float> samples(a.shared ? sizes.together * sizes.rows * sizes.sampled.blocks() * kKeysTogether : 0);
      Region<bf16> weights(a.shared ? sizes.together * sizes.padded * sizes.rows : 0);
      Region<float> sums(a.shared ? sizes.together * sizes.rows * sizes.stretches * kKeysTogether : 0);
      Region<std::int32_t> scores(sizes.together * sizes.lists * sizes.stride);
      Region<std::int32_t> scratch(team.threads() * Top::scratch(a.length));
      workspace.lay_out(codes, tables, rows, bounds, numbers, samples, weights, sums, scores, scratch);
      const Call call{a,           sizes,         codes.data(),   tables.data(),
                      rows.data(), bounds.data(), samples.data(), weights.data(),
                      sums.data(), scores.data()};
      team.run([&](const Worker& worker) {
        call.prepare(worker, numbers.data() + worker.index * width);
        worker.barrier.arrive_and_wait();
        std::int32_t* scratch_of_worker = scratch.data() + worker.index * Top::scratch(a.length);
        for (std::int64_t head = 0; head < sizes.heads; head += sizes.together) {
          call.choose_for(head, std::min(sizes.together, sizes.heads - head), worker, scratch_of_worker);
          worker.barrier.arrive_and_wait();
        }
      });
    });
  }

 private:
  static constexpr std::int64_t kStretch = 64;  // blocks that one worker estimates
  static constexpr std::int64_t kRun = 8;       // blocks whose products are in L1 at a time
  static constexpr float kUnseen = -std::numeric_limits<float>::infinity();

  // Of one query: the factor of its scores, and 16 times the part of its products that comes from codes being unsigned.
  // Where query heads choose together, `shift` makes scores the bits of weights, and `inverse` is one over their sum.
  struct Row {
    std::int32_t offsets[kKeysTogether];
    float factor;
    float shift;
    float inverse;
    std::int64_t batch;
    std::int64_t token;
  };

  // What a token sees: positions before `sinks` end the first ones, those from `local` on are the last ones.
  struct Bounds {
    std::int64_t sinks;
    std::int64_t local;
    std::int64_t end;
  };

  struct Sizes {
    Sizes(const SelectArguments& a, int threads)
        : heads(a.batch * a.key_heads),
          rows(a.group * a.tokens),
          all_rows(heads * rows),
          lists(a.shared ? a.tokens : rows),
          blocks((a.length + kKeysTogether - 1) / kKeysTogether),
          stretches((blocks + kStretch - 1) / kStretch),
          padded(blocks * kKeysTogether),
          stride(padded + 5 * kKeysTogether),
          together(std::min<std::int64_t>(heads, threads)),
          of_tables(table_bytes(a.index.layout)),
          sampled(blocks) {}

    // Of one query; 0 where products are not read from tables.
    static std::int64_t table_bytes(const KeyLayout& layout) {
      if constexpr (Dots::kTables) {
        if (layout.format == KeyFormat::kSign) return groups_of(layout) * SignTables::kBytes;
      }
      return 0;
    }

    std::int64_t heads;  // of all sequences
    std::int64_t rows;   // of a key head
    std::int64_t all_rows;
    std::int64_t lists;  // of a key head
    std::int64_t blocks;
    std::int64_t stretches;
    std::int64_t padded;    // positions
    std::int64_t stride;    // of rows; as a power of two it would map all rows to one set of a cache
    std::int64_t together;  // key heads whose scores are in memory at a time
    std::int64_t of_tables;
    typename Shared::Sample sampled;
  };

  struct Call {
    const SelectArguments& a;
    const Sizes& sizes;
    std::int8_t* codes;
    std::uint8_t* tables;
    Row* rows;
    Bounds* bounds;
    float* samples;  // (key heads together, rows, sampled blocks, 16)
    bf16* weights;   // (key heads together, blocks, rows, 16): written in order
    float* sums;     // (key heads together, stretches, rows, 16): of weights
    std::int32_t* scores;

    // Codes of the queries, and what each token sees.
    void prepare(const Worker& worker, float* numbers) const {
      const KeyLayout& layout = a.index.layout;
      for (std::int64_t row = worker.index; row < sizes.all_rows; row += worker.count) {
        const auto* query = static_cast<const Element*>(a.query) + row * layout.width;
        for (std::int64_t k = 0; k < layout.width; ++k) numbers[k] = static_cast<float>(query[k]);
        Codes::rotate(numbers, layout.width, a.index.signs);
        std::int8_t* of_row = codes + row * padded_width(layout);
        const float scale = Codes::encode_query(numbers, layout, of_row);
        if constexpr (Dots::kTables) {
          if (sizes.of_tables > 0) SignTables::fill(of_row, groups_of(layout), tables + row * sizes.of_tables);
        }
        std::int32_t sum = 0;
        for (std::int64_t k = 0; k < layout.width; ++k) sum += of_row[k];
        const std::int32_t offset = layout.format == KeyFormat::kInt4 ? 8 * sum : sum;
        std::fill(rows[row].offsets, rows[row].offsets + kKeysTogether, offset);
        rows[row].factor = scale * a.scale;
        rows[row].batch = row / (a.key_heads * sizes.rows);
        rows[row].token = row % a.tokens;
      }
      for (std::int64_t token = worker.index; token < a.batch * a.tokens; token += worker.count) {
        bounds[token] = bounds_of(token / a.tokens, token % a.tokens);
      }
    }

    bool sees(std::int64_t batch, std::int64_t token, std::int64_t position) const {
      if (a.mask == nullptr) return position <= a.length - a.tokens + token;
      return a.mask[batch * a.mask_batch + token * a.mask_token + position] != 0;
    }

    Bounds bounds_of(std::int64_t batch, std::int64_t token) const {
      std::int64_t end = a.length, sinks = 0;
      while (end > 0 && !sees(batch, token, end - 1)) --end;
      for (std::int64_t seen = 0; sinks < end && seen < a.sink; ++sinks) seen += sees(batch, token, sinks);
      return {sinks, std::max(sinks, end - a.local), end};
    }

    void choose_for(std::int64_t head, std::int64_t count, const Worker& worker, std::int32_t* scratch) const {
      const auto each_of = [&](std::int64_t items, const auto& body) {
        for (std::int64_t item = worker.index; item < count * items; item += worker.count) {
          body(item / items, item % items);
        }
        worker.barrier.arrive_and_wait();
      };
      if (a.shared) {
        each_of(sizes.sampled.blocks(), [&](std::int64_t place, std::int64_t block) { sample(head, place, block); });
        each_of(sizes.rows, [&](std::int64_t place, std::int64_t row) {
          const std::int64_t of_row = sizes.sampled.blocks() * kKeysTogether;
          Row& changed = rows[(head + place) * sizes.rows + row];
          changed.shift = Shared::shift(samples + (place * sizes.rows + row) * of_row, of_row);
        });
        each_of(sizes.stretches, [&](std::int64_t place, std::int64_t stretch) { weigh(head, place, stretch); });
        each_of(sizes.rows, [&](std::int64_t place, std::int64_t row) {
          Row& changed = rows[(head + place) * sizes.rows + row];
          changed.inverse = Shared::inverse(sums_of(place, row, 0), sizes.stretches, sizes.rows * kKeysTogether);
        });
        each_of(a.tokens * sizes.stretches, [&](std::int64_t place, std::int64_t item) {
          add_heads(head, place, item / sizes.stretches, item % sizes.stretches);
        });
      } else {
        each_of(sizes.stretches, [&](std::int64_t place, std::int64_t stretch) { estimate(head, place, stretch); });
      }
      for (std::int64_t item = worker.index; item < count * sizes.lists; item += worker.count) {
        write(head + item / sizes.lists, item % sizes.lists, scores + item * sizes.stride, scratch);
      }
    }

    // Calls `body` for the runs of blocks of one stretch.
    template <class Body>
    void by_runs(std::int64_t stretch, const Body& body) const {
      const std::int64_t end = std::min((stretch + 1) * kStretch, sizes.blocks);
      for (std::int64_t block = stretch * kStretch; block < end; block += kRun)
        body(block, std::min(kRun, end - block));
    }

    // Scores of one stretch of positions, of the `place`-th key head from `head` on, for all of its rows.
    void estimate(std::int64_t head, std::int64_t place, std::int64_t stretch) const {
      by_runs(stretch, [&](std::int64_t first, std::int64_t count) {
        const std::int64_t position = first * kKeysTogether;
        const bool all = seen_by_all(position, count);
        estimates(head + place, first, count, [&](std::int64_t row, const Row& of_row, const auto& estimated) {
          std::int32_t* to = scores + (place * sizes.rows + row) * sizes.stride + position;
          for (std::int64_t block = 0; block < count; ++block) order(estimated(block), to + block * kKeysTogether);
          for (std::int64_t at = 0; !all && at < count * kKeysTogether; at += kKeysTogether) {
            hide(of_row.batch, of_row.token, position + at, to + at, kHidden);
          }
        });
      });
    }

    float* sums_of(std::int64_t place, std::int64_t row, std::int64_t stretch) const {
      return sums + ((place * sizes.stretches + stretch) * sizes.rows + row) * kKeysTogether;
    }

    bf16* weights_of(std::int64_t place, std::int64_t block, std::int64_t row) const {
      return weights + ((place * sizes.blocks + block) * sizes.rows + row) * kKeysTogether;
    }

    // The scores of the `each`-th sampled block.
    void sample(std::int64_t head, std::int64_t place, std::int64_t sampled) const {
      const std::int64_t first = sizes.sampled.at(sampled), position = first * kKeysTogether;
      estimates(head + place, first, 1, [&](std::int64_t row, const Row& of_row, const auto& estimated) {
        float* to = samples + ((place * sizes.rows + row) * sizes.sampled.blocks() + sampled) * kKeysTogether;
        (estimated(0) * Lanes(Shared::kPartsOfE)).store(to);
        if (!seen_by_all(position, 1)) hide(of_row.batch, of_row.token, position, to, kUnseen);
      });
    }

    // The weights of one stretch for all rows of a key head, and their sums.
    void weigh(std::int64_t head, std::int64_t place, std::int64_t stretch) const {
      for (std::int64_t row = 0; row < sizes.rows; ++row) Lanes(0.0f).store(sums_of(place, row, stretch));
      by_runs(stretch, [&](std::int64_t first, std::int64_t count) {
        const bool all = seen_by_all(first * kKeysTogether, count);
        estimates(head + place, first, count, [&](std::int64_t row, const Row& of_row, const auto& estimated) {
          const Lanes parts(Shared::kPartsOfE), shift(of_row.shift);
          Lanes sum = Lanes::load(sums_of(place, row, stretch));
          bf16* to = weights_of(place, first, row);
          for (std::int64_t block = 0; block < count; ++block, to += sizes.rows * kKeysTogether) {
            Lanes weight = of_bits(estimated(block) * parts + shift);
            if (!all) {
              float numbers[kKeysTogether];
              weight.store(numbers);
              hide(of_row.batch, of_row.token, (first + block) * kKeysTogether, numbers, 0.0f);
              weight = Lanes::load(numbers);
            }
            sum = sum + weight;
            Shared::narrow(weight, to);
          }
          sum.store(sums_of(place, row, stretch));
        });
      });
    }

    // Scores of one stretch that the query heads of a key head share: the sum of their softmax.
    void add_heads(std::int64_t head, std::int64_t place, std::int64_t token, std::int64_t stretch) const {
      const Row* of_head = rows + (head + place) * sizes.rows;
      const std::int64_t end = std::min((stretch + 1) * kStretch, sizes.blocks);
      for (std::int64_t block = stretch * kStretch; block < end; ++block) {
        const bf16* of_block = weights_of(place, block, 0);
        Lanes total(0.0f);
        for (std::int64_t row = token; row < sizes.rows; row += a.tokens) {
          total = total + widened<Lanes>(of_block + row * kKeysTogether) * Lanes(of_head[row].inverse);
        }
        const std::int64_t position = block * kKeysTogether;
        std::int32_t* to = scores + (place * a.tokens + token) * sizes.stride + position;
        order(total, to);
        if (!seen_by_all(position, 1)) hide((head + place) / a.key_heads, token, position, to, kHidden);
      }
    }

    // Calls `use` for every row of a key head, with a function that returns its estimates of one of `count` blocks.
    template <class Use>
    [[gnu::always_inline]] void estimates(std::int64_t head, std::int64_t first, std::int64_t count,
                                          const Use& use) const {
      const std::int64_t at = head * a.index.capacity + first, of_block = block_bytes(a.index.layout);
      const std::uint8_t* keys = a.index.blocks + at * of_block;
      const auto* scales = static_cast<const weight_format::fp16*>(a.index.scales) + at * kKeysTogether;
      by_rows<Dots::kMostRows, 4, 1>(sizes.rows, [&]<int kCount>(std::int64_t row, TileSize<kCount>) {
        alignas(64) std::int32_t of_codes[kRun * kCount * kKeysTogether];
        std::int64_t block = 0;
        const auto multiply_all = [&]<int kBlocks>(TileSize<kBlocks>) {
          for (; block + kBlocks <= count; block += kBlocks) {
            multiply<kCount, kBlocks>(keys + block * of_block, head * sizes.rows + row,
                                      of_codes + block * kCount * kKeysTogether);
          }
        };
        multiply_all(TileSize<Dots::kMostBlocks>{});
        multiply_all(TileSize<1>{});
        for (int place = 0; place < kCount; ++place) {
          const Row& of_row = rows[head * sizes.rows + row + place];
          const Lanes factor(of_row.factor);
          use(row + place, of_row, [&](std::int64_t block) {
            const std::int32_t* of_keys = of_codes + (block * kCount + place) * kKeysTogether;
            const Lanes scale = widened<Lanes>(scales + block * kKeysTogether);
            return Lanes::from_integers(of_keys, of_row.offsets) * scale * factor;
          });
        }
      });
    }

    template <int kRows, int kBlocks>
    [[gnu::always_inline]] void multiply(const std::uint8_t* keys, std::int64_t row, std::int32_t* sums) const {
      const KeyLayout& layout = a.index.layout;
      const std::int8_t* query = codes + row * padded_width(layout);
      if (layout.format == KeyFormat::kInt4) {
        Dots::template of_nibbles<kRows, kBlocks>(keys, groups_of(layout), query, padded_width(layout), sums);
      } else if constexpr (Dots::kTables) {
        const std::uint8_t* of_rows = tables + row * sizes.of_tables;
        Dots::template of_tables<kRows, kBlocks>(keys, groups_of(layout), of_rows, sizes.of_tables, sums);
      } else {
        Dots::template of_bits<kRows, kBlocks>(keys, groups_of(layout), query, padded_width(layout), sums);
      }
    }

    [[gnu::always_inline]] static void order(Lanes from, std::int32_t* to) {
      float numbers[kKeysTogether];
      from.store(numbers);
      ScoreLanes<Isa>::order(numbers, to);
    }

    // Whether every token sees all positions of `blocks` from `position` on.
    [[gnu::always_inline]] bool seen_by_all(std::int64_t position, std::int64_t blocks) const {
      return a.mask == nullptr && position + blocks * kKeysTogether <= a.length - a.tokens + 1;
    }

    template <class Value>
    void hide(std::int64_t batch, std::int64_t token, std::int64_t position, Value* values, Value hidden) const {
      const std::int64_t end = bounds[batch * a.tokens + token].end;
      if (a.mask != nullptr) {
        const std::uint8_t* seen = a.mask + batch * a.mask_batch + token * a.mask_token + position;
        const std::int64_t count = std::min(kKeysTogether, end - position);
        for (std::int64_t key = 0; key < count; ++key) values[key] = seen[key] != 0 ? values[key] : hidden;
      }
      for (std::int64_t key = std::max<std::int64_t>(0, end - position); key < kKeysTogether; ++key) {
        values[key] = hidden;
      }
    }

    // The positions of one list: the first ones, those with the greatest scores, the last ones.
    void write(std::int64_t head, std::int64_t list, const std::int32_t* of_list, std::int32_t* scratch) const {
      const std::int64_t batch = head / a.key_heads, token = list % a.tokens;
      const std::int64_t choosing = a.shared ? a.key_heads : a.key_heads * a.group;
      const std::int64_t chooser = a.shared ? head % a.key_heads : head % a.key_heads * a.group + list / a.tokens;
      const std::int64_t place = (batch * a.tokens + token) * choosing + chooser;
      const Bounds& bound = bounds[batch * a.tokens + token];
      std::int32_t* to = a.positions + place * a.most;
      std::int64_t count = 0;
      const auto all = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t at = begin; at < end; ++at) {
          if (of_list[at] != kHidden) to[count++] = static_cast<std::int32_t>(at);
        }
      };
      all(0, bound.sinks);
      count += Top::choose(of_list, bound.sinks, bound.local, a.k, scratch, to + count);
      all(bound.local, bound.end);
      a.counts[place] = static_cast<std::int32_t>(count);
    }
  };
};

}  // namespace ktc::inline KTC_UNIT
