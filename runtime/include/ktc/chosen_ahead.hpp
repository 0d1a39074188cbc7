// Fetching chosen rows of a cache before attention copies them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/cache_view.hpp"
#include "ktc/prefetch.hpp"

namespace ktc {

// Fetches the keys and values of chosen positions into L2, a block ahead, spread over the computation: the counterpart
// of `CacheAhead`. Rows of 256 bytes at random come to 14 GB/s that way and to 9 into L1, for which a core of Zen 5 has
// fewer requests under way.
template <class Isa, class Element, std::int64_t kBlock>
class ChosenAhead {
 public:
  // The positions at [begin, end) of a list are read after those given so far, of which at most one run has some left.
  void follow(const HeadViews& head, const std::int32_t* list, std::int64_t begin, std::int64_t end) {
    next_ = {head, list + begin, list + std::max(begin, end)};
    if (now_.at == now_.end) take_next();
  }

  // A block of `positions` is computed, and its work is `work` in the units of `step`.
  void start_block(std::int64_t positions, std::int64_t work) {
    while (owed_ > 0 && now_.at < now_.end) fetch();
    owed_ += positions;
    pace_ = positions * kPosition / work + 1;
    progress_ = 0;
  }

  // `work` units are done next.
  [[gnu::always_inline]] void step(std::int64_t work) {
    progress_ += work * pace_;
    if (progress_ < kBurst * kPosition) return;
    progress_ -= kBurst * kPosition;
    fetch_burst();
  }

 private:
  static constexpr std::int64_t kPosition = 1 << 16;
  // Positions that are fetched one after the other: on small pages their tables are looked up side by side. One at a
  // time took 1.2 times as long as no fetching there.
  static constexpr std::int64_t kBurst = 8;

  struct Run {
    HeadViews head{};
    const std::int32_t* at = nullptr;
    const std::int32_t* end = nullptr;
  };

  [[gnu::always_inline]] static void fetch_row(const CacheView& view, std::int64_t position) {
    const auto* row = reinterpret_cast<const char*>(static_cast<const Element*>(view.data) + position * view.position);
    const std::int64_t bytes = view.width * static_cast<std::int64_t>(sizeof(Element));
    for (std::int64_t line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(row + line, 0, 2);
  }

  [[gnu::noinline]] void fetch_burst() {
    for (std::int64_t each = 0; each < kBurst && owed_ > 0 && now_.at < now_.end; ++each) fetch();
  }

  void fetch() {
    const std::int64_t position = *now_.at++;
    fetch_row(now_.head.keys, position);
    if (now_.head.more_keys.width > 0) fetch_row(now_.head.more_keys, position);
    if (!now_.head.is_joint()) fetch_row(now_.head.values, position);
    --owed_;
    if (now_.at == now_.end) take_next();
  }

  void take_next() {
    now_ = next_;
    next_.at = next_.end;
  }

  std::int64_t owed_ = kBlock;  // positions to be fetched before the block ends that is computed
  std::int64_t pace_ = 0;
  std::int64_t progress_ = 0;
  Run now_;
  Run next_;
};

}  // namespace ktc
