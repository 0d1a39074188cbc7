// The fused mixture of experts: one class per ISA, weight format, activation (gated or not), biases or none, and shape.
// A template instantiates this class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ktc/concepts.hpp"
#include "ktc/interface/moe.hpp"
#include "ktc/interface/text.hpp"
#include "ktc/moe_backward.hpp"
#include "ktc/moe_forward.hpp"
#include "ktc/moe_layer.hpp"
#include "ktc/numa.hpp"
#include "ktc/shape.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <InstructionSet Isa, class Format, class Activation, bool kBiased, class Shape>
class FusedMoe final : public MoeKernel {
  using Layer = MoeLayer<Isa, Format, Activation, kBiased, Shape>;
  using Element = typename Layer::Element;
  static_assert(std::is_same_v<Element, typename Format::Element>, "a format gives what the ISA multiplies");
  static_assert(kHalfPanel % ElementTraits<Element>::kDepth == 0);

 public:
  // Throws std::runtime_error if the system refuses the ISA's registers to the process.
  explicit FusedMoe(const MoeSizes& sizes) : layer_(sizes) { Isa::require(); }

  std::size_t packed_bytes() const override { return static_cast<std::size_t>(layer_.format.packed_bytes()); }
  std::size_t expert_bytes() const override { return static_cast<std::size_t>(layer_.format.expert_bytes()); }
  void bind(std::byte* packed, const std::vector<int>& nodes) const override {
    for (int shard = 0; shard < layer_.nodes; ++shard) {
      const std::int64_t begin = layer_.format.shard_begin(shard), end = layer_.format.shard_begin(shard + 1);
      bind_to_node(packed + begin, static_cast<std::size_t>(end - begin), nodes.at(static_cast<std::size_t>(shard)));
    }
  }
  void shard(const std::byte* whole, std::int64_t expert, std::byte* packed) const override {
    check_expert(expert);
    layer_.format.shard(whole, expert, packed);
  }
  void join(const std::byte* packed, std::int64_t expert, std::byte* whole) const override {
    check_expert(expert);
    layer_.format.join(packed, expert, whole);
  }

  Coding coding(weight_format::Part part) const override {
    return Format::with_panel(part, []<class Panel>(Panel) -> Coding { return {Panel::kCode, Panel::kGroup}; });
  }

  const char* blocks(weight_format::Part part) const override {
    return Format::with_panel(part, []<class Panel>(Panel) { return Panel::kStored; });
  }

  std::size_t saved_bytes(std::int64_t tokens, std::int64_t first_rank, std::int64_t down_rank) const override {
    return SavedSlots<Layer>::bytes(layer_, tokens * layer_.shape.top_k(), first_rank, down_rank);
  }

  void pack(std::byte* packed, std::int64_t expert, weight_format::Part part, const void* source, SourceType type,
            std::int64_t rows, std::int64_t columns) const override {
    check_expert(expert);
    const auto pack_from = [&]<class Source>(const Source* values) {
      layer_.format.pack(packed, expert, part, MatrixView(values, rows, columns));
    };
    if (type == SourceType::kBf16) return pack_from(static_cast<const bf16*>(source));
    if (type == SourceType::kFp32) return pack_from(static_cast<const float*>(source));
    pack_from(static_cast<const double*>(source));
  }

  void pack_codes(std::byte* packed, std::int64_t expert, weight_format::Part part, const std::uint8_t* codes,
                  const float* scales, std::int64_t rows, std::int64_t columns, std::int64_t groups) const override {
    check_expert(expert);
    layer_.format.pack_codes(packed, expert, part, MatrixView(codes, rows, columns), MatrixView(scales, rows, groups));
  }

  void pack_blocks(std::byte* packed, std::int64_t expert, weight_format::Part part, const std::uint8_t* blocks,
                   std::string_view type, std::int64_t rows, std::int64_t row_bytes) const override {
    check_expert(expert);
    layer_.format.pack_blocks(packed, expert, part, type, MatrixView(blocks, rows, row_bytes));
  }

  void unpack(const std::byte* packed, std::int64_t expert, weight_format::Part part, void* target, std::int64_t rows,
              std::int64_t columns) const override {
    check_expert(expert);
    layer_.format.unpack(packed, expert, part, target, rows, columns);
  }

  void forward(Engine& engine, const ForwardArguments& arguments) const override {
    moe_forward(layer_, engine, arguments);
  }

  void backward(Engine& engine, const BackwardArguments& arguments) const override {
    moe_backward(layer_, engine, arguments);
  }

 private:
  void check_expert(std::int64_t expert) const {
    if (expert >= 0 && expert < layer_.shape.num_experts()) return;
    throw std::out_of_range("this layer has " + decimal(layer_.shape.num_experts()) + " experts, found index " +
                            decimal(expert));
  }

  Layer layer_;
};

template <class Kernel>
std::unique_ptr<MoeKernel> make_kernel(const MoeSizes& sizes) {
  return std::make_unique<Kernel>(sizes);
}

}  // namespace ktc::inline KTC_UNIT
