// Calls of kernels for decode attention: over all positions, over chosen ones, over int8 codes, and the index that
// chooses.
#define KTC_UNIT stress_attention

#include "ktc/interface/attention.hpp"

#include <cstdint>
#include <limits>

#include "calls.hpp"
#include "ktc/key_codes.hpp"
#include "memory.hpp"

namespace stress {
namespace {

using namespace ktc;

struct Traits {
  bool joint = false;  // values are the first numbers of the keys, as in latent attention
  bool masked = false;
  bool sinks = false;
  bool positions_first = false;  // in memory, before the heads
};

struct Case {
  std::int64_t batch, key_heads, group, tokens, positions;
  std::int64_t width, more, value_width;  // of keys, of rotary keys beside them, of values
  Traits is = {};
};

constexpr Case kCases[] = {
    {2, 2, 3, 3, 70, 40, 0, 24, {.masked = true, .sinks = true}},
    {1, 1, 5, 1, 300, 64, 20, 64},
    {2, 1, 16, 1, 200, 64, 32, 64, {.joint = true}},
    {2, 1, 20, 1, 200, 64, 32, 64, {.joint = true}},
    {1, 2, 9, 3, 333, 96, 0, 128, {.masked = true, .sinks = true, .positions_first = true}},
    {1, 1, 7, 2, 130, 72, 9, 33, {.joint = true, .masked = true}},
    {1, 1, 70, 2, 33, 16, 0, 16, {.sinks = true}},
    {2, 4, 1, 1, 1, 8, 0, 1},
    {1, 8, 2, 4, 600, 17, 0, 31, {.positions_first = true}},
    {3, 2, 2, 16, 16, 1, 1, 5, {.masked = true, .positions_first = true}},
};

std::string name_of(const char* operation, const Case& which) {
  return std::string(operation) + " B" + std::to_string(which.batch) + " K" + std::to_string(which.key_heads) + " G" +
         std::to_string(which.group) + " T" + std::to_string(which.tokens) + " L" + std::to_string(which.positions) +
         " k" + std::to_string(which.width) + "+" + std::to_string(which.more) + " v" +
         std::to_string(which.value_width) + (which.is.joint ? " joint" : "");
}

// Keys or values, exactly as many as a cache has.
template <class Element>
struct Held {
  Held(std::mt19937& random, const Case& which, std::int64_t width)
      : values(random_values<Element>(random, which.batch * which.key_heads * which.positions * width, 1)),
        view{.data = width == 0 ? nullptr : values.data(),
             .batch = which.key_heads * which.positions * width,
             .head = (which.is.positions_first ? 1 : which.positions) * width,
             .position = (which.is.positions_first ? which.key_heads : 1) * width,
             .width = width} {}

  std::vector<Element> values;
  CacheView view;
};

template <class Element>
struct Cache {
  Cache(std::mt19937& random, const Case& which)
      : keys(random, which, which.width),
        more(random, which, which.more),
        own_values(random, which, which.is.joint ? 0 : which.value_width),
        values(which.is.joint ? keys.view : own_values.view) {
    values.width = std::min(which.value_width, which.is.joint ? which.width : which.value_width);
  }

  Held<Element> keys, more, own_values;
  CacheView values;
};

template <class Element>
struct Attention {
  explicit Attention(const Case& of) : which(of), random(5), cache(random, of) {
    const std::int64_t rows = of.batch * of.key_heads * of.group * of.tokens;
    query = random_values<Element>(random, rows * (of.width + of.more), 1);
    sinks = random_values<float>(random, of.key_heads * of.group, 1);
    mask.resize(static_cast<std::size_t>(of.batch * of.tokens * of.positions));
    for (std::uint8_t& seen : mask) seen = random() % 3 == 0 ? 0 : 1;
    if (of.is.masked) std::fill_n(mask.begin(), of.positions, std::uint8_t{0});  // the first token sees nothing
  }

  std::vector<Element> output() const {
    const std::int64_t rows = which.batch * which.tokens * which.key_heads * which.group;
    return std::vector<Element>(static_cast<std::size_t>(rows * cache.values.width));
  }

  AttentionArguments arguments(std::vector<Element>& out) const {
    return {.query = query.data(),
            .keys = cache.keys.view,
            .more_keys = cache.more.view,
            .values = cache.values,
            .mask = which.is.masked ? mask.data() : nullptr,
            .mask_batch = which.tokens * which.positions,
            .mask_token = which.positions,
            .sinks = which.is.sinks ? sinks.data() : nullptr,
            .out = out.data(),
            .batch = which.batch,
            .key_heads = which.key_heads,
            .group = which.group,
            .tokens = which.tokens,
            .positions = which.positions,
            .scale = 0.2F};
  }

  Case which;
  std::mt19937 random;
  Cache<Element> cache;
  std::vector<Element> query;
  std::vector<float> sinks;
  std::vector<std::uint8_t> mask;
};

template <class Element>
Call dense_call(std::shared_ptr<const AttentionKernel> kernel, const Case& which) {
  const auto attention = std::make_shared<Attention<Element>>(which);
  return {.name = name_of("forward", which), .run = [=](Engine& engine, int) {
            std::vector<Element> out = attention->output();
            kernel->forward(engine, attention->arguments(out));
            Written written;
            append(written, out);
            return written;
          }};
}

// Sequences of unequal lengths: where pages of each are, the last ones first, and as many as they need.
struct Table {
  explicit Table(const Case& which) : most((which.positions + kPagePositions - 1) / kPagePositions) {
    pages.resize(static_cast<std::size_t>(which.batch * most));
    for (std::int64_t sequence = which.batch - 1; sequence >= 0; --sequence) {
      const std::int64_t length = std::max(which.tokens, which.positions / (sequence + 1));
      lengths.insert(lengths.begin(), length);
      for (std::int64_t at = (length - 1) / kPagePositions; at >= 0; --at) {
        pages[static_cast<std::size_t>(sequence * most + at)] = static_cast<std::int32_t>(count++);
      }
    }
  }

  std::int64_t most;
  std::int64_t count = 0;
  std::vector<std::int32_t> pages;
  std::vector<std::int64_t> lengths;
};

template <class Element>
Call paged_call(std::shared_ptr<const AttentionKernel> kernel, const Case& which) {
  const auto attention = std::make_shared<Attention<Element>>(which);
  const Table table(which);
  Case in_pages = which;
  in_pages.batch = table.count, in_pages.positions = kPagePositions;
  const auto memory = std::make_shared<Attention<Element>>(in_pages);
  return {.name = name_of("paged", which), .run = [=](Engine& engine, int) {
            std::vector<Element> out = attention->output();
            AttentionArguments arguments = attention->arguments(out);
            arguments.keys = memory->cache.keys.view;
            arguments.more_keys = memory->cache.more.view;
            arguments.values = memory->cache.values;
            arguments.lengths = table.lengths.data();
            arguments.pages = table.pages.data(), arguments.pages_of_sequence = table.most;
            kernel->forward(engine, arguments);
            Written written;
            append(written, out);
            return written;
          }};
}

// Lists of positions, of every length from none to all. Two rows of the batch read one sequence, and two lists are of
// one key head.
template <class Element>
Call chosen_call(std::shared_ptr<const AttentionKernel> kernel, const Case& which) {
  const auto attention = std::make_shared<Attention<Element>>(which);
  Case asking = which;
  asking.batch *= 2, asking.key_heads *= 2, asking.tokens = 1;
  const auto asked = std::make_shared<Attention<Element>>(asking);
  const auto heads = static_cast<std::size_t>(asking.batch * asking.key_heads);
  const auto most = static_cast<std::size_t>(which.positions);
  std::vector<std::int32_t> lists(heads * most), counts(heads);
  for (std::size_t head = 0; head < heads; ++head) {
    counts[head] = static_cast<std::int32_t>(head * most / (heads - 1));
    for (std::size_t each = 0; each < most; ++each) lists[head * most + each] = static_cast<std::int32_t>(each);
  }
  return {.name = name_of("chosen", which), .run = [=](Engine& engine, int) {
            std::vector<Element> out = asked->output();
            AttentionArguments arguments = asked->arguments(out);
            arguments.keys = attention->cache.keys.view;
            arguments.more_keys = attention->cache.more.view;
            arguments.values = attention->cache.values;
            arguments.mask = nullptr;
            arguments.chosen = lists.data(), arguments.counts = counts.data();
            arguments.sequences = 2, arguments.choosers = 2;
            kernel->forward(engine, arguments);
            Written written;
            append(written, out);
            return written;
          }};
}

// Codes and scales of one side of a cache, which the kernel writes.
struct Coded {
  Coded(const Case& which, const CacheView& of)
      : codes(static_cast<std::size_t>(which.batch * which.key_heads * which.positions * of.width)),
        scales(static_cast<std::size_t>(of.width == 0 ? 0 : which.batch * which.key_heads * which.positions)),
        view{.data = of.width == 0 ? nullptr : codes.data(),
             .batch = which.key_heads * which.positions * of.width,
             .head = which.positions * of.width,
             .position = of.width,
             .width = of.width,
             .scales = of.width == 0 ? nullptr : scales.data(),
             .scale_batch = which.key_heads * which.positions,
             .scale_head = which.positions,
             .scale_position = 1} {}

  void write(const Int8AttentionKernel& kernel, const Case& which, const CacheView& from) {
    if (from.width == 0) return;
    kernel.quantise({.rows = from.data,
                     .batch_stride = from.batch,
                     .head_stride = from.head,
                     .token_stride = from.position,
                     .codes = view,
                     .batch = which.batch,
                     .heads = which.key_heads,
                     .tokens = which.positions});
  }

  std::vector<std::int8_t> codes;
  std::vector<float> scales;
  CacheView view;
};

template <class Element>
Call int8_call(std::shared_ptr<const Int8AttentionKernel> kernel, Case which, bool in_pages) {
  which.is.joint = false;
  const auto attention = std::make_shared<Attention<Element>>(which);
  const Table table(which);
  Case held = which;
  if (in_pages) held.batch = table.count, held.positions = kPagePositions;
  const auto memory = std::make_shared<Attention<Element>>(held);
  return {.name = name_of(in_pages ? "int8 paged" : "int8", which), .run = [=](Engine& engine, int) {
            const Cache<Element>& cache = memory->cache;
            Coded keys(held, cache.keys.view), more(held, cache.more.view), values(held, cache.values);
            keys.write(*kernel, held, cache.keys.view);
            more.write(*kernel, held, cache.more.view);
            values.write(*kernel, held, cache.values);
            std::vector<Element> out = attention->output();
            AttentionArguments arguments = attention->arguments(out);
            arguments.keys = keys.view, arguments.more_keys = more.view, arguments.values = values.view;
            if (in_pages) {
              arguments.lengths = table.lengths.data();
              arguments.pages = table.pages.data(), arguments.pages_of_sequence = table.most;
            }
            kernel->forward(engine, arguments);
            Written written;
            append(written, out), append(written, keys.codes), append(written, values.scales);
            return written;
          }};
}

// The index of a cache's keys, made in two steps, and what it chooses.
template <class Element>
Call index_call(std::shared_ptr<const SparseAttentionKernel> kernel, const Case& which, KeyFormat format, bool shared) {
  const auto attention = std::make_shared<Attention<Element>>(which);
  const std::int64_t width = which.width + which.more, heads = which.batch * which.key_heads;
  const KeyLayout layout{format, width};
  const std::int64_t capacity = (which.positions + 15) / 16;
  std::mt19937 random(6);
  const auto mean = random_values<float>(random, heads * width, 0.1F);
  std::vector<float> signs(static_cast<std::size_t>(width));
  for (float& sign : signs) sign = random() % 2 == 0 ? 1.0F : -1.0F;
  const std::int64_t k = 20, sink = 3, local = 4, most = std::min(which.positions, k + sink + local);
  const std::int64_t lists = which.batch * which.tokens * which.key_heads * (shared ? 1 : which.group);
  return {.name = name_of(shared ? "index shared" : "index", which), .run = [=](Engine& engine, int) {
            std::vector<std::uint8_t> blocks(static_cast<std::size_t>(heads * capacity * block_bytes(layout)));
            std::vector<weight_format::fp16> scales(static_cast<std::size_t>(heads * capacity * 16));
            const IndexView index{blocks.data(), scales.data(), mean.data(), signs.data(), capacity, layout};
            const Cache<Element>& cache = attention->cache;
            const std::int64_t half = which.positions / 2;
            for (const auto& [begin, end] : {std::pair{std::int64_t{0}, half}, std::pair{half, which.positions}}) {
              kernel->encode(engine, {.keys = cache.keys.view,
                                      .more_keys = cache.more.view,
                                      .index = index,
                                      .batch = which.batch,
                                      .key_heads = which.key_heads,
                                      .begin = begin,
                                      .end = end});
            }
            std::vector<std::int32_t> positions(static_cast<std::size_t>(lists * most), -1);
            std::vector<std::int32_t> counts(static_cast<std::size_t>(lists));
            kernel->select(engine, {.query = attention->query.data(),
                                    .index = index,
                                    .mask = which.is.masked ? attention->mask.data() : nullptr,
                                    .mask_batch = which.tokens * which.positions,
                                    .mask_token = which.positions,
                                    .positions = positions.data(),
                                    .counts = counts.data(),
                                    .batch = which.batch,
                                    .key_heads = which.key_heads,
                                    .group = which.group,
                                    .tokens = which.tokens,
                                    .length = which.positions,
                                    .most = most,
                                    .scale = 0.2F,
                                    .k = k,
                                    .sink = sink,
                                    .local = local,
                                    .shared = shared});
            Written written;
            append(written, blocks), append(written, scales), append(written, counts);
            for (std::int64_t list = 0; list < lists; ++list) {  // values past its count are not defined
              const auto at = positions.begin() + list * most;
              append(written, std::vector<std::int32_t>(at, at + counts[static_cast<std::size_t>(list)]));
            }
            return written;
          }};
}

template <class Entry, class Add>
std::vector<Call> of_cases(const Entry& entry, const Facts& facts, const Add& add) {
  std::vector<Call> calls;
  with_element(facts.element, [&]<class Element>(Element element) {
    if constexpr (!std::is_same_v<Element, double>) {
      const auto kernel = std::shared_ptr(entry.make());
      for (const Case& which : kCases) add(calls, kernel, which, element);
    }
  });
  return calls;
}

constexpr auto kDense = [](std::vector<Call>& calls, const auto& kernel, const Case& which, auto element) {
  using Element = decltype(element);
  calls.push_back(dense_call<Element>(kernel, which));
  calls.push_back(paged_call<Element>(kernel, which));
  if (which.tokens == 1) calls.push_back(chosen_call<Element>(kernel, which));
};

}  // namespace

std::vector<Call> calls_of(const AttentionEntry& entry, const Facts& facts) {
  return of_cases(entry, facts, kDense);
}

std::vector<Call> calls_of(const Int8AttentionEntry& entry, const Facts& facts) {
  return of_cases(entry, facts, [](std::vector<Call>& calls, const auto& kernel, const Case& which, auto element) {
    for (const bool in_pages : {false, true}) {
      calls.push_back(int8_call<decltype(element)>(kernel, which, in_pages));
    }
  });
}

std::vector<Call> calls_of(const SparseAttentionEntry& entry, const Facts& facts) {
  return of_cases(entry, facts, [](std::vector<Call>& calls, const auto& kernel, const Case& which, auto element) {
    kDense(calls, kernel, which, element);
    for (const KeyFormat format : {KeyFormat::kInt4, KeyFormat::kSign}) {
      for (const bool shared : {false, true}) {
        calls.push_back(index_call<decltype(element)>(kernel, which, format, shared));
      }
    }
  });
}

}  // namespace stress
