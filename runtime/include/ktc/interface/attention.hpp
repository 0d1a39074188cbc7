// Kernels of attention of a few new tokens over a cache: of numbers, of codes, and of positions that an index chooses.
#pragma once

#include <cstdint>
#include <memory>

#include "ktc/interface/engine.hpp"

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
};

// query (batch, key heads, rows, keys.width + rope_keys.width) is contiguous, where the rows of a key head are its
// query heads and their tokens; out (batch, tokens, query heads, values.width) is too. Without a mask, the new tokens
// are the last positions and see those up to their own. mask (batch, tokens, positions) has a byte for each, 0 where it
// is not seen, and strides of its first two dimensions; sinks (query heads) are further scores without a value.
//
// Sequences of other lengths than the longest are aligned at their last position, where a mask has them too.
struct AttentionArguments {
  const void* query = nullptr;
  CacheView keys;
  CacheView rope_keys;
  CacheView values;
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_batch = 0;
  std::int64_t mask_token = 0;
  const float* sinks = nullptr;
  void* out = nullptr;
  std::int64_t batch = 0;
  std::int64_t key_heads = 0;
  std::int64_t group = 0;  // query heads of a key head
  std::int64_t tokens = 0;
  std::int64_t positions = 0;
  float scale = 1.0f;
  // How many of the last positions are each sequence's own, (batch), from 1 to `positions`: others are not read.
  // Without a mask at least `tokens`. Null for all.
  const std::int64_t* lengths = nullptr;
  // Of a cache in pages, the pages of every sequence, (batch, longest): its position 0 is the first of its first page.
  // Then `lengths` is not null.
  const std::int32_t* pages = nullptr;
  std::int64_t pages_of_sequence = 0;  // from one sequence to the next
  std::int64_t most_pages = 0;         // that a sequence may have
  std::int64_t num_pages = 0;          // of the cache
  // Lists (batch, key heads, positions), of which the first counts (batch, key heads) are attended to; null for all
  // positions of the cache. Then there is one token and no mask, `sequences` neighbours of the batch share a sequence
  // of the cache, and `selectors_per_kv_head` neighbours of the key heads share a key head of it.
  const std::int32_t* chosen = nullptr;
  const std::int32_t* counts = nullptr;
  std::int64_t sequences = 1;
  std::int64_t selectors_per_kv_head = 1;
  std::int64_t element_bytes = 0;  // of a value of the cache
};

class AttentionKernel {
 public:
  virtual ~AttentionKernel();
  virtual void forward(Engine& engine, const AttentionArguments& arguments) const = 0;
};

struct AttentionEntry {
  const char* name;
  std::unique_ptr<AttentionKernel> (*make)();
};

// Codes of 8 bits
// ------------------------------------------------------------------------------------------------------ Keys or values
// (batch, heads, tokens, width) to be written as codes, with the strides of their first three dimensions. `codes` and
// its scales are written.
struct QuantiseArguments {
  const void* rows = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
  CacheView codes;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t tokens = 0;
};

class Int8AttentionKernel : public AttentionKernel {
 public:
  virtual void quantise(const QuantiseArguments& arguments) const = 0;
};

struct Int8AttentionEntry {
  const char* name;
  std::unique_ptr<Int8AttentionKernel> (*make)();
};

// An index of keys
// -----------------------------------------------------------------------------------------------------
enum class KeyFormat : int { kInt4, kSign };

// The sizes of a key's codes.
struct KeyLayout {
  KeyFormat format;
  std::int64_t width;
};

// Blocks (batch, key heads, capacity, bytes of a block) and scales (batch, key heads, 16 capacity) are contiguous; a
// block has the codes of 16 positions. `mean` (batch, key heads, width) is what keys are centred by.
struct IndexView {
  std::uint8_t* blocks = nullptr;
  void* scales = nullptr;  // fp16
  const float* mean = nullptr;
  const float* signs = nullptr;
  std::int64_t capacity = 0;
  KeyLayout layout{};
};

// Adds the keys at [begin, end) to an index. A key may be in two parts.
struct EncodeArguments {
  CacheView keys;
  CacheView rope_keys;
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

class SparseAttentionKernel : public AttentionKernel {
 public:
  virtual void encode(Engine& engine, const EncodeArguments& arguments) const = 0;
  virtual void select(Engine& engine, const SelectArguments& arguments) const = 0;
};

struct SparseAttentionEntry {
  const char* name;
  std::unique_ptr<SparseAttentionKernel> (*make)();
};

}  // namespace ktc
