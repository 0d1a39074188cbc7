// Bring the next weight panel into L2 while the current one is multiplied.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ktc {

inline constexpr std::int64_t kCacheLine = 64;

// Bring what an epilogue will read or add to while the product before it is computed: rows of different tokens lie far
// apart, so that no hardware prefetcher foresees them.
template <class T>
void prefetch_row(const T* row, std::int64_t size) {
  const auto* begin = reinterpret_cast<const char*>(row);
  for (const char* line = begin; line < reinterpret_cast<const char*>(row + size); line += kCacheLine) {
    __builtin_prefetch(line, 0, 3);
  }
}

// Where a panel lies: `chunks` stretches of `chunk_bytes`, `stride_bytes` apart. A stored panel is one long stretch; a
// panel of the transposed weights gathers one 32 x 32 block from every stored panel.
struct PanelLocation {
  const char* base = nullptr;
  std::int64_t chunks = 0;
  std::int64_t chunk_bytes = 0;
  std::int64_t stride_bytes = 0;
};

// Walks a panel's cache lines evenly: `lines_per_step` at each of the micro-kernel's steps.
class Prefetcher {
 public:
  Prefetcher() = default;
  Prefetcher(const PanelLocation& panel, std::int64_t steps)
      : line_(panel.base),
        chunk_end_(panel.base + panel.chunk_bytes),
        lines_left_(panel.chunks * panel.chunk_bytes / kCacheLine),
        gap_(panel.stride_bytes - panel.chunk_bytes),
        chunk_bytes_(panel.chunk_bytes),
        lines_per_step_((lines_left_ + steps - 1) / steps) {}

  [[gnu::always_inline]] void step() {
    const std::int64_t lines = std::min(lines_per_step_, lines_left_);
    lines_left_ -= lines;
    for (std::int64_t line = 0; line < lines; ++line) {
      __builtin_prefetch(line_, 0, 2);
      line_ += kCacheLine;
      if (line_ == chunk_end_) {
        line_ += gap_;
        chunk_end_ = line_ + chunk_bytes_;
      }
    }
  }

 private:
  const char* line_ = nullptr;
  const char* chunk_end_ = nullptr;
  std::int64_t lines_left_ = 0;
  std::int64_t gap_ = 0;
  std::int64_t chunk_bytes_ = 0;
  std::int64_t lines_per_step_ = 0;
};

}  // namespace ktc
