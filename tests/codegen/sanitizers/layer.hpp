// A layer with weights and one batch, for `stress.cpp`: one kernel of every way in which weights lie in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "ktc/activation.hpp"
#include "ktc/fused_moe.hpp"
#include "ktc/weight_format/block_scales.hpp"
#include "ktc/weight_format/dense.hpp"
#include "ktc/weight_format/int8.hpp"
#include "ktc/weight_format/mxfp4.hpp"
#include "ktc/weight_format/q4_k.hpp"
#include "ktc/weight_format/q6_k.hpp"
#include "ktc/weight_format/quantised.hpp"

namespace stress {

using namespace ktc;
using weight_format::Part;
using Isa = ktc::KTC_ISA::Isa;

struct Constants {
  static constexpr double kAlpha = 1;
  static constexpr double kLimit = std::numeric_limits<double>::infinity();
  static constexpr double kUpOffset = 0;
  static constexpr double kGateCap = std::numeric_limits<double>::infinity();
  static constexpr double kUpCap = std::numeric_limits<double>::infinity();
};
using Shape = MoeShape<kDynamic, kDynamic, kDynamic, kDynamic>;
using GatedSilu = Gated<Silu, Constants>;
template <class First, class Down = First>
using Quantised = FusedMoe<Isa, weight_format::Packed<First, Down>, GatedSilu, false, Shape>;
using Dense = FusedMoe<Isa, weight_format::Bf16, GatedSilu, false, Shape>;
using Biased = FusedMoe<Isa, weight_format::Bf16, Ungated<Relu, Constants>, true, Shape>;
using Int4 = Quantised<weight_format::Int4Panel<32>>;
using Int8 = Quantised<weight_format::Int8Panel>;
using Fp8 = Quantised<weight_format::Fp8Panel<128>>;
using MXFP4 = Quantised<weight_format::MXFP4Panel>;
using KQuants = Quantised<weight_format::Q4_KPanel, weight_format::Q6_KPanel>;

enum class Form { kDense, kBiased, kInt4, kInt8, kFp8, kMXFP4, kKQuants };

struct Case {
  Form form;
  MoeSizes sizes;
  std::int64_t tokens;
  std::int64_t experts_used;  // the others get no token
  std::int64_t rank;          // of LoRA on both products, 0 without
  bool infinite = false;      // there is one in the first token
  int nodes = 1;              // that the weights are cut for, and the threads of some engines spread over
};

inline std::unique_ptr<MoeKernel> make(const Case& which) {
  MoeSizes sizes = which.sizes;
  sizes.nodes = which.nodes;
  switch (which.form) {
    case Form::kDense:
      return std::make_unique<Dense>(sizes);
    case Form::kBiased:
      return std::make_unique<Biased>(sizes);
    case Form::kInt4:
      return std::make_unique<Int4>(sizes);
    case Form::kInt8:
      return std::make_unique<Int8>(sizes);
    case Form::kFp8:
      return std::make_unique<Fp8>(sizes);
    case Form::kMXFP4:
      return std::make_unique<MXFP4>(sizes);
    case Form::kKQuants:
      return std::make_unique<KQuants>(sizes);
  }
  std::abort();
}

// Memory of exactly so many bytes, so that a sanitizer sees a read beyond them.
struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Bytes = std::unique_ptr<std::byte, Free>;

inline Bytes aligned(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, bytes) != 0) std::abort();
  std::memset(memory, 0, bytes);
  return Bytes(static_cast<std::byte*>(memory));
}

template <class Value>
std::vector<Value> random_values(std::mt19937& random, std::int64_t count, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<Value> values;
  for (std::int64_t i = 0; i < count; ++i) values.emplace_back(normal(random));
  return values;
}

// One block of a K-quant as a file stores it: any bytes, and scales that make weights of about 0.1 of them.
inline std::vector<std::uint8_t> random_block(std::mt19937& random, std::string_view type) {
  const bool four = type == weight_format::Q4_K::kName;
  std::vector<std::uint8_t> block(four ? weight_format::Q4_K::kStoredBytes : weight_format::Q6_K::kStoredBytes);
  for (std::uint8_t& byte : block) byte = static_cast<std::uint8_t>(random());
  if (four) {
    weight_format::store_half(4e-4F, block.data());
    weight_format::store_half(3e-3F, block.data() + 2);  // minimum
  } else {
    weight_format::store_half(1e-4F, block.data() + 208);
  }
  return block;
}

struct Factors {
  std::vector<float> a, b;
};

// A layer with its weights, and one batch. Nothing of it changes after it was made.
class Layer {
 public:
  explicit Layer(const Case& which) : which_(which), kernel_(make(which)), packed_(aligned(kernel_->packed_bytes())) {
    const MoeSizes& sizes = which.sizes;
    std::mt19937 random(1);
    for (std::int64_t expert = 0; expert < sizes.num_experts; ++expert) pack(expert, random);
    hidden_ = random_values<bf16>(random, which.tokens * sizes.hidden, 1);
    if (which.infinite) hidden_[3] = bf16(std::numeric_limits<float>::infinity());
    grad_ = random_values<bf16>(random, which.tokens * sizes.hidden, 1);
    weight_ = random_values<float>(random, which.tokens * sizes.top_k, 1);
    for (std::int64_t token = 0; token < which.tokens; ++token) {
      const auto first = static_cast<std::int64_t>(random() % which.experts_used);
      for (std::int64_t k = 0; k < sizes.top_k; ++k) index_.push_back((first + k) % which.experts_used);
    }
    const std::int64_t outputs = sizes.intermediate * (which.form == Form::kBiased ? 1 : 2);
    first_ = factors(random, sizes.hidden, outputs);
    down_ = factors(random, sizes.intermediate, sizes.hidden);
  }

  // Bytes of everything that forward and backward write.
  std::vector<std::byte> run(Engine& engine, bool recompute) const {
    const std::size_t rows = static_cast<std::size_t>(which_.tokens * which_.sizes.hidden);
    std::vector<bf16> out(rows), grad_hidden(rows);
    std::vector<float> grad_weight(weight_.size());
    Factors grad_first{std::vector<float>(first_.a.size()), std::vector<float>(first_.b.size())};
    Factors grad_down{std::vector<float>(down_.a.size()), std::vector<float>(down_.b.size())};
    const LoraFactors first = native(first_, grad_first, true), down = native(down_, grad_down, false);
    const Bytes saved = recompute ? nullptr : aligned(kernel_->saved_bytes(which_.tokens, which_.rank, which_.rank));
    kernel_->forward(engine, {.packed = packed_.get(),
                              .hidden_states = hidden_.data(),
                              .top_k_index = index_.data(),
                              .top_k_weights = weight_.data(),
                              .out = out.data(),
                              .saved = saved.get(),
                              .tokens = which_.tokens,
                              .lora_first = first,
                              .lora_down = down});
    kernel_->backward(engine, {.packed = packed_.get(),
                               .top_k_index = index_.data(),
                               .top_k_weights = weight_.data(),
                               .saved = saved.get(),
                               .hidden_states = hidden_.data(),
                               .grad_out = grad_.data(),
                               .grad_hidden_states = grad_hidden.data(),
                               .grad_top_k_weights = grad_weight.data(),
                               .tokens = which_.tokens,
                               .lora_first = first,
                               .lora_down = down});
    std::vector<std::byte> written;
    const auto append = [&](const auto& values) {
      const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
      written.insert(written.end(), bytes, bytes + values.size() * sizeof(values[0]));
    };
    append(out), append(grad_hidden), append(grad_weight);
    for (const Factors* each : {&grad_first, &grad_down}) append(each->a), append(each->b);
    return written;
  }

 private:
  void pack(std::int64_t expert, std::mt19937& random) {
    for (const Part part : {Part::kGate, Part::kUp, Part::kDown, Part::kUpBias, Part::kDownBias}) {
      const bool biased = which_.form == Form::kBiased;
      if ((biased && part == Part::kGate) || (!biased && is_bias(part))) continue;
      const std::int64_t outputs = is_down(part) ? which_.sizes.hidden : which_.sizes.intermediate;
      const std::int64_t inputs = which_.sizes.hidden + which_.sizes.intermediate - outputs;
      const std::int64_t rows = is_bias(part) ? 1 : outputs, columns = is_bias(part) ? outputs : inputs;
      if (which_.form == Form::kKQuants) {
        pack_blocks(expert, part, random, rows, columns);
      } else {
        const auto values = random_values<bf16>(random, rows * columns, 0.1F);
        kernel_->pack(packed_.get(), expert, part, values.data(), SourceType::kBf16, rows, columns);
      }
      std::vector<float> back(static_cast<std::size_t>(rows * columns));  // room for bf16 too
      kernel_->unpack(packed_.get(), expert, part, back.data(), rows, columns);
    }
  }

  void pack_blocks(std::int64_t expert, Part part, std::mt19937& random, std::int64_t rows, std::int64_t columns) {
    const char* type = kernel_->blocks(part);
    std::vector<std::uint8_t> stored;
    for (std::int64_t block = 0; block < rows * columns / 256; ++block) {
      const auto bytes = random_block(random, type);
      stored.insert(stored.end(), bytes.begin(), bytes.end());
    }
    const auto row_bytes = static_cast<std::int64_t>(stored.size()) / rows;
    kernel_->pack_blocks(packed_.get(), expert, part, stored.data(), type, rows, row_bytes);
  }

  Factors factors(std::mt19937& random, std::int64_t inputs, std::int64_t outputs) const {
    const std::int64_t ranks = which_.sizes.num_experts * which_.rank;
    return {random_values<float>(random, ranks * inputs, 0.1F), random_values<float>(random, ranks * outputs, 0.1F)};
  }
  LoraFactors native(const Factors& factors, Factors& gradients, bool interleaved) const {
    if (which_.rank == 0) return {};
    return {factors.a.data(), factors.b.data(), gradients.a.data(), gradients.b.data(), which_.rank, 0.5, interleaved};
  }

  Case which_;
  std::unique_ptr<MoeKernel> kernel_;
  Bytes packed_;
  std::vector<bf16> hidden_, grad_;
  std::vector<std::int64_t> index_;
  std::vector<float> weight_;
  Factors first_, down_;
};

}  // namespace stress
