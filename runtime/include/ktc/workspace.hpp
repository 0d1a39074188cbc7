// Scratch memory that fits the largest recent call and is divided again for each call.
#pragma once

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <string>
#include <utility>

namespace ktc {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Requests huge pages before memory is touched for the first time. 17 MB of saved activations are then 9 page faults,
// not 4200, which took 5 ms. It is advice: if it is refused, nothing changes.
inline void prefer_huge_pages(void* begin, std::size_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const auto first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const auto last = (address + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// With the number of bytes. The memory of earlier calls is free by then, so a smaller call succeeds.
class OutOfMemory final : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::size_t bytes)
      : text_("cannot allocate " + std::to_string(bytes) + " bytes for the kernels' workspace") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Zeroed anonymous memory on 2 MB pages where the system grants them: 20-23 GB/s become 30 for one reading thread.
class HugePages {
 public:
  HugePages() = default;
  explicit HugePages(std::size_t bytes) : mapped_(bytes + kHugePage) {
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw OutOfMemory(bytes);
    base_ = static_cast<std::byte*>(base);
    prefer_huge_pages(base, mapped_);
  }
  HugePages(HugePages&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), mapped_(std::exchange(other.mapped_, 0)) {}
  HugePages& operator=(HugePages&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~HugePages() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }

  std::byte* data() const {
    const auto address = reinterpret_cast<std::uintptr_t>(base_);
    return base_ + (kHugePage - address % kHugePage) % kHugePage;
  }
  std::size_t size() const { return mapped_ == 0 ? 0 : mapped_ - kHugePage; }

 private:
  std::byte* base_ = nullptr;
  std::size_t mapped_ = 0;
};

// One array of a call's scratch memory: the number and the type of its values. `Workspace::lay_out` gives it its
// address.
template <class T>
class Region {
 public:
  explicit Region(std::int64_t count = 0) : count_(count) {}

  std::int64_t count() const { return count_; }
  // The contents are undefined: those of an earlier call.
  T* data() const { return data_; }
  T* data_or_null() const { return count_ == 0 ? nullptr : data_; }

 private:
  friend class Workspace;

  std::int64_t count_;
  T* data_ = nullptr;
};

// The block that holds the regions of one call.
//
// The block stays for the next call. It releases memory when it has been much too large for a while: after `kPatience`
// calls in a row that took less than a quarter of it, it shrinks to the largest of these. So a long prompt does not
// hold its memory through the text that follows, and steps that alternate in size keep theirs.
class Workspace {
 public:
  static constexpr int kPatience = 256;
  static constexpr std::size_t kSmall = 8 * kHugePage;  // not worth releasing

  // Gives every region an address. A part is a region, or has `regions(visit)`, which calls `visit` with each of its
  // own; an empty `std::optional` has none. Addresses of an earlier call are invalid from here on.
  template <class... Parts>
  void lay_out(Parts&... parts) {
    std::size_t total = 0;
    (visit_regions(parts, [&](const auto& region) { total += bytes(region); }), ...);
    reserve(total);
    std::byte* next = pages_.data();
    const auto place = [&]<class T>(Region<T>& region) {
      region.data_ = reinterpret_cast<T*>(next);
      next += bytes(region);
#if defined(__SANITIZE_ADDRESS__)
      ASAN_UNPOISON_MEMORY_REGION(region.data_, static_cast<std::size_t>(region.count_) * sizeof(T));
#endif
    };
    (visit_regions(parts, place), ...);
  }

  // Bytes of the block, used by the last call or not.
  std::size_t size() const { return pages_.size(); }

 private:
  template <class T>
  static constexpr std::size_t bytes(const Region<T>& region) {
    return (static_cast<std::size_t>(region.count_) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment + kGap;
  }

  template <class T, class Visit>
  static void visit_regions(Region<T>& region, const Visit& visit) {
    visit(region);
  }
  template <class Part, class Visit>
  static void visit_regions(std::optional<Part>& part, const Visit& visit) {
    if (part) visit_regions(*part, visit);
  }
  template <class Part, class Visit>
  static void visit_regions(Part& part, const Visit& visit) {
    part.regions(visit);
  }

  void reserve(std::size_t total) {
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
  }

  void replace(std::size_t total) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(pages_.data(), pages_.size());
#endif
    pages_ = HugePages();  // the old block goes before the new one comes
    pages_ = HugePages(total);
    small_calls_ = 0;
  }

  static constexpr std::size_t kAlignment = 64;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kGap = kAlignment;  // an access beyond a region is seen
#else
  static constexpr std::size_t kGap = 0;
#endif
  HugePages pages_;
  std::size_t largest_ = 0;  // of the small calls
  int small_calls_ = 0;
};

}  // namespace ktc
