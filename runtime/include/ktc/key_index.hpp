// An index of a cache's keys by codes of few bits: scores of all positions are estimated from it, and the positions of
// the greatest are chosen, exactly and in a fixed order. The number of threads changes no bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ktc/decode_attention.hpp"
#include "ktc/engine.hpp"
#include "ktc/key_codes.hpp"
#include "ktc/key_dots.hpp"
#include "ktc/shape.hpp"
#include "ktc/top_positions.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc {

// Blocks (batch, key heads, capacity, bytes of a block) and scales (batch, key heads, 16 capacity) are contiguous; a
// block has the codes of 16 positions. `mean` (batch, key heads, width) is what keys are centred by.
struct IndexView {
  std::uint8_t* blocks = nullptr;
  weight_format::fp16* scales = nullptr;
  const float* mean = nullptr;
  const float* signs = nullptr;
  std::int64_t capacity = 0;
  KeyLayout layout{};
};

// Adds the keys at [begin, end) to an index. A key may be in two parts.
struct EncodeArguments {
  CacheView keys;
  CacheView more_keys;
  IndexView index;
  std::int64_t batch = 0;
  std::int64_t key_heads = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// query (batch, key heads, rows, width) is contiguous, where the rows of a key head are its query heads and their
// tokens. The chosen positions (batch, tokens, choosing heads, most) ascend, and counts has their number. Choosing
// heads are the query heads, or the key heads where query heads share a choice. The first `sink` visible positions and
// the last `local` are always chosen. Masks are those of `AttentionArguments`.
struct SelectArguments {
  const void* query = nullptr;
  IndexView index;
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_batch = 0;
  std::int64_t mask_token = 0;
  std::int32_t* positions = nullptr;
  std::int32_t* counts = nullptr;
  std::int64_t batch = 0;
  std::int64_t key_heads = 0;
  std::int64_t group = 0;  // query heads of a key head
  std::int64_t tokens = 0;
  std::int64_t length = 0;  // of the cache, in positions
  std::int64_t most = 0;
  float scale = 1.0f;
  std::int64_t k = 0;
  std::int64_t sink = 0;
  std::int64_t local = 0;
  bool shared = false;
};

template <class Isa, class Element>
class KeyIndex {
  using Lanes = typename Isa::Lanes;
  using Codes = KeyCodes<Isa>;
  using Dots = KeyDots<Isa>;
  using Top = TopPositions<Isa>;

 public:
  static void encode(Engine& engine, const EncodeArguments& a) {
    const std::int64_t width = a.index.layout.width, heads = a.batch * a.key_heads;
    const std::int64_t first = a.begin / kKeysTogether, blocks = (a.end - 1) / kKeysTogether + 1 - first;
    if (a.end <= a.begin) return;
    engine.exclusively([&](const Team& team, Workspace& workspace) {
      Region<float> numbers(team.threads() * round_up(width, kHalfPanel));
      workspace.lay_out(numbers);
      team.run([&](const Worker& worker) {
        float* own = numbers.data() + worker.index * round_up(width, kHalfPanel);
        for (std::int64_t item = worker.index; item < heads * blocks; item += worker.count) {
          encode_block(a, item / blocks, first + item % blocks, own);
        }
      });
    });
  }

  static void select(Engine& engine, const SelectArguments& a) {
    engine.exclusively([&](const Team& team, Workspace& workspace) {
      const Sizes sizes(a, team.threads());
      Region<std::int8_t> codes(sizes.all_rows * a.index.layout.padded());
      Region<Row> rows(sizes.all_rows);
      Region<Bounds> bounds(a.batch * a.tokens);
      Region<float> numbers(team.threads() * round_up(a.index.layout.width, kHalfPanel));
      Region<float> weights(a.shared ? sizes.together * sizes.padded * sizes.rows : 0);
      Region<Part> parts(a.shared ? sizes.together * sizes.rows * sizes.stretches : 0);
      Region<float> maxima(a.shared ? team.threads() * sizes.rows * kKeysTogether : 0);
      Region<std::int32_t> scores(sizes.together * sizes.lists * sizes.stride);
      Region<std::int32_t> scratch(team.threads() * Top::scratch(a.length));
      workspace.lay_out(codes, rows, bounds, numbers, weights, parts, maxima, scores, scratch);
      const Call call{a,
                      sizes,
                      codes.data(),
                      rows.data(),
                      bounds.data(),
                      weights.data(),
                      parts.data(),
                      maxima.data(),
                      scores.data()};
      team.run([&](const Worker& worker) {
        call.prepare(worker, numbers.data() + worker.index * round_up(a.index.layout.width, kHalfPanel));
        worker.barrier.arrive_and_wait();
        std::int32_t* own = scratch.data() + worker.index * Top::scratch(a.length);
        for (std::int64_t head = 0; head < sizes.heads; head += sizes.together) {
          call.choose_for(head, std::min(sizes.together, sizes.heads - head), worker, own);
          worker.barrier.arrive_and_wait();
        }
      });
    });
  }

 private:
  static constexpr float kUnseen = -1e30f;
  static constexpr std::int64_t kStretch = 64;  // blocks that one worker estimates

  static const Element* row_of(const CacheView& view, std::int64_t key_heads, std::int64_t head, std::int64_t at) {
    return static_cast<const Element*>(view.data) + head / key_heads * view.batch + head % key_heads * view.head +
           at * view.position;
  }

  static void encode_block(const EncodeArguments& a, std::int64_t head, std::int64_t block, float* numbers) {
    const KeyLayout& layout = a.index.layout;
    std::uint8_t* codes = a.index.blocks + (head * a.index.capacity + block) * layout.block_bytes();
    weight_format::fp16* scales = a.index.scales + (head * a.index.capacity + block) * kKeysTogether;
    const float* mean = a.index.mean + head * layout.width;
    const std::int64_t begin = std::max(a.begin, block * kKeysTogether);
    const std::int64_t end = std::min(a.end, (block + 1) * kKeysTogether);
    for (std::int64_t at = begin; at < end; ++at) {
      const auto add = [&](const CacheView& view, float* to, const float* centre) {
        const Element* key = row_of(view, a.key_heads, head, at);
        for (std::int64_t k = 0; k < view.width; ++k) to[k] = static_cast<float>(key[k]) - centre[k];
      };
      add(a.keys, numbers, mean);
      if (a.more_keys.width > 0) add(a.more_keys, numbers + a.keys.width, mean + a.keys.width);
      Codes::rotate(numbers, layout.width, a.index.signs);
      scales[at % kKeysTogether] = Codes::encode(numbers, layout, at % kKeysTogether, codes);
    }
  }

  // Of one query: the factor of its scores, and 16 times the part of its products that comes from codes being unsigned.
  struct Row {
    std::int32_t offsets[kKeysTogether];
    float factor;
    std::int64_t batch;
    std::int64_t token;
  };

  // Of one query and a stretch: the greatest estimate, the sum of exp(estimate - greatest), and what turns these into
  // shares of the sum over all stretches.
  struct Part {
    float greatest;
    float total;
    float factor;
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
          together(std::min<std::int64_t>(heads, threads)) {}

    std::int64_t heads;  // of all sequences
    std::int64_t rows;   // of a key head
    std::int64_t all_rows;
    std::int64_t lists;  // of a key head
    std::int64_t blocks;
    std::int64_t stretches;
    std::int64_t padded;    // positions
    std::int64_t stride;    // of rows; as a power of two it would map all rows to one set of a cache
    std::int64_t together;  // key heads whose scores are in memory at a time
  };

  template <int kCount>
  struct Rows {};

  template <class Body>
  static void by_rows(std::int64_t count, const Body& body) {
    std::int64_t each = 0;
    if constexpr (Dots::kMostRows >= 8) {
      for (; each + 8 <= count; each += 8) body(each, Rows<8>{});
    }
    for (; each + 4 <= count; each += 4) body(each, Rows<4>{});
    for (; each < count; ++each) body(each, Rows<1>{});
  }

  struct Call {
    const SelectArguments& a;
    const Sizes& sizes;
    std::int8_t* codes;
    Row* rows;
    Bounds* bounds;
    float* weights;  // (key heads together, blocks, rows, 16): written in order
    Part* parts;     // (key heads together, rows, stretches)
    float* maxima;   // (threads, rows, 16): of a stretch
    std::int32_t* scores;

    // Codes of the queries, and what each token sees.
    void prepare(const Worker& worker, float* numbers) const {
      const KeyLayout& layout = a.index.layout;
      for (std::int64_t row = worker.index; row < sizes.all_rows; row += worker.count) {
        const auto* query = static_cast<const Element*>(a.query) + row * layout.width;
        for (std::int64_t k = 0; k < layout.width; ++k) numbers[k] = static_cast<float>(query[k]);
        Codes::rotate(numbers, layout.width, a.index.signs);
        std::int8_t* of_row = codes + row * layout.padded();
        const float scale = Codes::encode_query(numbers, layout, of_row);
        std::int32_t sum = 0;
        for (std::int64_t k = 0; k < layout.width; ++k) sum += of_row[k];
        const std::int32_t offset = layout.format == KeyFormat::kInt4 ? 8 * sum : sum;
        std::fill(rows[row].offsets, rows[row].offsets + kKeysTogether, offset);
        rows[row].factor = scale * a.scale;
        rows[row].batch = row / (a.key_heads * sizes.rows);
        rows[row].token = row % a.tokens;
      }
      for (std::int64_t each = worker.index; each < a.batch * a.tokens; each += worker.count) {
        bounds[each] = bounds_of(each / a.tokens, each % a.tokens);
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
      const std::int64_t stretches = sizes.stretches;
      float* greatest = maxima + worker.index * sizes.rows * kKeysTogether;
      for (std::int64_t item = worker.index; item < count * stretches; item += worker.count) {
        const std::int64_t place = item / stretches, stretch = item % stretches;
        std::fill(greatest, greatest + (a.shared ? sizes.rows * kKeysTogether : 0), kUnseen);
        estimate(head, place, stretch * kStretch, greatest);
        if (a.shared) weigh(place, stretch, greatest);
      }
      worker.barrier.arrive_and_wait();
      if (a.shared) {
        for (std::int64_t item = worker.index; item < count * sizes.rows; item += worker.count) {
          normalise(parts + item * stretches);
        }
        worker.barrier.arrive_and_wait();
        for (std::int64_t item = worker.index; item < count * a.tokens * stretches; item += worker.count) {
          add_heads(head, item / stretches / a.tokens, item / stretches % a.tokens, item % stretches * kStretch);
        }
        worker.barrier.arrive_and_wait();
      }
      for (std::int64_t item = worker.index; item < count * sizes.lists; item += worker.count) {
        write(head + item / sizes.lists, item % sizes.lists, scores + item * sizes.stride, scratch);
      }
    }

    // Scores of one stretch of positions, of the `place`-th key head from `head` on, for all of its rows. Where rows
    // share a choice, these are estimates in the place of their weights, and raise `greatest` (rows, 16).
    void estimate(std::int64_t head, std::int64_t place, std::int64_t begin, float* greatest) const {
      const std::int64_t end = std::min(begin + kStretch, sizes.blocks);
      std::int64_t block = begin;
      for (; block + Dots::kMostBlocks <= end; block += Dots::kMostBlocks) {
        estimate_blocks<Dots::kMostBlocks>(head, place, block, greatest);
      }
      for (; block < end; ++block) estimate_blocks<1>(head, place, block, greatest);
    }

    float* weights_of(std::int64_t place, std::int64_t block, std::int64_t row) const {
      return weights + ((place * sizes.blocks + block) * sizes.rows + row) * kKeysTogether;
    }

    template <int kBlocks>
    void estimate_blocks(std::int64_t head, std::int64_t place, std::int64_t first, float* greatest) const {
      const KeyLayout& layout = a.index.layout;
      const std::int64_t at = (head + place) * a.index.capacity + first;
      const std::uint8_t* keys = a.index.blocks + at * layout.block_bytes();
      const weight_format::fp16* scales = a.index.scales + at * kKeysTogether;
      const std::int8_t* query = codes + (head + place) * sizes.rows * layout.padded();
      by_rows(sizes.rows, [&]<int kCount>(std::int64_t row, Rows<kCount>) {
        alignas(64) std::int32_t sums[kBlocks * kCount * kKeysTogether];
        const std::int8_t* of_rows = query + row * layout.padded();
        if (layout.format == KeyFormat::kInt4) {
          Dots::template of_nibbles<kCount, kBlocks>(keys, layout.groups(), of_rows, layout.padded(), sums);
        } else {
          Dots::template of_bits<kCount, kBlocks>(keys, layout.groups(), of_rows, layout.padded(), sums);
        }
        const Row* of_tile = rows + (head + place) * sizes.rows + row;
        for (int block = 0; block < kBlocks; ++block) {
          const Lanes scale = widened<Lanes>(scales + block * kKeysTogether);
          const std::int64_t position = (first + block) * kKeysTogether;
          const bool all_seen = seen_by_all(position);
#pragma GCC unroll 8
          for (int each = 0; each < kCount; ++each) {
            const Row& of_row = of_tile[each];
            const std::int32_t* of_keys = sums + (block * kCount + each) * kKeysTogether;
            const Lanes found = Lanes::from_integers(of_keys, of_row.offsets) * scale * Lanes(of_row.factor);
            if (a.shared) {
              float* to = weights_of(place, first + block, row + each);
              found.store(to);
              if (!all_seen) hide(of_row.batch, of_row.token, position, to, kUnseen);
              float* of_greatest = greatest + (row + each) * kKeysTogether;
              raised(Lanes::load(of_greatest), Lanes::load(to)).store(of_greatest);
            } else {
              std::int32_t* to = scores + (place * sizes.rows + row + each) * sizes.stride + position;
              order(found, to);
              if (!all_seen) hide(of_row.batch, of_row.token, position, to, kHidden);
            }
          }
        }
      });
    }

    [[gnu::always_inline]] static void order(Lanes from, std::int32_t* to) {
      float numbers[kKeysTogether];
      from.store(numbers);
      ScoreLanes<Isa>::order(numbers, to);
    }

    // Whether every token sees the 16 positions from `position` on.
    [[gnu::always_inline]] bool seen_by_all(std::int64_t position) const {
      return a.mask == nullptr && position + kKeysTogether <= a.length - a.tokens + 1;
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

    // Turns the estimates of a stretch into exp(estimate - greatest), and sums these. A NaN stays.
    void weigh(std::int64_t place, std::int64_t stretch, const float* greatest) const {
      const std::int64_t begin = stretch * kStretch, end = std::min(begin + kStretch, sizes.blocks);
      by_rows(sizes.rows, [&]<int kCount>(std::int64_t row, Rows<kCount>) {
        Part* of_row[kCount];
        Sum total[kCount];
        for (int each = 0; each < kCount; ++each) {
          const float* found = greatest + (row + each) * kKeysTogether;
          of_row[each] = parts + (place * sizes.rows + row + each) * sizes.stretches + stretch;
          of_row[each]->greatest = *std::max_element(found, found + kKeysTogether);
        }
        for (std::int64_t block = begin; block < end; ++block) {
          float* of_block = weights_of(place, block, row);
#pragma GCC unroll 8
          for (int each = 0; each < kCount; ++each) {
            float* at = of_block + each * kKeysTogether;
            const Lanes estimate = Lanes::load(at);
            const Lanes weight = zero_up_to(0.5f * kUnseen, estimate, exp(estimate - Lanes(of_row[each]->greatest)));
            total[each].value = total[each].value + zero_outside(0.5f * kUnseen, -kUnseen, estimate, weight);
            weight.store(at);
          }
        }
        for (int each = 0; each < kCount; ++each) of_row[each]->total = total[each].value.sum();
      });
    }

    struct Sum {
      Lanes value{0.0f};
    };

    // The factors of a row's stretches, of which the sums are added in their order.
    void normalise(Part* of_row) const {
      float greatest = kUnseen, total = 0.0f;
      for (std::int64_t each = 0; each < sizes.stretches; ++each) greatest = std::max(greatest, of_row[each].greatest);
      for (std::int64_t each = 0; each < sizes.stretches; ++each) {
        of_row[each].factor = std::exp(of_row[each].greatest - greatest);
        total += of_row[each].total * of_row[each].factor;
      }
      const float inverse = total > 0.0f ? 1.0f / total : 1.0f;
      for (std::int64_t each = 0; each < sizes.stretches; ++each) of_row[each].factor *= inverse;
    }

    // Scores of one stretch that the query heads of a key head share: the sum of their softmax.
    void add_heads(std::int64_t head, std::int64_t place, std::int64_t token, std::int64_t begin) const {
      const std::int64_t end = std::min(begin + kStretch, sizes.blocks);
      const Part* of_token = parts + (place * sizes.rows + token) * sizes.stretches + begin / kStretch;
      for (std::int64_t block = begin; block < end; ++block) {
        const std::int64_t position = block * kKeysTogether;
        const float* of_block = weights_of(place, block, token);
        Lanes total(0.0f);
        for (std::int64_t each = 0; each < sizes.rows; each += a.tokens) {
          const Lanes weight = Lanes::load(of_block + each * kKeysTogether);
          total = fused_multiply_add(weight, Lanes(of_token[each * sizes.stretches].factor), total);
        }
        std::int32_t* to = scores + (place * a.tokens + token) * sizes.stride + position;
        order(total, to);
        if (!seen_by_all(position)) hide((head + place) / a.key_heads, token, position, to, kHidden);
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

}  // namespace ktc
