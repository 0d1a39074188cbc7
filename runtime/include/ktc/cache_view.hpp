// Where the keys and values of a cache are, and fetching them into a core's caches before attention reads them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/prefetch.hpp"

namespace ktc {

// Positions of a page of a cache: those of a block of scores, so a block is in one page.
inline constexpr std::int64_t kPagePositions = 128;

// (batch, key heads, positions, width); the elements of a position are neighbours. Strides count elements. Of codes,
// `scales` (batch, key heads, positions) has a factor for each position, with strides of its own. Of a cache in pages,
// the first dimension is pages instead of sequences, each of kPagePositions.
struct CacheView {
  const void* data = nullptr;
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t position = 0;
  std::int64_t width = 0;
  const float* scales = nullptr;
  std::int64_t scale_batch = 0;
  std::int64_t scale_head = 0;
  std::int64_t scale_position = 0;

  // The view whose position 0 is `position` of this one, of numbers of this type. `pages` are those of its sequence;
  // null where positions follow each other.
  template <class Stored>
  CacheView from(const std::int32_t* pages, std::int64_t position) const {
    CacheView moved = *this;
    if (data == nullptr) return moved;
    const std::int64_t page = pages == nullptr ? 0 : pages[position / kPagePositions];
    const std::int64_t within = pages == nullptr ? position : position % kPagePositions;
    moved.data = static_cast<const Stored*>(data) + page * batch + within * this->position;
    if (scales != nullptr) moved.scales = scales + page * scale_batch + within * scale_position;
    return moved;
  }
};

// The keys and values of one key head: `data` of each view is its position 0, or that of page 0.
struct HeadViews {
  CacheView keys;
  CacheView more_keys;
  CacheView values;
  const std::int32_t* pages = nullptr;

  // Whether values are elements of the keys.
  bool is_joint() const { return values.data == keys.data; }

  // The views whose position 0 is the first one of a block, for positions of that block.
  template <class Stored>
  HeadViews of_block(std::int64_t block) const {
    return {keys.from<Stored>(pages, block), more_keys.from<Stored>(pages, block), values.from<Stored>(pages, block)};
  }
};

// Pieces of a cache that follow each other, and how many bytes of each are read.
struct CachePieces {
  const char* next = nullptr;
  std::int64_t stride = 0;
  std::int64_t bytes = 0;
};

// `count` pieces of two such, side by side; the second may have no bytes.
struct CacheRun {
  CachePieces first;
  CachePieces second;
  std::int64_t count = 0;
};

// The order in which attention reads rows of keys and values: block by block the keys, then the values.
template <class Isa, class Element, std::int64_t kBlock>
class CacheOrder {
 public:
  // Of one of the heads; all have its strides.
  explicit CacheOrder(const HeadViews& head)
      : joint_(head.is_joint()),
        rows_(!joint_ && head.more_keys.width == 0 && adjoin(head.keys) && adjoin(head.values)
                  ? std::max<std::int64_t>(1, kPiece / (head.keys.width * kSize))
                  : 1) {}

  // Positions [begin, end) of a key head are read after those given so far, of which at most one stretch has rows left.
  void follow(const HeadViews& head, std::int64_t begin, std::int64_t end) { next_ = {head, begin, end}; }

  bool is_joint() const { return joint_; }

  // The rows of a piece: narrow ones that adjoin are fetched together.
  std::int64_t rows() const { return rows_; }

  // The next run of pieces; none where nothing follows.
  [[gnu::noinline]] CacheRun next() {
    const std::int64_t now = now_.block;
    if (values_) {
      values_ = false;
      now_.block += kBlock;
      return {pieces(now_.head.values, now), {}, count(now)};
    }
    if (now >= now_.end) {
      if (next_.block >= next_.end) return {};
      now_ = next_;
      next_.block = next_.end;
      return next();
    }
    values_ = !joint_;
    if (joint_) now_.block += kBlock;
    return {pieces(now_.head.keys, now), pieces(now_.head.more_keys, now), count(now)};
  }

 private:
  struct Stretch {
    HeadViews head{};
    std::int64_t block = 0;  // where the block begins of which rows are next
    std::int64_t end = 0;
  };

  static constexpr std::int64_t kSize = sizeof(Element);
  static constexpr std::int64_t kPiece = 256;  // bytes

  static bool adjoin(const CacheView& view) { return view.position == view.width; }

  CachePieces pieces(const CacheView& view, std::int64_t position) const {
    const auto* const data = static_cast<const char*>(view.template from<Element>(now_.head.pages, position).data);
    return {data, rows_ * view.position * kSize, rows_ * view.width * kSize};
  }
  std::int64_t count(std::int64_t block) const { return (std::min(kBlock, now_.end - block) + rows_ - 1) / rows_; }

  bool joint_;
  std::int64_t rows_;
  bool values_ = false;  // whether those of the block are next
  Stretch now_;
  Stretch next_;
};

// Fetches rows of keys and values into L1 in the order in which attention reads them, a few rows at each step of the
// computation. On Zen 5 a core drops prefetches while its buffers are full. So a block at once came to 12 GB/s of 41 at
// any distance; evenly spread it comes to 33.
//
// Products copy it, so that its numbers are in registers, and it is small: with the order of the rows in it, 568 bytes,
// copies took a tenth of the time of int8 codes from L2. A template, so that each instruction set has its own copy. All
// of it is inlined: a call would save the sums that the caller has in registers.
template <class Isa, class Element, std::int64_t kBlock>
class CacheAhead {
 public:
  using Order = CacheOrder<Isa, Element, kBlock>;

  // With keys and values apart, three quarters of a block's rows ahead are 24 KB of 128 bf16: with half of them AVX2
  // took 1.06 to 1.1 times as long. Joint rows are read while scores are computed and again from L2: a whole block is
  // ahead, since a block is fetched during all of the last one.
  explicit CacheAhead(Order& order)
      : order_(&order), owed_((order.is_joint() ? kBlock : kBlock * 3 / 4) / order.rows()) {}

  // See `CacheOrder`.
  void follow(const HeadViews& head, std::int64_t begin, std::int64_t end) {
    order_->follow(head, begin, end);
    if (run_.count == 0) run_ = order_->next();
  }

  // A block of `positions` is computed, and its work is `work` in the units of `step`.
  void start_block(std::int64_t positions, std::int64_t work) {
    while (owed_ > 0 && run_.count > 0) fetch_piece();
    const std::int64_t pieces =
        ((order_->is_joint() ? positions : 2 * positions) + order_->rows() - 1) / order_->rows();
    owed_ += pieces;
    pace_ = pieces * kOne / work + 1;
    progress_ = 0;
  }

  // `work` units are done next.
  [[gnu::always_inline]] void step(std::int64_t work) {
    for (progress_ += work * pace_; progress_ >= kOne; progress_ -= kOne) {
      if (owed_ > 0 && run_.count > 0) fetch_piece();
    }
  }

 private:
  static constexpr std::int64_t kOne = 1 << 16;
  static constexpr int kLocality = [] {
    if constexpr (requires { Isa::kStreamLocality; }) return Isa::kStreamLocality;
    return 3;
  }();

  [[gnu::always_inline]] static void fetch(CachePieces& pieces) {
    for (std::int64_t line = 0; line < pieces.bytes; line += kCacheLine) {
      __builtin_prefetch(pieces.next + line, 0, kLocality);
    }
    pieces.next += pieces.stride;
  }

  [[gnu::always_inline]] void fetch_piece() {
    fetch(run_.first);
    if (run_.second.bytes > 0) fetch(run_.second);
    --owed_;
    if (--run_.count == 0) run_ = order_->next();
  }

  Order* order_;
  std::int64_t owed_;  // pieces to be fetched before the block ends that is computed
  std::int64_t pace_ = 0;
  std::int64_t progress_ = 0;
  CacheRun run_{};
};

}  // namespace ktc
