// Kernels of routed experts: the same for every specialisation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "ktc/interface/engine.hpp"

namespace ktc::weight_format {

// Of an expert.
enum class Part { kGate, kUp, kDown, kGateBias, kUpBias, kDownBias };

}  // namespace ktc::weight_format

namespace ktc {

// A choice that another engine computes, in a partial forward.
inline constexpr std::int64_t kComputedElsewhere = -1;
// In a partial forward, a choice is an expert plus `first << kFirstUnitBit`: another engine computes what the
// intermediate units before `first` add to the output, and the bias of down. All choices of that expert say the same.
inline constexpr int kFirstUnitBit = 32;

struct MoeSizes {
  std::int64_t num_experts;
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t top_k;
  int nodes = 1;  // of NUMA: the number of shards of the packed weights
};

enum class SourceType { kBf16, kFp32, kFp64 };

// The strides of B, or of its gradient, in values: per expert, output and rank. All 0: contiguous (E, outputs, rank).
struct FactorStrides {
  std::int64_t expert = 0;
  std::int64_t output = 0;
  std::int64_t rank = 0;
};

// LoRA on one product for all experts, in the kernel's accumulator type: A (E, rank, inputs), contiguous, and B (E,
// outputs, rank), as its strides say, add scale * B A to the weights. Rank 0: none. The outputs of the first product
// are the rows of gate, then those of up; or of both in turn where `interleaved`. Gradients, of the same shapes, are
// zeros before backward, which writes those of experts with tokens. An input of A is dropped where its 16 random bits
// are below `dropped` (0: none), by the `seed` of the call; `scale` then contains the factor of the others.
struct LoraFactors {
  const void* a = nullptr;
  const void* b = nullptr;
  void* grad_a = nullptr;
  void* grad_b = nullptr;
  std::int64_t rank = 0;
  double scale = 1;
  bool interleaved = false;
  std::int64_t dropped = 0;  // of 65,536
  std::int64_t seed = 0;
  FactorStrides b_strides = {};
  FactorStrides grad_b_strides = {};
};

// Hidden states, output and their gradients are (tokens, H) of the kernel's element type; routing weights and their
// gradient (tokens, k) of its accumulator type (fp32; fp64 for fp64); everything is contiguous.
struct ForwardArguments {
  const std::byte* packed;
  const void* hidden_states;
  const std::int64_t* top_k_index;
  const void* top_k_weights;
  void* out;
  void* saved = nullptr;  // `saved_bytes` for backward, or null
  std::int64_t tokens;
  LoraFactors lora_first = {};
  LoraFactors lora_down = {};
  // Choices that are `kComputedElsewhere` add nothing to the output, and those of one expert may begin with a later
  // unit (`kFirstUnitBit`). Throws std::invalid_argument for a unit other than a multiple of 32 and of the weights of
  // down that share scales, and for any where LoRA, bytes to be saved, or products in integers need all units.
  bool partial = false;
};

// For the gradients of weights, whose products another library computes: by slot, that is sorted by expert and then by
// (token, k), the gradients of gate and up with the routing weight, (slots, parts, Ip), and the results of the
// activation, (slots, Ip), of the kernel's element type. Ip is I rounded up to 32. Null: not written.
struct WeightGradientRows {
  void* d_first = nullptr;
  void* activated = nullptr;
};

struct BackwardArguments {
  const std::byte* packed;
  const std::int64_t* top_k_index;
  const void* top_k_weights;
  const void* saved;          // the bytes that forward saved, or null
  const void* hidden_states;  // read where `saved` is null: gate and up are computed again; and for LoRA's gradients
  const void* grad_out;
  void* grad_hidden_states;
  void* grad_top_k_weights;
  std::int64_t tokens;
  LoraFactors lora_first = {};
  LoraFactors lora_down = {};
  WeightGradientRows rows = {};
};

// One part of an expert in the packed weights, and its sizes outside of them.
struct ExpertMatrix {
  std::byte* packed;
  std::int64_t expert;
  weight_format::Part part;
  std::int64_t rows;
  std::int64_t columns;
};

// How a part's weights are stored: the name of their codes, null if they have none, and the number of a row's weights
// that share a scale.
struct Coding {
  const char* name;
  std::int64_t group;
};

class MoeKernel {
 public:
  virtual ~MoeKernel();

  // Bytes of all experts' packed weights; the storage must begin at a multiple of 64 bytes, and of a huge page where
  // weights are cut for several NUMA nodes.
  virtual std::size_t packed_bytes() const = 0;
  // Requests the shards' memory on these nodes, before the first write to it.
  virtual void bind(std::byte* packed, const std::vector<int>& nodes) const = 0;
  // Copy one expert from `whole`, `expert_bytes()` as a kernel for one node packs them, into its shards, and back.
  virtual std::size_t expert_bytes() const = 0;
  virtual void shard(const std::byte* whole, std::int64_t expert, std::byte* packed) const = 0;
  virtual void join(const std::byte* packed, std::int64_t expert, std::byte* whole) const = 0;
  virtual Coding coding(weight_format::Part part) const = 0;
  // The type of blocks in which a part is stored, null if not in blocks.
  virtual const char* blocks(weight_format::Part part) const = 0;
  // The ranks are those of LoRA on the first product and on down, 0 without.
  virtual std::size_t saved_bytes(std::int64_t tokens, std::int64_t first_rank = 0,
                                  std::int64_t down_rank = 0) const = 0;

  // `source` is row-major: (I, H) for gate and up, (H, I) for down, (1, I) and (1, H) for their biases.
  virtual void pack(const ExpertMatrix& to, const void* source, SourceType type) const = 0;
  // From codes as a checkpoint stores them, a byte each, and one scale per row and group. Throws std::invalid_argument
  // where the format has no codes, a scale of its own kind cannot hold `scales` exactly, or a code is out of range.
  virtual void pack_codes(const ExpertMatrix& to, const std::uint8_t* codes, const float* scales,
                          std::int64_t groups) const = 0;
  // From whole blocks as a GGUF file stores them; the columns are the bytes of a row. Throws std::invalid_argument
  // where the part is not stored in blocks of that type, named as `blocks` names it, or is of another shape.
  virtual void pack_blocks(const ExpertMatrix& to, const std::uint8_t* blocks, std::string_view type) const = 0;
  // The inverse, in the kernel's element type; biases in its accumulator type.
  virtual void unpack(const ExpertMatrix& from, void* target) const = 0;

  // Both throw std::out_of_range for an expert that does not exist, before anything is written.
  virtual void forward(Engine& engine, const ForwardArguments& arguments) const = 0;
  virtual void backward(Engine& engine, const BackwardArguments& arguments) const = 0;
};

// How a library lists a kernel: its name, and the function that makes one for a layer (throws std::invalid_argument for
// sizes it was not built for).
struct KernelEntry {
  const char* name;
  std::unique_ptr<MoeKernel> (*make)(const MoeSizes&);
};

}  // namespace ktc
