// The part of a cache that attention's mask leaves visible: padding before a sequence, what a window has left behind,
// and the room of a step at fixed addresses for positions that are not there yet are not read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "ktc/attention_plan.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The same attention, of each sequence over the positions from the first that a row sees to the last that any row of
// the batch sees, `element` bytes each value; lengths that are given stay. `lengths` is their memory. No longer than
// the longest sequence, and without a mask where all rows of one token see all of their positions.
inline AttentionArguments seen_alone(AttentionArguments arguments, std::int64_t element,
                                     std::vector<std::int64_t>& lengths) {
  if (arguments.chosen != nullptr) return arguments;
  if (arguments.lengths != nullptr) {
    const std::int64_t longest = *std::max_element(arguments.lengths, arguments.lengths + arguments.batch);
    if (arguments.mask != nullptr) arguments.mask += arguments.positions - longest;
    arguments.positions = longest;
  }
  if (arguments.mask == nullptr) return arguments;
  const std::int64_t positions = arguments.positions;
  const auto row_of = [&](std::int64_t batch, std::int64_t token) {
    return arguments.mask + batch * arguments.mask_batch + token * arguments.mask_token;
  };
  const auto place = [](const void* at, const std::uint8_t* row) {
    return static_cast<std::int64_t>(static_cast<const std::uint8_t*>(at) - row);
  };
  if (arguments.lengths == nullptr) {
    const auto count = static_cast<std::size_t>(positions);
    std::int64_t end = 0;
    lengths.assign(static_cast<std::size_t>(arguments.batch), positions);  // first positions, until all are known
    for (std::int64_t batch = 0; batch < arguments.batch; ++batch) {
      std::int64_t& first = lengths[static_cast<std::size_t>(batch)];
      for (std::int64_t token = 0; token < arguments.tokens; ++token) {
        const std::uint8_t* row = row_of(batch, token);
        const void* seen = std::memchr(row, 1, count);
        if (seen == nullptr) continue;
        first = std::min(first, place(seen, row));
        end = std::max(end, place(memrchr(row, 1, count), row) + 1);
      }
    }
    if (end == 0) return arguments;
    std::int64_t longest = 1;  // of a sequence that sees nothing, the last position is read and hidden
    for (std::int64_t& length : lengths) longest = std::max(longest, length = std::max<std::int64_t>(end - length, 1));
    const std::int64_t first = end - longest;
    const auto from_first = [&](CacheView& view) {
      if (view.data == nullptr) return;
      view.data = static_cast<const std::byte*>(view.data) + first * view.position * element;
      if (view.scales != nullptr) view.scales += first * view.scale_position;
    };
    from_first(arguments.keys);
    from_first(arguments.more_keys);
    from_first(arguments.values);
    arguments.mask += first;
    arguments.positions = longest;
    arguments.lengths = lengths.data();
  }
  bool all = arguments.tokens == 1;
  for (std::int64_t batch = 0; all && batch < arguments.batch; ++batch) {
    const std::int64_t length = length_of(arguments, batch);
    const std::uint8_t* row = row_of(batch, 0) + arguments.positions - length;
    all = std::memchr(row, 0, static_cast<std::size_t>(length)) == nullptr;
  }
  if (all) arguments.mask = nullptr;
  return arguments;
}

// Throws std::out_of_range where a cache in pages has a sequence that is shorter than the tokens or longer than its
// `most` pages, or a page of which no view has one: the smallest has `page_count`. Lists of positions know no pages.
inline void require_pages(const AttentionArguments& arguments, std::int64_t most, std::int64_t page_count) {
  if (arguments.pages == nullptr) return;
  if (arguments.chosen != nullptr) throw std::invalid_argument("lists of positions in pages");
  for (std::int64_t batch = 0; batch < arguments.batch; ++batch) {
    const std::int64_t length = length_of(arguments, batch);
    const std::int32_t* pages = arguments.pages + batch * arguments.pages_of_sequence;
    const std::int64_t count = (length + kPagePositions - 1) / kPagePositions;
    if (length < arguments.tokens || length > arguments.positions || count > most) {
      throw std::out_of_range("a length that a sequence in pages cannot have");
    }
    for (std::int64_t index = 0; index < count; ++index) {
      if (pages[index] < 0 || pages[index] >= page_count)
        throw std::out_of_range("a page that the cache does not have");
    }
  }
}

}  // namespace ktc::inline KTC_UNIT
