// Random values, and memory of exactly so many bytes, so that a sanitizer sees an access beyond them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "calls.hpp"
#include "ktc/element.hpp"
#include "ktc/weight_format/half_precision.hpp"

namespace stress {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<std::byte, Free>;

inline Bytes aligned(std::size_t bytes, std::size_t alignment = 64) {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes) != 0) std::abort();
  std::memset(memory, 0, bytes);
  return Bytes(static_cast<std::byte*>(memory));
}

template <class Value>
std::vector<Value> random_values(std::mt19937& random, std::int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<Value> values;
  values.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Value, ktc::weight_format::fp16>) {
      values.push_back(Value::nearest(normal(random)));
    } else {
      values.push_back(Value(normal(random)));
    }
  }
  return values;
}

// Rows of whole blocks as a file stores them: any bytes, with scales that make weights of about 0.1 of them.
inline std::vector<std::uint8_t> random_blocks(std::mt19937& random, const StoredBlocks& stored, std::int64_t weights) {
  std::vector<std::uint8_t> blocks(static_cast<std::size_t>(weights / stored.weights * stored.bytes));
  for (std::uint8_t& byte : blocks) byte = static_cast<std::uint8_t>(random());
  const auto put = [](std::uint8_t* at, float value) {
    const std::uint16_t bits = ktc::weight_format::fp16(value).bits;
    std::memcpy(at, &bits, sizeof bits);
  };
  for (std::size_t at = 0; at < blocks.size(); at += static_cast<std::size_t>(stored.bytes)) {
    std::uint8_t* block = blocks.data() + at;
    if (stored.scale >= 0) put(block + stored.scale, stored.bytes > 64 ? 4e-4F : 0.01F);
    if (stored.minimum >= 0) put(block + stored.minimum, 3e-3F);
    if (stored.scale_and_zero >= 0) {
      const auto bits = std::bit_cast<std::uint32_t>(0.01F) & ~0xffU;
      const auto scale_and_zero = bits | static_cast<std::uint32_t>(random() % 16);
      std::memcpy(block + stored.scale_and_zero, &scale_and_zero, sizeof scale_and_zero);
    }
    if (stored.of_matrix >= 0) {
      constexpr float kMatrix = 1e-3F;
      std::memcpy(block + stored.of_matrix, &kMatrix, sizeof kMatrix);
      std::memset(block + stored.eights, 0x38, 2);  // one, in E4M3
    }
    if (stored.exponent >= 0) block[stored.exponent] = 123;
    if (stored.weights == 1) put(block, std::normal_distribution<float>(0, 0.1F)(random));
  }
  return blocks;
}

// Calls `body` with a value of the C++ type of an element.
template <class Body>
auto with_element(Element element, Body&& body) {
  switch (element) {
    case Element::kBf16:
      return body(ktc::bf16{});
    case Element::kFp16:
      return body(ktc::weight_format::fp16{});
    case Element::kFp32:
      return body(float{});
    case Element::kFp64:
      return body(double{});
  }
  std::abort();
}

}  // namespace stress
