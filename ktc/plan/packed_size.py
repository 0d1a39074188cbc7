"""The routed experts of one layer on the host, in bytes: packed weights, what is saved for backward, workspace.

In: a `KernelSpec`. Out: the sizes that `runtime/include/ktc` allocates for it (`shape.hpp` for the padding,
`moe_forward.hpp` and `moe_backward.hpp` for the workspace); tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktc.isa import INSTRUCTION_SETS
from ktc.plan.kernel_spec import BITS_PER_WEIGHT, BLOCKS, CODES, KernelSpec, WeightFormat

PANEL = 32  # kernels pad every width to whole panels
RANK_UNIT = 8  # and the rows of low-rank values to this much
_ITEM = {"bf16": 2, "fp32": 4, "fp64": 8}
_INDEX = 8
# Sums of a block with tiles (`Blocking`), and half panels of LoRA's gradients.
_TILED_BLOCK = 16 * 12 * 32 * PANEL
_GRADIENT_HALVES = 6


def padded(size: int) -> int:
    """A width as kernels hold it."""
    return -(-size // PANEL) * PANEL


def packed_bytes(spec: KernelSpec) -> int:
    """Bytes of one layer's packed weights; biases stay in fp32."""
    experts, hidden, inter = (size or 0 for size in (spec.num_experts, spec.hidden, spec.intermediate))
    first = (1 + spec.gated) * padded(inter) * _row_bytes(spec, spec.format_gate_up, padded(hidden))
    biases = 4 * (padded(inter) * (1 + spec.gated) + padded(hidden)) if spec.biased else 0
    down = padded(hidden) * _row_bytes(spec, spec.format_down, padded(inter))
    return experts * (first + down + biases)


def _row_bytes(spec: KernelSpec, weight_format: WeightFormat, columns: int) -> int:
    """One output's weights, with the scales of their groups."""
    if blocks := BLOCKS.get(weight_format):
        in_span = blocks.weights * blocks.span
        return -(-columns // in_span) * blocks.span * blocks.stored_bytes
    codes, group = CODES.get(weight_format), spec.group_of(weight_format)
    if codes is None:
        return columns * BITS_PER_WEIGHT[weight_format] // 8
    groups = -(-columns // group) if group else 1
    return -(-columns // codes.unit) * codes.unit * codes.bits // 8 + groups * codes.scale_bytes


@dataclass(frozen=True, slots=True)
class Slots:
    """Bytes beside the weights. `saved` is per token, for backward; the workspace is one for all layers.

    `_around` are copies of hidden states on the host; the pairs are those of forward and of backward, without and with
    what that adds: per token, and for all threads together.
    """

    saved: int
    _around: int
    _per_token: tuple[int, int]
    _scratch: tuple[int, int]

    def forward(self, tokens: int) -> int:
        """Workspace and copies of the hidden states on the host, of a forward without gradients."""
        return tokens * self._around + self.workspace(tokens, backward=False)

    def backward(self, tokens: int) -> int:
        """The same of a backward."""
        return 2 * tokens * self._around + self.workspace(tokens, backward=True)

    def workspace(self, tokens: int, *, backward: bool) -> int:
        """What the kernel reserves for a call, but for the alignment of its regions."""
        return tokens * self._per_token[backward] + self._scratch[backward]


def slots_of(spec: KernelSpec, *, keep: bool, ranks: tuple[int, int] = (0, 0), threads: int = 1) -> Slots:
    """Of a layer that keeps gate and up for backward, or else its input (and computes them again).

    `ranks` are those of LoRA on the first product and on down (0: none). Its gradients read the input too, and the
    low-rank values of each slot: rows of accumulators that are kept, and packed ones in the workspace.
    """
    item, total = _ITEM[spec.dtype], _sum_bytes(spec)
    chosen, hidden, inter = spec.top_k or 0, padded(spec.hidden or 0), padded(spec.intermediate or 0)
    gate_up = chosen * (1 + spec.gated) * inter * item
    around = 2 * hidden * item  # what comes in and what goes out
    routed = chosen * hidden * item + (hidden + PANEL) * total + chosen * total
    needs_input = not keep or any(ranks)
    first, both = ranks[:1], ranks
    rows, first_rows = (chosen * _padded_ranks(some, RANK_UNIT) for some in (both, first))
    packed_unit = _packed_rank_unit(spec)
    packed, first_packed = (chosen * _padded_ranks(some, packed_unit) for some in (both, first))
    integers = _integer_rows(spec) if spec.format_down == "int8" else 0
    lost = 0 if not integers or ranks[0] else chosen * hidden * item  # rows of elements that only LoRA reads
    repacked = chosen * inter * item if integers and ranks[1] else 0
    again = 0 if keep else first_rows * total + first_packed * item
    low_rank = packed * item + (2 * rows - first_rows) * total + again
    weight_parts = chosen * (inter // PANEL + spec.biased) * total
    forward = routed - lost + chosen * inter * item + packed * item + integers + repacked
    backward = routed + gate_up * (1 if keep else 2) + weight_parts + low_rank + (0 if keep else integers)
    return Slots(
        saved=(gate_up + rows * total if keep else 0)
        + ((spec.hidden or 0) * item if needs_input else 0)
        + chosen * (_INDEX + total),
        _around=around,
        _per_token=(forward, backward),
        _scratch=(
            threads * _thread_scratch(spec, ranks, backward=False, again=True) + _factors(spec, ranks),
            threads * _thread_scratch(spec, ranks, backward=True, again=not keep) + 2 * _factors(spec, ranks),
        ),
    )


def _factors(spec: KernelSpec, ranks: tuple[int, int]) -> int:
    """B of both products expert after expert, which PEFT stores otherwise; backward has gradients of the same size."""
    hidden, inter = spec.hidden or 0, spec.intermediate or 0
    values = ranks[0] * (1 + spec.gated) * inter + ranks[1] * hidden
    return (spec.num_experts or 0) * values * _sum_bytes(spec)


def _thread_scratch(spec: KernelSpec, ranks: tuple[int, int], *, backward: bool, again: bool) -> int:
    """One thread's: sums at hand, weights decoded or transposed, factors of LoRA, and rows that become integers where
    the products of forward are made."""
    item, total = _ITEM[spec.dtype], _sum_bytes(spec)
    hidden, inter = padded(spec.hidden or 0), padded(spec.intermediate or 0)
    outputs = (1 + spec.gated) * inter
    first, down = _is_decoded(spec.format_gate_up), _is_decoded(spec.format_down)
    panel = max(first * hidden, down * inter) * PANEL
    if backward:  # a panel of the transposed weights; of those that need no decoding two, one made ahead
        panel = max(panel, (2 - first) * outputs * PANEL, (2 - down) * hidden * PANEL)
    isa = INSTRUCTION_SETS[spec.isa]
    at_hand = (_TILED_BLOCK if isa.tiles else isa.group_rows * PANEL) * total
    rank, row = (max(_padded_ranks((each,), unit) for each in ranks) for unit in (_packed_rank_unit(spec), RANK_UNIT))
    low_rank = (max(hidden, outputs) + rank) * PANEL * item + row * (PANEL // 2) * _GRADIENT_HALVES * total
    integers = isa.group_rows * (_integer_width(spec.intermediate) + PANEL * total)
    return (
        at_hand
        + panel * item
        + (low_rank if any(ranks) else 0)
        + (integers if again and spec.format_down == "int8" else 0)
    )


def _is_decoded(weight_format: WeightFormat) -> bool:
    return weight_format in CODES or weight_format in BLOCKS


def _sum_bytes(spec: KernelSpec) -> int:
    return 8 if spec.dtype == "fp64" else 4  # never less than fp32


def _packed_rank_unit(spec: KernelSpec) -> int:
    return PANEL if INSTRUCTION_SETS[spec.isa].tiles else PANEL // 2


def _integer_width(size: int | None) -> int:
    unit = CODES["int8"].unit
    return -(-(size or 0) // unit) * unit


def _integer_rows(spec: KernelSpec) -> int:
    """A token's codes and those of its slots, each with a scale."""
    scale = 4
    hidden, inter = _integer_width(spec.hidden), _integer_width(spec.intermediate)
    return hidden + scale + (spec.top_k or 0) * (max(hidden, inter) + scale)


def _padded_ranks(ranks: tuple[int, ...], unit: int) -> int:
    return sum(-(-rank // unit) * unit for rank in ranks)
