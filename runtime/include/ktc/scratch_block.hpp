// Scratch memory that fits the largest recent call.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstddef>

#include "ktc/huge_pages.hpp"
#include "ktc/interface/engine.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

// The block stays for the next call. It releases memory when it has been much too large for a while: after `kPatience`
// calls in a row that took less than a quarter of it, it shrinks to the largest of these. So a long prompt does not
// hold its memory through the text that follows, and steps that alternate in size keep theirs.
class ScratchBlock final : public ScratchMemory {
 public:
  static constexpr int kPatience = 256;
  static constexpr std::size_t kSmall = 8 * kHugePage;  // not worth releasing

  std::byte* reserve(std::size_t total) override {
    if (total > pages_.size()) {
      replace(total);
    } else if (total >= pages_.size() / 4 || pages_.size() <= kSmall) {
      small_calls_ = 0;
    } else {
      largest_ = std::max(small_calls_ == 0 ? 0 : largest_, total);
      if (++small_calls_ == kPatience) replace(largest_);
    }
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(pages_.data(), pages_.size());
#endif
    return pages_.data();
  }

  // Bytes of the block, used by the last call or not.
  std::size_t size() const { return pages_.size(); }

 private:
  void replace(std::size_t total) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(pages_.data(), pages_.size());
#endif
    pages_ = HugePages();  // the old block goes before the new one comes
    pages_ = HugePages(total);
    small_calls_ = 0;
  }

  HugePages pages_;
  std::size_t largest_ = 0;  // of the small calls
  int small_calls_ = 0;
};

}  // namespace ktc::inline KTC_UNIT
