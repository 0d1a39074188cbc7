// Where the keys and values of a cache are, and fetching them into a core's caches before attention reads them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ktc/interface/attention.hpp"
#include "ktc/prefetch.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// Returns the view whose position 0 is `position` of this one, of numbers of this type. `pages` are those of its
// sequence; null where positions follow each other.
template <class Stored>
CacheView view_from(const CacheView& view, const std::int32_t* pages, std::int64_t position) {
  CacheView moved = view;
  if (view.data == nullptr) return moved;
  const std::int64_t page = pages == nullptr ? 0 : pages[position / kPagePositions];
  const std::int64_t within = pages == nullptr ? position : position % kPagePositions;
  moved.data = static_cast<const Stored*>(view.data) + page * view.batch + within * view.position;
  if (view.scales != nullptr) moved.scales = view.scales + page * view.scale_batch + within * view.scale_position;
  return moved;
}

// The keys and values of one key head: `data` of each view is its position 0, or that of page 0.
struct HeadViews {
  CacheView keys;
  CacheView rope_keys;
  CacheView values;
  const std::int32_t* pages = nullptr;

  // Whether values are elements of the keys.
  bool is_joint() const { return values.data == keys.data; }

  // The views whose position 0 is the first one of a block, for positions of that block.
  template <class Stored>
  HeadViews of_block(std::int64_t block) const {
    return {view_from<Stored>(keys, pages, block), view_from<Stored>(rope_keys, pages, block),
            view_from<Stored>(values, pages, block)};
  }
};

// Rows of a cache at neighbouring positions.
template <class Element>
struct AdjoiningRows {
  const Element* data;
  std::int64_t stride;

  static AdjoiningRows of(const CacheView& view) { return {static_cast<const Element*>(view.data), view.position}; }

  const Element* operator[](std::int64_t row) const { return data + row * stride; }
  AdjoiningRows from(std::int64_t row) const { return {data + row * stride, stride}; }
};

// Pieces of a cache that follow each other: `count` of `bytes` each, `stride` bytes apart.
struct CachePieces {
  const char* next = nullptr;
  std::int64_t stride = 0;
  std::int64_t bytes = 0;
  std::int64_t count = 0;
};

// The order in which keys and values are fetched: block by block the keys, their second part, the values. Rows that
// adjoin are cut into pieces of four lines, which come evenly; others are a piece each.
template <class Element, std::int64_t kBlock>
class CacheOrder {
 public:
  // For heads with the strides of this one.
  explicit CacheOrder(const HeadViews& head) : strides_(head), joint_(head.is_joint()) {}

  // The number of pieces of the first positions of a block.
  std::int64_t pieces_of(std::int64_t positions) const {
    const std::int64_t more = strides_.rope_keys.width > 0 ? count_of(strides_.rope_keys, positions) : 0;
    return count_of(strides_.keys, positions) + more + (joint_ ? 0 : count_of(strides_.values, positions));
  }

  // How many are ahead of their use. Three eighths of a block's pieces are 24 KB of 128 bf16: with a quarter AVX2 took
  // 1.06 to 1.1 times as long. Joint rows are read while scores are computed and again from L2, and keys in two parts
  // are read side by side, so all of a block's are ahead.
  std::int64_t lead() const {
    const std::int64_t whole = pieces_of(kBlock);
    return joint_ || strides_.rope_keys.width > 0 ? whole : whole * 3 / 8;
  }

  // Positions [begin, end) of a key head are read after those given so far, of which at most one split has some left.
  void follow(const HeadViews& head, std::int64_t begin, std::int64_t end) { next_ = {head, begin, end}; }

  // The pieces that are next; none where nothing follows. Not inlined: it is called once for all of a part's pieces.
  [[gnu::noinline]] CachePieces next() {
    if (now_.block >= now_.end) {
      now_ = next_;
      next_.block = next_.end;
      if (now_.block >= now_.end) return {};
    }
    const std::int64_t block = now_.block, rows = std::min(kBlock, now_.end - block);
    const CacheView& view = part_ == Part::kKeys       ? now_.head.keys
                            : part_ == Part::kRopeKeys ? now_.head.rope_keys
                                                       : now_.head.values;
    advance();
    return pieces(view_from<Element>(view, now_.head.pages, block), rows);
  }

 private:
  static constexpr std::int64_t kSize = sizeof(Element);
  static constexpr std::int64_t kPiece = 4 * kCacheLine;
  enum class Part { kKeys, kRopeKeys, kValues };

  struct Split {
    HeadViews head{};
    std::int64_t block = 0;  // where the block begins whose pieces are next
    std::int64_t end = 0;
  };

  static std::int64_t count_of(const CacheView& view, std::int64_t rows) {
    return view.position == view.width ? (rows * view.width * kSize + kPiece - 1) / kPiece : rows;
  }

  static CachePieces pieces(const CacheView& view, std::int64_t rows) {
    const auto* const data = static_cast<const char*>(view.data);
    const std::int64_t count = count_of(view, rows);
    if (view.position == view.width) return {data, kPiece, kPiece, count};
    return {data, view.position * kSize, view.width * kSize, count};
  }

  void advance() {
    if (part_ == Part::kKeys && now_.head.rope_keys.width > 0) {
      part_ = Part::kRopeKeys;
    } else if (part_ != Part::kValues && !joint_) {
      part_ = Part::kValues;
    } else {
      part_ = Part::kKeys;
      now_.block += kBlock;
    }
  }

  HeadViews strides_;
  bool joint_;
  Part part_ = Part::kKeys;  // that is next
  Split now_;
  Split next_;
};

// Fetches keys and values in the order in which attention reads them, a piece at a time, evenly over the computation.
// On Zen 5 a core drops prefetches while its buffers are full. So a block at once came to 12 GB/s of 41 at any
// distance; evenly spread it comes to 33.
//
// Products copy it, so that its numbers are in registers. With the order of the rows in it, 568 bytes, copies took a
// tenth of the time of int8 codes from L2. All of it is
// inlined: a call for each piece would save the sums that the caller has in registers.
template <class Element, std::int64_t kBlock>
class CacheAhead {
 public:
  using Order = CacheOrder<Element, kBlock>;

  explicit CacheAhead(Order& order) : order_(&order), owed_(order.lead()) {}

  // See `CacheOrder`.
  void follow(const HeadViews& head, std::int64_t begin, std::int64_t end) {
    order_->follow(head, begin, end);
    if (now_.count == 0) now_ = order_->next();
  }

  // A block of `positions` is computed, and its work is `work` in the units of `step`.
  void start_block(std::int64_t positions, std::int64_t work) {
    while (owed_ > 0 && now_.count > 0) fetch();
    const std::int64_t pieces = order_->pieces_of(positions);
    owed_ += pieces;
    pace_ = pieces * kOne / work + 1;
    progress_ = 0;
  }

  // See `ListedAhead`: here all is fetched by `step`.
  void from_memory(bool) {}
  template <int kRows, class Rows>
  [[gnu::always_inline]] void fetch(const Rows&, std::int64_t, std::int64_t, std::int64_t) const {}

  // `work` units are done next.
  [[gnu::always_inline]] void step(std::int64_t work) {
    for (progress_ += work * pace_; progress_ >= kOne; progress_ -= kOne) {
      if (owed_ > 0 && now_.count > 0) fetch();
    }
  }

 private:
  static constexpr std::int64_t kOne = 1 << 16;

  [[gnu::always_inline]] void fetch() {
    const char* const begin = now_.next;
    if (into_l2_) {
      for (std::int64_t line = 0; line < now_.bytes; line += kCacheLine) __builtin_prefetch(begin + line, 0, 2);
    } else {
      for (std::int64_t line = 0; line < now_.bytes; line += kCacheLine) __builtin_prefetch(begin + line, 0, 3);
    }
    now_.next += now_.stride;
    --owed_;
    if (--now_.count == 0) now_ = order_->next();
  }

  Order* order_;
  bool into_l2_ = fetches_into_l2();
  std::int64_t owed_;  // pieces to be fetched before the block ends that is computed
  std::int64_t pace_ = 0;
  std::int64_t progress_ = 0;
  CachePieces now_;
};

}  // namespace ktc::inline KTC_UNIT
