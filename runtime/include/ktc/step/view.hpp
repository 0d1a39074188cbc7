// What an operation of a decoding step reads or writes: a tensor by its address, with its sizes and strides.
#pragma once

#include <array>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "ktc/element.hpp"
#include "ktc/interface/step.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace ktc::step::inline KTC_UNIT {

using weight_format::fp16;
using complex64 = std::complex<float>;

// Calls `body` with a value of the C++ type that holds an element.
template <class Body>
[[gnu::always_inline]] inline void with_element(Type type, Body&& body) {
  switch (type) {
    case Type::kBool:
      return body(std::uint8_t{});
    case Type::kInt32:
      return body(std::int32_t{});
    case Type::kInt64:
      return body(std::int64_t{});
    case Type::kFp16:
      return body(fp16{});
    case Type::kBf16:
      return body(bf16{});
    case Type::kFp32:
      return body(float{});
    case Type::kFp64:
      return body(double{});
    case Type::kComplex64:
      return body(complex64{});
  }
  throw std::invalid_argument("not a type of elements");
}

inline std::int64_t bytes_of(Type type) {
  std::int64_t bytes = 0;
  with_element(type, [&]<class Element>(Element) { bytes = sizeof(Element); });
  return bytes;
}

// `strides` are in elements. The memory must outlive the operation.
struct View {
  std::byte* data = nullptr;
  Type type = Type::kFp32;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;

  std::int64_t dims() const { return static_cast<std::int64_t>(sizes.size()); }
  std::int64_t last_size() const { return sizes.empty() ? 1 : sizes.back(); }
  std::int64_t last_stride() const { return strides.empty() ? 0 : strides.back(); }
  std::int64_t elements() const {
    std::int64_t product = 1;
    for (const std::int64_t size : sizes) product *= size;
    return product;
  }
};

inline View view_of(const TensorArgument& tensor) {
  return {.data = tensor.data,
          .type = tensor.type,
          .sizes = {tensor.sizes, tensor.sizes + tensor.dims},
          .strides = {tensor.strides, tensor.strides + tensor.dims}};
}

// Calls `body(offsets)` for each index into the first `dims` of `sizes`, where offsets[i] is what the strides of
// `views[i]` make of the index, in elements.
template <std::size_t kViews, class Body>
void for_each_index(const std::vector<std::int64_t>& sizes, std::int64_t dims,
                    const std::array<const View*, kViews>& views, Body&& body) {
  std::array<std::int64_t, kViews> offsets{};
  std::vector<std::int64_t> index(static_cast<std::size_t>(dims), 0);
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    if (sizes[static_cast<std::size_t>(dim)] == 0) return;
  }
  for (;;) {
    body(offsets);
    std::int64_t dim = dims - 1;
    for (; dim >= 0; --dim) {
      const auto at = static_cast<std::size_t>(dim);
      for (std::size_t view = 0; view < kViews; ++view) offsets[view] += views[view]->strides[at];
      if (++index[at] < sizes[at]) break;
      for (std::size_t view = 0; view < kViews; ++view) offsets[view] -= views[view]->strides[at] * sizes[at];
      index[at] = 0;
    }
    if (dim < 0) return;
  }
}

// Elements to and from blocks of the type that is computed in. Integers become what a C++ conversion makes of them; a
// bool is 0 or 1.
template <class Computed>
struct Blocks {
  static void load(const std::byte* data, Type type, std::int64_t stride, std::int64_t count, Computed* block) {
    with_element(type, [&]<class Element>(Element) {
      const auto* from = reinterpret_cast<const Element*>(data);
      if (stride == 1) {
        for (std::int64_t index = 0; index < count; ++index) block[index] = widened(from[index]);
      } else {
        for (std::int64_t index = 0; index < count; ++index) block[index] = widened(from[index * stride]);
      }
    });
  }

  static void store(std::byte* data, Type type, std::int64_t stride, std::int64_t count, const Computed* block) {
    with_element(type, [&]<class Element>(Element) {
      auto* to = reinterpret_cast<Element*>(data);
      if (stride == 1) {
        for (std::int64_t index = 0; index < count; ++index) to[index] = narrowed<Element>(block[index]);
      } else {
        for (std::int64_t index = 0; index < count; ++index) to[index * stride] = narrowed<Element>(block[index]);
      }
    });
  }

 private:
  static constexpr bool kComplex = std::is_same_v<Computed, complex64>;

  template <class Element>
  [[gnu::always_inline]] static Computed widened(Element value) {
    if constexpr (kComplex || std::is_same_v<Element, complex64>) {
      if constexpr (kComplex && std::is_same_v<Element, complex64>) return value;
      return Computed{};  // `checked` refuses a mixture
    } else if constexpr (std::is_same_v<Element, bf16> || std::is_same_v<Element, fp16>) {
      return static_cast<Computed>(static_cast<float>(value));
    } else {
      return static_cast<Computed>(value);
    }
  }

  template <class Element>
  [[gnu::always_inline]] static Element narrowed(Computed value) {
    if constexpr (kComplex || std::is_same_v<Element, complex64>) {
      if constexpr (kComplex && std::is_same_v<Element, complex64>) return value;
      return Element{};
    } else if constexpr (std::is_same_v<Element, std::uint8_t>) {
      return value != Computed{} ? 1 : 0;
    } else if constexpr (std::is_same_v<Element, bf16>) {
      return bf16(static_cast<float>(value));
    } else if constexpr (std::is_same_v<Element, fp16>) {
      return fp16::nearest(static_cast<float>(value));
    } else {
      return static_cast<Element>(value);
    }
  }
};

}  // namespace ktc::step::inline KTC_UNIT
