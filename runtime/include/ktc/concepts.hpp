// What kernels require of their template arguments: instruction sets, the words they multiply, micro-kernels, panels,
// formats of blocks, and epilogues.
//
// Every member is required, and one that an instruction set has no use for says so: 0, false, void or `NoWords`. So a
// missing or misspelled member does not compile; with a default it would only cost speed. A class may do more than its
// concept, as have an overload for one more element type: code that uses it asks with `requires`.
//
// Sizes count values, not bytes, unless a name says bytes. k is the index of the contraction.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ktc/element.hpp"
#include "ktc/routing.hpp"
#include "ktc/tensor_view.hpp"
#include "ktc/unit.hpp"
#include "ktc/weight_format/half_precision.hpp"
#include "ktc/weight_format/layout.hpp"

namespace ktc::inline KTC_UNIT {

// `static constexpr Value` of a class.
template <class Expression, class Value>
concept Constant = std::same_as<Expression, const Value&>;

// Work beside a product: `step()` at each step of the micro-kernel, which counts them by `steps_ahead`, and `finish()`
// after the product. The default does nothing.
template <class Work>
concept WorkAhead = std::default_initializable<Work> && requires(Work work) {
  work.step();
  work.finish();
};

// No work.
struct NoWork {
  [[gnu::always_inline]] void step() {}
  void finish() {}
};

// Half a panel of outputs in registers, kHalfPanel values of type `Scalar`. Element-wise functions (`math.hpp`,
// `activation.hpp`), epilogues and attention compute in them.
//
//   Lanes(value)          all lanes the same value.
//   load, store           values of `Scalar`; nothing need be aligned.
//   from_elements         stored values, widened exactly: bf16 and fp16, and the elements of the instruction set.
//   from_integers(a, b)   a - b of integers of 32 bits, exact before it is rounded.
//   to_elements           rounded to nearest even; a NaN stays one.
//   to_codes              integers from -128 to 127, rounded to nearest even, plus 128, as bytes.
//   sum, largest          over the lanes; `largest` without a NaN in them.
//   greatest              over lanes that are not negative; a NaN counts as greater than any number.
//   store_sums            the `sum` of four, in their order; the bits of one do not depend on the others.
//   fused_multiply_add    a b + c.
//   larger(kept, x)       the larger one; `kept` where x is NaN.
//   greater(a, b)         the larger one of values that are not negative; a NaN counts as greater than any number.
//   of_bits(x)            the numbers whose bits are the integer x, from 2^-100 to 2^100; a NaN gives the greatest.
//   clamped(x, low, high) a NaN passes.
//   zero_outside(low, high, x, value)   `value` where low <= x <= high; otherwise, and for NaN, zero.
//   zero_up_to(bound, x, value)         zero where x <= bound; otherwise, and for NaN, `value`.
template <class Lanes, class Element>
concept VectorLanes =
    requires(const Lanes x, typename Lanes::Scalar value, const typename Lanes::Scalar* source,
             typename Lanes::Scalar* target, const Element* stored, Element* rounded, const bf16* bf16s,
             const weight_format::fp16* fp16s, const std::int32_t* integers, std::uint8_t* codes) {
      Lanes(value);
      { Lanes::load(source) } -> std::same_as<Lanes>;
      { Lanes::from_elements(stored) } -> std::same_as<Lanes>;
      { Lanes::from_elements(bf16s) } -> std::same_as<Lanes>;
      { Lanes::from_elements(fp16s) } -> std::same_as<Lanes>;
      { Lanes::from_integers(integers, integers) } -> std::same_as<Lanes>;
      x.store(target);
      x.to_elements(rounded);
      x.to_codes(codes);
      { x.sum() } -> std::same_as<typename Lanes::Scalar>;
      { x.largest() } -> std::same_as<typename Lanes::Scalar>;
      { x.greatest() } -> std::same_as<typename Lanes::Scalar>;
      Lanes::store_sums(x, x, x, x, target);
      { x + x } -> std::same_as<Lanes>;
      { x - x } -> std::same_as<Lanes>;
      { x * x } -> std::same_as<Lanes>;
      { x / x } -> std::same_as<Lanes>;
      { fused_multiply_add(x, x, x) } -> std::same_as<Lanes>;
      { absolute(x) } -> std::same_as<Lanes>;
      { larger(x, x) } -> std::same_as<Lanes>;
      { greater(x, x) } -> std::same_as<Lanes>;
      { of_bits(x) } -> std::same_as<Lanes>;
      { clamped(x, value, value) } -> std::same_as<Lanes>;
      { zero_outside(value, value, x, x) } -> std::same_as<Lanes>;
      { zero_up_to(value, x, x) } -> std::same_as<Lanes>;
      { exp(x) } -> std::same_as<Lanes>;
      { erf(x) } -> std::same_as<Lanes>;
    };

// In place of words: an instruction set that multiplies none.
struct NoWords {};

// A register of 16-bit words, kOutputs outputs with two neighbours of k each, and one of as many fp32 numbers. Integer
// codes are multiplied in them (`weight_format/code_words.hpp`).
//
//   load, store(words)      aligned to the register; `load` of floats and bf16 need not be, nor `store` of floats.
//   widened                 signed bytes, one for each word.
//   all, right, left, both, difference   a constant, shifts of each word, a AND b, a - b.
//   joined(mask, a, b)      the bits of `a` where `mask` has ones, and those of `b`, which is zero there.
//   looked_up(table, bytes) entry (byte % 16) of 16 bytes, for each byte below 128.
//   sums, pairs             an integer of 32 bits for every output: a sum, or the two words of a row.
//   add_products            sums + a x b, of both neighbours of k, in 32 bits.
//   add_products_in_order   the same, to be used for each step of a long sum: GCC otherwise makes a tree of additions,
//                           whose operands are spilled.
//   add_byte_products       unsigned bytes `a` and signed ones `b`: neighbours are added in sums of kByteSumBits bits,
//                           which must not overflow.
//   add_byte_sums           sums + 256 upper - lower, where the last two are sums of byte products.
//   from_bytes, to_floats   bytes, signed or not, and sums of 32 bits, as fp32.
template <class Words>
concept VectorWords = requires(typename Words::Vector words, typename Words::Floats floats, const std::byte* source,
                               std::byte* target, const float* numbers, float* to, const bf16* bf16s,
                               const std::uint8_t* bytes, const std::int8_t* signed_bytes) {
  { Words::kOutputs } -> Constant<int>;
  { Words::kByteSumBits } -> Constant<int>;
  { Words::load(source) } -> std::same_as<typename Words::Vector>;
  { Words::widened(source) } -> std::same_as<typename Words::Vector>;
  Words::store(words, target);
  { Words::all(std::int16_t{}) } -> std::same_as<typename Words::Vector>;
  { Words::right(words, 4) } -> std::same_as<typename Words::Vector>;
  { Words::left(words, 4) } -> std::same_as<typename Words::Vector>;
  { Words::both(words, words) } -> std::same_as<typename Words::Vector>;
  { Words::difference(words, words) } -> std::same_as<typename Words::Vector>;
  { Words::joined(words, words, words) } -> std::same_as<typename Words::Vector>;
  { Words::looked_up(bytes, words) } -> std::same_as<typename Words::Vector>;
  { Words::sums(std::int32_t{}) } -> std::same_as<typename Words::Vector>;
  { Words::pairs(std::int32_t{}) } -> std::same_as<typename Words::Vector>;
  { Words::add_products(words, words, words) } -> std::same_as<typename Words::Vector>;
  { Words::add_products_in_order(words, words, words) } -> std::same_as<typename Words::Vector>;
  { Words::add_byte_products(words, words, words) } -> std::same_as<typename Words::Vector>;
  { Words::add_byte_sums(words, words, words) } -> std::same_as<typename Words::Vector>;
  { Words::to_floats(words) } -> std::same_as<typename Words::Floats>;
  { Words::from_bytes(bytes) } -> std::same_as<typename Words::Floats>;
  { Words::from_bytes(signed_bytes) } -> std::same_as<typename Words::Floats>;
  { Words::all(0.0f) } -> std::same_as<typename Words::Floats>;
  { Words::load(numbers) } -> std::same_as<typename Words::Floats>;
  { Words::load(bf16s) } -> std::same_as<typename Words::Floats>;
  Words::store(floats, to);
  { Words::product(floats, floats) } -> std::same_as<typename Words::Floats>;
  { Words::add_product(floats, floats, floats) } -> std::same_as<typename Words::Floats>;
  { Words::subtract_product(floats, floats, floats) } -> std::same_as<typename Words::Floats>;
};

// The block of one expert's product that stays in the caches: `groups` of slots by `panels` of 32 outputs,
// `contraction` values of k at a time.
struct Blocking {
  std::int64_t panels;
  std::int64_t groups;
  std::int64_t contraction;
};

// A micro-kernel that multiplies in blocks, with groups of more than `kStreamRows` rows in tile registers.
//
//   kBlocking       the block.
//   kBlockedRows    an expert of fewer rows is multiplied panel by panel.
//   kBlockedBytes   so is one whose rows and two panels have fewer bytes.
//   kTileDepth      neighbours of k in a row of a tile: how such groups are packed.
//   multiplies_tiles(rows)   whether a group of that many rows takes tiles.
//   multiply_add             as `multiply`, added to what is in `tile`.
template <class Kernel>
concept BlockedKernel =
    requires(Kernel kernel, int rows, std::int64_t steps, const typename Kernel::Element* a,
             const typename Kernel::Weight* panel, typename Kernel::Accumulator* tile, NoWork ahead) {
      { Kernel::kBlocking } -> Constant<Blocking>;
      { Kernel::kBlockedRows } -> Constant<std::int64_t>;
      { Kernel::kBlockedBytes } -> Constant<std::int64_t>;
      { Kernel::kTileDepth } -> Constant<int>;
      { Kernel::multiplies_tiles(rows) } -> std::same_as<bool>;
      kernel.multiply_add(rows, steps, a, panel, tile, ahead);
    };

// The product of a group of rows with a panel of 32 outputs. `sweep` makes an object of it for each worker.
//
//   Element, Weight, Accumulator   the types of rows, of a panel, and of sums.
//   kMaxRows      the most rows of a group: those whose sums fit the registers.
//   kStreamRows   an expert of up to this many rows is limited by memory: its panels are multiplied while they are
//   read,
//                 and the next one is not fetched into a cache. 0: none is.
//   kBlocked      whether it is a `BlockedKernel`.
//   multiply      tile[row][32] = sum over k of a[k][row] * panel[k][32], for `steps` groups of ElementTraits::kDepth
//                 neighbours of k; k is a multiple of 16, and `panel` and `tile` are aligned to 64 bytes.
//   steps_ahead   how often `multiply` calls `ahead.step()`.
template <class Kernel>
concept MicroKernel = std::default_initializable<Kernel> &&
                      requires(Kernel kernel, int rows, std::int64_t steps, const typename Kernel::Element* a,
                               const typename Kernel::Weight* panel, typename Kernel::Accumulator* tile, NoWork ahead) {
                        { Kernel::kMaxRows } -> Constant<int>;
                        { Kernel::kStreamRows } -> Constant<int>;
                        { Kernel::kBlocked } -> Constant<bool>;
                        kernel.multiply(rows, steps, a, panel, tile, ahead);
                        { Kernel::steps_ahead(rows, steps) } -> std::same_as<std::int64_t>;
                      } &&
                      (!Kernel::kBlocked || BlockedKernel<Kernel>);

// An instruction set: the micro-kernel of its elements, and how its other products are cut. `ktc/isa/NAME.hpp` has it.
//
//   Lanes, Words  see `VectorLanes` and `VectorWords`; `NoWords` where it multiplies none.
//   kBf16Products whether it multiplies bf16 without widening it: rows then stay bf16 beside codes and in attention.
//   kCodeRows     the most rows of an expert that are multiplied with codes as they are stored (`code_products.hpp`);
//                 0: codes are always decoded.
//   kWordRows     the same of blocks of integers that are decoded to words for more rows (`word_panels.hpp`); 0: they
//                 are decoded to elements.
//   kNumberRows   rows at a time where codes are multiplied as fp32 numbers (`multiply_numbers.hpp`); 0: they are not.
//   kFp32Rows, kFp32Halves   rows of a group, and half panels of outputs in one pass, in the fp32 products of linear
//                 layers with many rows (`linear_panels.hpp`).
//   DotSums       dot products of kRows queries with kColumns stored keys, at most four (`lane_dots.hpp`).
//   WeightedSums  sums of weighted rows of bf16, where it has `kBf16Products` (`decode_attention.hpp`).
//   require       throws std::runtime_error if the system refuses the registers to the process.
//   transpose_piece   piece 0 to kBlockPieces - 1 of a packed block of 32 x 32, with outputs and k exchanged.
template <class Isa>
concept InstructionSet = MicroKernel<Isa> && VectorLanes<typename Isa::Lanes, typename Isa::Element> &&
                         requires(const typename Isa::Element* source, typename Isa::Element* target, unsigned piece) {
                           typename Isa::Words;
                           typename Isa::template DotSums<bf16, 1, 1>;
                           { Isa::kBf16Products } -> Constant<bool>;
                           { Isa::kCodeRows } -> Constant<int>;
                           { Isa::kWordRows } -> Constant<int>;
                           { Isa::kNumberRows } -> Constant<int>;
                           { Isa::kFp32Rows } -> Constant<int>;
                           { Isa::kFp32Halves } -> Constant<int>;
                           Isa::require();
                           Isa::transpose_piece(source, target, piece);
                         } && (std::same_as<typename Isa::Words, NoWords> || VectorWords<typename Isa::Words>) &&
                         (!Isa::kBf16Products || requires { typename Isa::template WeightedSums<1, 1>; });

// The integer side of an instruction set (`ktc/isa/NAME_int8.hpp`): products of unsigned bytes, a row's codes with 128
// added, with signed ones, summed in 32 bits. `elements()` is the micro-kernel of the elements, which a worker needs in
// turn; groups have the same rows for both.
template <class Kernel>
concept IntegerKernel =
    MicroKernel<Kernel> && std::same_as<typename Kernel::Element, std::uint8_t> &&
    std::same_as<typename Kernel::Weight, std::int8_t> &&
    requires(Kernel kernel) { requires MicroKernel<std::remove_reference_t<decltype(kernel.elements())>>; };

// How a file's blocks of one row store weights: a weight is scale x number(code), less a minimum where there are
// minima.
//
//   kName            of the format, as `ktc.foundation.formats` and the rule language have it.
//   kBits            of a code: 4, 5, 6, 8 or 16.
//   kWeights, kStoredBytes   of a block in the file.
//   kScales          of 32 weights in a panel: 0, 1 or 2.
//   kMins            whether there are minima.
//   kSpanBlocks      blocks of 32 weights that share a head of scales in a panel.
//   kHeadBytes       of the scales of a span, for 32 outputs; a multiple of 64.
//   number(code)     the value of a code, an integer that is exact in bf16, or any fp16.
//   code(stored, k)  the code of weight k of a stored block.
//   put_head, scales where there are scales: copies those of a stored block into a panel's head, for one output; and
//                    those of 32 weights of each output in fp32, [scale][32], with their minima, [32].
//   Span             the scales of all blocks of a span for products of few rows, where blocks share some; void: none.
//   kQuantises       whether it has `quantise`, which writes a stored block from kWeights floats.
//   matrix_scale     where all blocks of a matrix share a scale: that of a matrix with the largest magnitude, which
//                    `quantise` takes too.
//   put_shared       where a span keeps a scale once that all its blocks store: copies it into the head of the span.
template <class Format>
concept BlockFormat = requires(const std::uint8_t* stored, int k, unsigned code) {
  { Format::kName } -> Constant<const char*>;
  { Format::kBits } -> Constant<int>;
  { Format::kWeights } -> Constant<int>;
  { Format::kStoredBytes } -> Constant<int>;
  { Format::kScales } -> Constant<int>;
  { Format::kMins } -> Constant<bool>;
  { Format::kSpanBlocks } -> Constant<std::int64_t>;
  { Format::kHeadBytes } -> Constant<std::int64_t>;
  { Format::kQuantises } -> Constant<bool>;
  typename Format::Span;
  { Format::number(code) } -> std::same_as<float>;
  { Format::code(stored, k) } -> std::same_as<unsigned>;
} && (!Format::kQuantises || requires(const float* weights, std::uint8_t* stored) {
                        Format::quantise(weights, stored);
                      } || requires(const float* weights, std::uint8_t* stored, float largest) {
                        Format::quantise(weights, stored, Format::matrix_scale(largest));
                      });

// The type of a panel: 32 outputs as they are packed, of one format (`ktc/weight_format/`).
//
//   Element       what its weights are multiplied as.
//   kCode, kGroup the name of its codes, and how many weights of a row share a scale (0: all); null without codes, and
//                 then there is no `pack_codes`.
//   kStored       the name of the file's blocks that it has the bits of; null if of none, and then there is no
//                 `pack_blocks`.
//   kIntegerProducts   whether it is multiplied by an `IntegerKernel` in forward.
//   kDecoded      whether it holds codes beside scales, which are decoded: then it has `scales_at` and `codes_at`, the
//                 places of a block of 32 x 32 in it, and `kScaleBytes` and `kBlockBytes`, their sizes.
//   bytes         of a panel with a contraction padded to 32, a multiple of 64.
//   check         throws std::invalid_argument for a contraction that it cannot be cut for.
//   pack, unpack  the lanes of one part of an expert from a matrix, and back, dequantised.
template <class Panel>
concept WeightPanel = requires(std::int64_t size, const weight_format::PartLanes& part,
                               const MatrixView<const float>& source,
                               const MatrixView<typename Panel::Element>& target) {
  { Panel::kCode } -> Constant<const char*>;
  { Panel::kGroup } -> Constant<std::int64_t>;
  { Panel::kStored } -> Constant<const char*>;
  { Panel::kIntegerProducts } -> Constant<bool>;
  { Panel::kDecoded } -> Constant<bool>;
  { Panel::bytes(size) } -> std::same_as<std::int64_t>;
  Panel::check("", size);
  Panel::pack(source, part);
  Panel::unpack(part, target);
} && (!Panel::kDecoded || requires(std::int64_t block) {
                        { Panel::kScaleBytes } -> Constant<std::int64_t>;
                        { Panel::kBlockBytes } -> Constant<std::int64_t>;
                        { Panel::scales_at(block) } -> std::same_as<std::int64_t>;
                        { Panel::codes_at(block) } -> std::same_as<std::int64_t>;
                      });

// A panel, or of its contraction the stretch [first_k, first_k + size_k), whole blocks.
struct PanelPart {
  std::int64_t expert;
  std::int64_t panel;
  std::int64_t first_k;
  std::int64_t size_k;
};

// Panels that multiply rows as 16-bit words themselves, whole panels at a time (`word_panels.hpp`).
//
//   multiply      one group, whose elements are `a`, with the current panel.
//   steps_ahead   how often that calls `ahead.step()`, for a contraction.
template <class Panels, class Kernel>
concept WordPanelSource =
    requires(Panels panels, const SlotGroup& group, std::int64_t contraction, const typename Kernel::Element* a,
             typename Kernel::Accumulator* tile, NoWork ahead) {
      panels.multiply(group, a, tile, ahead);
      { Panels::steps_ahead(contraction) } -> std::same_as<std::int64_t>;
    };

// The panels of a product as a worker's sweep reads them, one part after the other: stored, decoded or transposed.
//
//   Ahead             `WorkAhead` that prepares the next part beside the products of the current one.
//   kStreamRows       an expert of up to this many rows is multiplied with panels as they are stored.
//   kMultipliesCodes  whether that is `multiply_codes`, one group with the codes of a panel, while those of the next
//   one
//                     are fetched; otherwise the micro-kernel reads `current`.
//   kReadsWords       whether it is a `WordPanelSource`.
//   kConvertedRows    experts of up to this many rows have them in another form (`converted_slots.hpp`); 0: none have.
//   contraction       values of k of a packed row.
//   start             prepares the first part.
//   current           the weights of a part in the micro-kernel's order, until `advance`.
//   ahead             the work that prepares `next` and fetches what `after_next` needs, over `calls` of `step`.
template <class Panels, class Kernel>
concept PanelSource =
    MicroKernel<Kernel> && WorkAhead<typename Panels::Ahead> &&
    requires(Panels panels, const Panels& unchanged, PanelPart part, std::int64_t calls) {
      { Panels::kStreamRows } -> Constant<int>;
      { Panels::kMultipliesCodes } -> Constant<bool>;
      { Panels::kReadsWords } -> Constant<bool>;
      { Panels::kConvertedRows } -> Constant<int>;
      { unchanged.contraction() } -> std::same_as<std::int64_t>;
      panels.start(part);
      { panels.current(part) } -> std::same_as<const typename Kernel::Weight*>;
      { panels.ahead(part, part, calls) } -> std::same_as<typename Panels::Ahead>;
      panels.advance();
    } &&
    (!Panels::kMultipliesCodes ||
     requires(Panels panels, const SlotGroup& group, PanelPart part, const typename Kernel::Element* a,
              typename Kernel::Accumulator* tile) { panels.multiply_codes(group, part, part, a, tile); }) &&
    (!Panels::kReadsWords || WordPanelSource<Panels, Kernel>);

// What becomes of the products of a panel, group by group of an expert's slots; `tile` has 32 sums for each row.
//
//   begin, end   around all groups of one panel of an expert.
//   prefetch     announces the call that follows, before the product.
//   operator()   takes the sums, and may overwrite them.
template <class Epilogue, class Accumulator>
concept TileEpilogue = requires(const Epilogue& epilogue, const SlotGroup& group, PanelPart part, Accumulator* tile) {
  epilogue.begin(part);
  epilogue.prefetch(group, part);
  epilogue(group, part, tile);
  epilogue.end(part);
};

// The epilogue of a sweep. `complete` adds products of its own to the sums, with the worker's micro-kernel. It is
// called before `operator()` and does not wait for the turn of the panel.
template <class Epilogue, class Kernel>
concept SweepEpilogue = TileEpilogue<Epilogue, typename Kernel::Accumulator> &&
                        requires(const Epilogue& epilogue, Kernel& kernel, const SlotGroup& group, PanelPart part,
                                 typename Kernel::Accumulator* tile) { epilogue.complete(kernel, group, part, tile); };

// The dot products of instruction sets without ones of their own (`lane_dots.hpp`).
template <class Isa, class Stored, int kRows, int kColumns>
class LaneDots;

}  // namespace ktc::inline KTC_UNIT
