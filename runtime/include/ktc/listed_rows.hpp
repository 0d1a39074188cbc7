// Rows of a cache at the positions of a list, read where they are, and fetched ahead of their use.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Row i is at the i-th position of the list.
template <class Element>
struct ListedRows {
  const Element* data;
  std::int64_t stride;
  const std::int32_t* positions;
  std::int64_t count;  // of the list's positions

  [[gnu::always_inline]] const Element* operator[](std::int64_t row) const { return data + positions[row] * stride; }
  ListedRows from(std::int64_t row) const { return {data, stride, positions + row, count - row}; }
};

// Fetches rows of lists into L1, kBytes of rows before they are read, a row for each one that is read: no processor
// predicts their addresses. On Zen 5, keys and values of 256 bytes, a step of attention takes 2.1 ms so, 2.5 where all
// rows are fetched evenly over the computation, as by `CacheAhead`, and 3.5 where they were fetched a block ahead into
// L2 and copied.
template <class Element>
class ListedAhead {
 public:
  // A position has `width` numbers of keys.
  explicit ListedAhead(std::int64_t width)
      : rows_(std::max<std::int64_t>(kLeast, kBytes / (width * static_cast<std::int64_t>(sizeof(Element))))) {}

  // Whether the rows that are read next come from memory. Those that another tile has read do not.
  void from_memory(bool whether) { active_ = whether; }

  // Columns [begin, end) of kRows rows from `row` on are read next.
  template <int kRows>
  [[gnu::always_inline]] void fetch(const ListedRows<Element>& rows, std::int64_t row, std::int64_t begin,
                                    std::int64_t end) const {
    asm volatile("");  // GCC drops a function that only prefetches
    if (!active_) return;
#pragma GCC unroll 4
    for (int index = 0; index < kRows; ++index) {
      const Element* ahead = rows[std::min(row + index + rows_, rows.count - 1)];
      const auto* line = reinterpret_cast<const char*>(ahead + begin);
      line -= reinterpret_cast<std::uintptr_t>(line) % kCacheLine;
      for (; line < reinterpret_cast<const char*>(ahead + end); line += kCacheLine) __builtin_prefetch(line, 0, 3);
    }
  }

  void step(std::int64_t) const {}

 private:
  static constexpr std::int64_t kBytes = 10240;
  static constexpr std::int64_t kLeast = 8;

  std::int64_t rows_;  // ahead
  bool active_ = true;
};

}  // namespace ktc::inline KTC_UNIT
