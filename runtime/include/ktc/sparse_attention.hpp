// Attention of a few new tokens over the positions of a cache that an index of its keys finds: `DecodeAttention`, of
// all positions or of chosen ones, and `KeyIndex`, which chooses them.
#pragma once

#include <memory>

#include "ktc/concepts.hpp"
#include "ktc/decode_attention.hpp"
#include "ktc/key_index.hpp"
#include "ktc/unit.hpp"

namespace ktc::inline KTC_UNIT {

template <class Kernel>
std::unique_ptr<SparseAttentionKernel> make_sparse_attention() {
  return std::make_unique<Kernel>();
}

// `Dense` computes the attention, of all positions or of chosen ones.
template <InstructionSet Isa, class Element, class Dense = DecodeAttention<Isa, Element>>
class SparseAttention final : public SparseAttentionKernel {
 public:
  void forward(Engine& engine, const AttentionArguments& arguments) const override {
    attention_.forward(engine, arguments);
  }
  void encode(Engine& engine, const EncodeArguments& arguments) const override {
    KeyIndex<Isa, Element>::encode(engine, arguments);
  }
  void select(Engine& engine, const SelectArguments& arguments) const override {
    KeyIndex<Isa, Element>::select(engine, arguments);
  }

 private:
  Dense attention_;
};

}  // namespace ktc::inline KTC_UNIT
