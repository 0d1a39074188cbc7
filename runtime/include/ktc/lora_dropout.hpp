// Dropout of the inputs that a product's A reads: the bits of a counter-based generator, so that forward, a forward
// computed again and backward drop the same elements on any number of workers.
//
// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the
// seed of the call; the counter is the block of eight columns, the token, the expert and the product. A block's eight
// numbers of 16 bits are those of its columns. ktc/model/experts/trained/lora_dropout.py has the same numbers in
// PyTorch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ktc/interface/moe.hpp"
#include "ktc/routing.hpp"
#include "ktc/shape.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/workspace.hpp"

namespace ktc::inline KTC_UNIT {

// The product whose inputs are dropped: the last word of the counter.
enum class DroppedProduct : std::uint32_t { kFirst = 0, kDown = 1 };

// Columns of a counter. Rows are whole stretches of `kCounters` counters, and at most `kMostCounters` are drawn at
// once.
inline constexpr std::int64_t kDropBlock = 8;
inline constexpr std::int64_t kCounters = 16;
inline constexpr std::int64_t kMostCounters = 256;

// Ten rounds over `count` counters, of which each array has a word; the results replace them. The loop has no constant
// length, since GCC unrolls such loops before it could vectorise them.
inline void philox(std::uint64_t seed, std::int64_t count, std::uint32_t* __restrict c0, std::uint32_t* __restrict c1,
                   std::uint32_t* __restrict c2, std::uint32_t* __restrict c3) {
  constexpr std::uint32_t kFirstFactor = 0xD2511F53, kSecondFactor = 0xCD9E8D57;
  constexpr int kRounds = 10;
  auto first_key = static_cast<std::uint32_t>(seed), second_key = static_cast<std::uint32_t>(seed >> 32);
  const auto high = [](std::uint32_t factor, std::uint32_t word) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(factor) * word >> 32);
  };
  for (int round = 0; round < kRounds; ++round) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t first = c0[i], second = c2[i];
      c0[i] = high(kSecondFactor, second) ^ c1[i] ^ first_key;
      c1[i] = kSecondFactor * second;
      c2[i] = high(kFirstFactor, first) ^ c3[i] ^ second_key;
      c3[i] = kFirstFactor * first;
    }
    first_key += 0x9E3779B9;
    second_key += 0xBB67AE85;
  }
}

// A byte of ones for each bit that is set, of zeros for each other.
inline std::uint64_t bytes_of_bits(std::uint8_t bits) {
  constexpr std::uint64_t kOnes = 0x0101010101010101;
  const std::uint64_t single = bits * kOnes & 0x8040201008040201;  // bit i in byte i
  return ((single + 0x7f * kOnes) >> 7 & kOnes) * 0xff;
}

// Zeros in place of those of 16 values whose bit is not set.
template <class T>
[[gnu::always_inline]] inline void keep_only(std::uint16_t kept, T* values) {
  using Bits =
      std::conditional_t<sizeof(T) == 2, std::int16_t, std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>>;
  static_assert(sizeof(T) == sizeof(Bits));
  // Eight at a time: a load of both words of bytes would wait for their stores.
  for (std::int64_t first = 0; first < kHalfPanel; first += kDropBlock) {
    const std::uint64_t bytes = bytes_of_bits(static_cast<std::uint8_t>(kept >> first));
    using Bytes [[gnu::vector_size(kDropBlock)]] = std::int8_t;
    using Lanes [[gnu::vector_size(kDropBlock * sizeof(Bits))]] = Bits;
    Bytes masks;
    Lanes lanes;
    std::memcpy(&masks, &bytes, sizeof(masks));
    std::memcpy(&lanes, values + first, sizeof(lanes));
    lanes &= __builtin_convertvector(masks, Lanes);
    std::memcpy(values + first, &lanes, sizeof(lanes));
  }
}

// The kept inputs of one product: a bit for each column of each slot, drawn once in each pass. Nothing is allocated or
// drawn where all are kept.
class KeptInputs {
 public:
  KeptInputs(const LoraFactors& factors, DroppedProduct product, std::int64_t inputs, std::int64_t slots)
      : seed_(static_cast<std::uint64_t>(factors.seed)),
        dropped_(static_cast<std::uint32_t>(factors.dropped)),
        product_(product),
        row_bytes_(round_up(inputs, kDropBlock * kCounters) / kDropBlock),
        kept_S_(drops() && factors.rank > 0 ? slots * row_bytes_ : 0) {}

  bool drops() const { return dropped_ > 0; }
  // Of the 16 columns of half a panel.
  std::uint16_t half(std::int64_t slot, std::int64_t half_panel) const {
    std::uint16_t kept = 0;
    std::memcpy(&kept, kept_S_.data() + slot * row_bytes_ + half_panel * 2, sizeof(kept));
    return kept;
  }

  template <class Visit>
  void regions(const Visit& visit) {
    visit(kept_S_);
  }

  // The bits of the slots of some groups.
  void draw(const Routing& routing, Range groups) const {
    if (kept_S_.count() == 0) return;
    for (const ActiveExpert& active : routing.active_experts()) {
      const std::int64_t last = std::min(groups.end, static_cast<std::int64_t>(active.last_group));
      for (auto index = std::max(groups.begin, static_cast<std::int64_t>(active.first_group)); index < last; ++index) {
        const SlotGroup& group = routing.groups()[static_cast<std::size_t>(index)];
        for (std::int64_t slot = group.first_slot; slot < group.first_slot + group.rows; ++slot) {
          draw_row(routing.token(slot), active.expert, kept_S_.data() + slot * row_bytes_);
        }
      }
    }
  }

 private:
  void draw_row(std::int64_t token, std::int64_t expert, std::uint8_t* kept) const {
    alignas(64) std::uint32_t words[4][kMostCounters];
    for (std::int64_t first = 0; first < row_bytes_; first += kMostCounters) {
      const std::int64_t count = std::min(kMostCounters, row_bytes_ - first);
      for (std::int64_t i = 0; i < count; ++i) {
        words[0][i] = static_cast<std::uint32_t>(first + i);
        words[1][i] = static_cast<std::uint32_t>(token);
        words[2][i] = static_cast<std::uint32_t>(expert);
        words[3][i] = static_cast<std::uint32_t>(product_);
      }
      philox(seed_, count, words[0], words[1], words[2], words[3]);
      bits_of(words, count, kept + first);
    }
  }

  // A bit for each 16 bits of a counter's four words, the lower ones of a word first.
  void bits_of(const std::uint32_t (&words)[4][kMostCounters], std::int64_t count,
               std::uint8_t* __restrict kept) const {
    const std::uint32_t dropped = dropped_;
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t bits = 0;
      for (int word = 0; word < 4; ++word) {
        const std::uint32_t low = words[word][i] & 0xffff, high = words[word][i] >> 16;
        bits |= (low >= dropped ? 1U : 0U) << (2 * word) | (high >= dropped ? 2U : 0U) << (2 * word);
      }
      kept[i] = static_cast<std::uint8_t>(bits);
    }
  }

  std::uint64_t seed_;
  std::uint32_t dropped_;
  DroppedProduct product_;
  std::int64_t row_bytes_;
  Region<std::uint8_t> kept_S_;
};

}  // namespace ktc::inline KTC_UNIT
