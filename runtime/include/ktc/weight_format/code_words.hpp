// The codes of a block as 16-bit words, in the vectors of an ISA's `Words`: each holds `kOutputs` outputs with two
// neighbours of k, the operand of a product of words (VPMADDWD).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "ktc/element.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/blocks.hpp"
#include "ktc/weight_format/codes.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace ktc::weight_format::inline KTC_UNIT {

// The bits of a panel's codes, the integers that they stand for, and the scales of a span of blocks. Only
// panels whose numbers are integers of up to 8 bits have them.
template <class Panel>
struct IntegerCodes {
  static constexpr bool kExist = false;
};

template <StoredInBlocks Panel>
  requires(Panel::Format::kBits <= 8)
struct IntegerCodes<Panel> {
  using Format = typename Panel::Format;
  static constexpr bool kExist = true;
  static constexpr int kBits = Format::kBits;
  static constexpr int kHighBits = Panel::kHighBits;
  static constexpr int high_shift(int vector) { return Panel::high_shift(vector); }
  static constexpr int kScales = Format::kScales;
  static constexpr bool kMins = Format::kMins;
  static constexpr int number(unsigned code) { return static_cast<int>(Format::number(code)); }
  static constexpr std::int64_t kSpanBlocks = Panel::kSpanBlocks;

  // The scales of a span's blocks, of `Words::kOutputs` outputs from `lane` on.
  template <class Words>
  class Scales {
   public:
    Scales(const std::byte* panel, std::int64_t first_block) : head_(panel + Panel::scales_at(first_block)) {}

    class Block {
     public:
      Block(const Scales& span, std::int64_t block) : stored_(span.head_, block) {}
      typename Words::Floats scale(int group, std::int64_t lane) const {
        return Words::load(stored_.scale[group] + lane);
      }
      typename Words::Floats min(std::int64_t lane) const { return Words::load(stored_.min + lane); }

     private:
      BlockScales<Format> stored_;
    };

   private:
    const std::byte* head_;
  };
  // Where blocks of a span share values that are computed once.
  template <class Words>
    requires(!std::is_void_v<typename Format::Span>)
  class Scales<Words> {
   public:
    Scales(const std::byte* panel, std::int64_t first_block) : span_(panel + Panel::scales_at(first_block)) {}

    class Block {
     public:
      Block(const Scales& span, std::int64_t block) : span_(span.span_), block_(block) {}
      typename Words::Floats scale(int group, std::int64_t lane) const {
        return span_.template scale<Words>(block_, group, lane);
      }
      typename Words::Floats min(std::int64_t lane) const { return span_.template min<Words>(block_, lane); }

     private:
      const typename Format::Span& span_;
      std::int64_t block_;
    };

   private:
    typename Format::Span span_;
  };
};

template <std::int64_t kGroup>
struct IntegerCodes<QuantisedPanel<Int4, kGroup>> {
  using Panel = QuantisedPanel<Int4, kGroup>;
  static constexpr bool kExist = true;
  static constexpr int kBits = Int4::kBits;
  static constexpr int kHighBits = 0;
  static constexpr int kScales = 1;
  static constexpr bool kMins = false;
  static constexpr int number(unsigned code) { return static_cast<int>(code) - 8; }
  static constexpr std::int64_t kSpanBlocks = Panel::kGroupBlocks;

  template <class Words>
  class Scales {
   public:
    Scales(const std::byte* panel, std::int64_t first_block)
        : stored_(reinterpret_cast<const bf16*>(panel + Panel::scales_at(first_block))) {}

    class Block {
     public:
      Block(const Scales& span, std::int64_t) : stored_(span.stored_) {}
      typename Words::Floats scale(int, std::int64_t lane) const { return Words::load(stored_ + lane); }

     private:
      const bf16* stored_;
    };

   private:
    const bf16* stored_;
  };
};

// The words of a code are its number plus `kOffset`. Four-bit codes whose numbers are not consecutive are looked up,
// as bytes; the upper byte of each word, a zero, is looked up too. A code that is a byte itself has `kByteOffset`.
template <class Panel>
struct WordNumbers {
  using Codes = IntegerCodes<Panel>;
  static constexpr bool kSigned = Codes::kBits == 8;
  static constexpr unsigned kCount = 1u << Codes::kBits;
  static constexpr bool kNeighbours = [] {
    for (unsigned code = 0; code < kCount; ++code) {
      if (Codes::number(code) != Codes::number(0) + static_cast<int>(code)) return false;
    }
    return true;
  }();
  static constexpr bool kLookedUp = !kSigned && !kNeighbours;
  static_assert(!kLookedUp || Codes::kBits == 4);
  static constexpr int kLeast = [] {
    int least = 0;
    for (unsigned code = 0; code < kCount; ++code) least = std::min(least, Codes::number(code));
    return least;
  }();
  static constexpr int kOffset = kSigned     ? 0
                                 : kLookedUp ? -kLeast + 256 * (Codes::number(0) - kLeast)
                                             : -Codes::number(0);
  static constexpr int kByteOffset = kLookedUp ? -kLeast : kOffset;
  alignas(16) static constexpr std::array<std::uint8_t, 16> kTable = [] {
    std::array<std::uint8_t, 16> table{};
    for (unsigned code = 0; code < 16; ++code) {
      table[code] = static_cast<std::uint8_t>(Codes::number(code % kCount) - kLeast);
    }
    return table;
  }();
};

// Vectors of a block whose codes are read together, for strip `strip` of Words::kOutputs outputs of either half panel.
// Vectors of the first and of the second half alternate, as in `blocks.hpp`.
template <class Words, class Panel>
class CodeWords {
  using Codes = IntegerCodes<Panel>;
  using Numbers = WordNumbers<Panel>;
  using Vector = typename Words::Vector;

 public:
  static constexpr int kVectors = Codes::kHighBits > 0 ? 16 / Codes::kHighBits : 16 / Codes::kBits;
  static constexpr int kLines = Numbers::kSigned ? 1 : kVectors / 4;
  static constexpr std::int64_t kUnit = (kLines + (Codes::kHighBits > 0 ? 1 : 0)) * std::int64_t{kLine};

  [[gnu::always_inline]] CodeWords(const std::byte* block, std::int64_t index, std::int64_t strip) {
    if constexpr (Numbers::kSigned) {
#pragma GCC unroll 2
      for (int vector = 0; vector < kVectors; ++vector) {
        low_[vector] = Words::widened(block + (index * kVectors + vector) * kPanelWidth + strip * sizeof(Vector) / 2);
      }
    } else {
      const std::byte* lines = block + strip * sizeof(Vector);
#pragma GCC unroll 4
      for (int line = 0; line < kLines; ++line) low_[line] = Words::load(lines + index * kUnit + line * kLine);
      if constexpr (Codes::kHighBits > 0) high_ = Words::load(lines + index * kUnit + kLines * kLine);
    }
  }

  [[gnu::always_inline]] Vector words(int vector) const {
    if constexpr (Numbers::kSigned) {
      return low_[vector];
    } else {
      const Vector four_bits = Words::all(std::int16_t{0xf});
      const int at = vector % 4 * 4;
      const Vector low = at > 0 ? Words::right(low_[vector / 4], at) : low_[vector / 4];
      if constexpr (Codes::kHighBits > 0) {
        constexpr int kMask = ((1 << Codes::kHighBits) - 1) << 4;
        return Words::joined(four_bits, low, Words::both(high(vector), Words::all(std::int16_t{kMask})));
      }
      const Vector code = at == 12 ? low : Words::both(low, four_bits);
      if constexpr (Numbers::kLookedUp) return Words::looked_up(Numbers::kTable.data(), code);
      return code;
    }
  }

  // Codes as bytes, for outputs of one half: four neighbours of k for each output, in the order 0, 2, 1, 3. Lower and
  // upper bits of four vectors are in the same bytes. Where sums of bytes are widened, words that are looked up are as
  // fast.
  static constexpr bool kBytes = !Numbers::kSigned && (!Numbers::kLookedUp || Words::kByteSumBits == 32);
  static constexpr int kLargestByte =
      Numbers::kLookedUp ? *std::ranges::max_element(Numbers::kTable) : (1 << Codes::kBits) - 1;
  [[gnu::always_inline]] Vector bytes(int quad, int half) const
    requires kBytes
  {
    const Vector four_bits = Words::all(std::int16_t{0x0f0f});
    const Vector low = half == 0 ? low_[quad] : Words::right(low_[quad], 4);
    if constexpr (Numbers::kLookedUp) {
      return Words::looked_up(Numbers::kTable.data(), Words::both(low, four_bits));
    } else if constexpr (Codes::kHighBits == 0) {
      return Words::both(low, four_bits);
    } else {
      constexpr int kMask = ((1 << Codes::kHighBits) - 1) << 4;
      return Words::joined(four_bits, low, Words::both(high(4 * quad + half), Words::all(std::int16_t{kMask * 0x101})));
    }
  }

 private:
  // The upper bits of a vector, shifted to bit 4; other bits are not cleared.
  [[gnu::always_inline]] Vector high(int vector) const {
    const int up = 4 - Codes::high_shift(vector);
    return up >= 0 ? Words::left(high_, up) : Words::right(high_, -up);
  }

  Vector low_[Numbers::kSigned ? kVectors : kLines];
  Vector high_;
};

}  // namespace ktc::weight_format::inline KTC_UNIT
