// What an index of a cache's keys consists of, and the arguments of its calls.
#pragma once

#include <cstdint>

#include "ktc/cache_view.hpp"
#include "ktc/key_codes.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc {

// Blocks (batch, key heads, capacity, bytes of a block) and scales (batch, key heads, 16 capacity) are contiguous; a
// block has the codes of 16 positions. `mean` (batch, key heads, width) is what keys are centred by.
struct IndexView {
  std::uint8_t* blocks = nullptr;
  weight_format::fp16* scales = nullptr;
  const float* mean = nullptr;
  const float* signs = nullptr;
  std::int64_t capacity = 0;
  KeyLayout layout{};
};

// Adds the keys at [begin, end) to an index. A key may be in two parts.
struct EncodeArguments {
  CacheView keys;
  CacheView more_keys;
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

}  // namespace ktc
