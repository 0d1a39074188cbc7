// Dropout of the inputs that a product's A reads: the bits of a counter-based generator, so that forward, a forward
// computed again and backward drop the same elements, whichever worker asks for them.
//
// Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is the
// seed of the call; the counter is the block of eight columns, the token, the expert and the product. A block's eight
// numbers of 16 bits are those of its columns. ktc/model/experts/lora_dropout.py has the same numbers in PyTorch.
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

// Columns of a counter, and counters that are computed together.
inline constexpr std::int64_t kDropBlock = 8;
inline constexpr std::int64_t kCounters = 16;

// The numbers of `kCounters` neighbouring blocks; `words[i]` are word i of each counter, then of each result.
inline void philox(std::uint64_t seed, std::uint32_t (&words)[4][kCounters]) {
  constexpr std::uint64_t kFirstFactor = 0xD2511F53, kSecondFactor = 0xCD9E8D57;
  constexpr int kRounds = 10;
  auto first_key = static_cast<std::uint32_t>(seed), second_key = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (std::int64_t i = 0; i < kCounters; ++i) {
      const std::uint64_t first = kFirstFactor * words[0][i], second = kSecondFactor * words[2][i];
      words[0][i] = static_cast<std::uint32_t>(second >> 32) ^ words[1][i] ^ first_key;
      words[1][i] = static_cast<std::uint32_t>(second);
      words[2][i] = static_cast<std::uint32_t>(first >> 32) ^ words[3][i] ^ second_key;
      words[3][i] = static_cast<std::uint32_t>(first);
    }
    first_key += 0x9E3779B9;
    second_key += 0xBB67AE85;
  }
}

// Zeros in place of those of 16 values whose bit is not set.
template <class T>
[[gnu::always_inline]] inline void keep_only(std::uint16_t kept, T* values) {
  using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  static_assert(sizeof(T) == sizeof(Bits));
  alignas(64) Bits bits[kHalfPanel];
  std::memcpy(bits, values, sizeof(bits));
  for (std::int64_t lane = 0; lane < kHalfPanel; ++lane) {
    bits[lane] &= static_cast<Bits>(-static_cast<std::int32_t>(kept >> lane & 1));
  }
  std::memcpy(values, bits, sizeof(bits));
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
    alignas(64) std::uint32_t words[4][kCounters];
    for (std::int64_t block = 0; block < row_bytes_; block += kCounters) {
      for (std::int64_t i = 0; i < kCounters; ++i) {
        words[0][i] = static_cast<std::uint32_t>(block + i);
        words[1][i] = static_cast<std::uint32_t>(token);
        words[2][i] = static_cast<std::uint32_t>(expert);
        words[3][i] = static_cast<std::uint32_t>(product_);
      }
      philox(seed_, words);
      for (std::int64_t i = 0; i < kCounters; ++i) {
        std::uint32_t bits = 0;
        for (int word = 0; word < 4; ++word) {
          const std::uint32_t low = words[word][i] & 0xffff, high = words[word][i] >> 16;
          bits |= static_cast<std::uint32_t>(low >= dropped_) << (2 * word);
          bits |= static_cast<std::uint32_t>(high >= dropped_) << (2 * word + 1);
        }
        kept[block + i] = static_cast<std::uint8_t>(bits);
      }
    }
  }

  std::uint64_t seed_;
  std::uint32_t dropped_;
  DroppedProduct product_;
  std::int64_t row_bytes_;
  Region<std::uint8_t> kept_S_;
};

}  // namespace ktc::inline KTC_UNIT
