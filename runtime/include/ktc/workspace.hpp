// The arrays of a call's scratch memory.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <cstddef>
#include <cstdint>
#include <optional>

#include "ktc/interface/engine.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

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

// The block that holds the regions of one call, divided again for each.
class Workspace {
 public:
  explicit Workspace(ScratchMemory& memory) : memory_(memory) {}

  // Gives every region an address. A part is a region, or has `regions(visit)`, which calls `visit` with its
  // regions; an empty `std::optional` has none. Addresses of an earlier call are invalid from here on.
  template <class... Parts>
  void lay_out(Parts&... parts) {
    std::size_t total = 0;
    (visit_regions(parts, [&](const auto& region) { total += bytes(region); }), ...);
    std::byte* next = memory_.reserve(total);
    const auto place = [&]<class T>(Region<T>& region) {
      region.data_ = reinterpret_cast<T*>(next);
      next += bytes(region);
#if defined(__SANITIZE_ADDRESS__)
      ASAN_UNPOISON_MEMORY_REGION(region.data_, static_cast<std::size_t>(region.count_) * sizeof(T));
#endif
    };
    (visit_regions(parts, place), ...);
  }

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

  static constexpr std::size_t kAlignment = 64;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kGap = kAlignment;  // an access beyond a region is seen
#else
  static constexpr std::size_t kGap = 0;
#endif
  ScratchMemory& memory_;
};

}  // namespace ktc::inline KTC_UNIT
