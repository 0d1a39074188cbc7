// What the stress program computes with each kernel of an instruction set: calls on odd sizes, with memory of exactly
// the bytes that they may touch. `kernels.cpp.j2` lists the kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ktc/interface/engine.hpp"
#include "ktc_python/entries.hpp"

namespace stress {

enum class Element { kBf16, kFp16, kFp32, kFp64 };

// How a file stores rows in blocks: weights and bytes of a block, and the bytes at which it has fp16 scales and minima,
// an exponent, an fp32 scale whose lowest byte is a zero point, or one of the matrix and two E4M3 scales; -1 without.
// Rows not in blocks have 0 bytes.
struct StoredBlocks {
  std::int64_t weights = 1;
  std::int64_t bytes = 0;
  int scale = -1;
  int minimum = -1;
  int exponent = -1;
  int scale_and_zero = -1;
  int of_matrix = -1;
  int eights = -1;
};

// What a kernel's spec says beside its entry.
struct Facts {
  Element element = Element::kBf16;
  bool gated = true;
  bool biased = false;
  std::int64_t whole_hidden = 1;  // of which hidden states and intermediate values are a multiple
  std::int64_t whole_intermediate = 1;
  StoredBlocks first;  // gate and up, or a linear layer
  StoredBlocks down;
  Element weights = Element::kFp32;  // of a router, as the numbers of its experts and of those it chooses
  std::int64_t experts = 0;
  std::int64_t top_k = 0;
};

using Written = std::vector<std::byte>;  // all that a call writes

// A call, in one or several ways that must write the same bytes. `refuses` is whether hostile arguments throw, and
// nothing is written.
struct Call {
  std::string name;
  int ways = 1;
  std::function<Written(ktc::Engine& engine, int way)> run;
  std::function<bool(ktc::Engine& engine)> refuses = nullptr;
};

struct Kernel {
  std::string name;
  std::function<std::vector<Call>()> calls;
};

std::vector<Kernel> kernels();

std::vector<Call> calls_of(const ktc_python::functions::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::fused_moe::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::linear::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::packed_linear::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::attention::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::int8_attention::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::sparse_attention::Entry& entry, const Facts& facts);
std::vector<Call> calls_of(const ktc_python::step::Entry& entry, const Facts& facts);

// Appends the bytes of values.
template <class Values>
void append(Written& written, const Values& values) {
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  written.insert(written.end(), bytes, bytes + values.size() * sizeof(values[0]));
}

}  // namespace stress
