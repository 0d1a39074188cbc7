// The part of a cache that attention's mask leaves visible. A decoding step at fixed addresses has room for positions
// that are not there yet; it reads them no more than a cache without room would.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ktc/attention_plan.hpp"

namespace ktc::step {

// The same attention over the positions from the first to the last that a row sees, `element` bytes each value. Without
// a mask where all rows of one token see all of these.
inline AttentionArguments seen_alone(AttentionArguments arguments, std::int64_t element) {
  if (arguments.mask == nullptr) return arguments;
  std::int64_t first = arguments.positions, end = 0;
  const auto for_each_row = [&](auto&& body) {
    for (std::int64_t batch = 0; batch < arguments.batch; ++batch) {
      for (std::int64_t token = 0; token < arguments.tokens; ++token) {
        body(arguments.mask + batch * arguments.mask_batch + token * arguments.mask_token);
      }
    }
  };
  for_each_row([&](const std::uint8_t* row) {
    const void* seen = std::memchr(row, 1, static_cast<std::size_t>(arguments.positions));
    if (seen == nullptr) return;
    first = std::min(first, static_cast<std::int64_t>(static_cast<const std::uint8_t*>(seen) - row));
    const void* last = memrchr(row, 1, static_cast<std::size_t>(arguments.positions));
    end = std::max(end, static_cast<std::int64_t>(static_cast<const std::uint8_t*>(last) - row) + 1);
  });
  if (first >= end) return arguments;
  bool all = arguments.tokens == 1;
  const auto count = static_cast<std::size_t>(end - first);
  for_each_row([&](const std::uint8_t* row) { all = all && std::memchr(row + first, 0, count) == nullptr; });
  const auto from_first = [&](CacheView& view) {
    if (view.data == nullptr) return;
    view.data = static_cast<const std::byte*>(view.data) + first * view.position * element;
    if (view.scales != nullptr) view.scales += first * view.scale_position;
  };
  from_first(arguments.keys);
  from_first(arguments.more_keys);
  from_first(arguments.values);
  arguments.mask = all ? nullptr : arguments.mask + first;
  arguments.positions = end - first;
  return arguments;
}

}  // namespace ktc::step
