// An index of a cache's keys by codes of few bits: scores of all positions are estimated from it, and the positions of
// the greatest are chosen, exactly and in a fixed order. The number of threads changes no bit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/concepts.hpp"
#include "ktc/key_choice.hpp"
#include "ktc/key_codes.hpp"
#include "ktc/shape.hpp"
#include "ktc/team.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, class Element>
class KeyIndex {
  using Codes = KeyCodes;

 public:
  static void encode(Engine& engine, const EncodeArguments& a) {
    const std::int64_t width = a.index.layout.width, heads = a.batch * a.key_heads;
    const std::int64_t first = a.begin / kKeysTogether, blocks = (a.end - 1) / kKeysTogether + 1 - first;
    if (a.end <= a.begin) return;
    exclusively(engine, [&](const Team& team, Workspace& workspace) {
      Region<float> numbers(team.threads() * round_up(width, kHalfPanel));
      workspace.lay_out(numbers);
      team.run([&](const Worker& worker) {
        float* numbers_of_worker = numbers.data() + worker.index * round_up(width, kHalfPanel);
        for (std::int64_t item = worker.index; item < heads * blocks; item += worker.count) {
          encode_block(a, item / blocks, first + item % blocks, numbers_of_worker);
        }
      });
    });
  }

  static void select(Engine& engine, const SelectArguments& a) { KeyChoice<Isa, Element>::choose(engine, a); }

 private:
  static const Element* row_of(const CacheView& view, std::int64_t key_heads, std::int64_t head, std::int64_t at) {
    return static_cast<const Element*>(view.data) + head / key_heads * view.batch + head % key_heads * view.head +
           at * view.position;
  }

  static void encode_block(const EncodeArguments& a, std::int64_t head, std::int64_t block, float* numbers) {
    const KeyLayout& layout = a.index.layout;
    std::uint8_t* codes = a.index.blocks + (head * a.index.capacity + block) * block_bytes(layout);
    auto* scales =
        static_cast<weight_format::fp16*>(a.index.scales) + (head * a.index.capacity + block) * kKeysTogether;
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
};

}  // namespace ktc::inline KTC_UNIT
