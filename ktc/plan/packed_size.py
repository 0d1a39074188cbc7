"""The routed experts of one layer on the host, in bytes: packed weights, what is saved for backward, workspace.

In: a `KernelSpec`. Out: the sizes that `runtime/include/ktc` allocates for it (`shape.hpp` for the padding,
`moe_forward.hpp` and `moe_backward.hpp` for the workspace); tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktc.plan.kernel_spec import BITS_PER_WEIGHT, BLOCKS, CODES, KernelSpec, WeightFormat

PANEL = 32  # kernels pad every width to whole panels
RANK_UNIT = 8  # and the rows of low-rank values to this much
_ITEM = {"bf16": 2, "fp32": 4, "fp64": 8}
_INDEX = 8


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
    """Bytes beside the weights. `saved` is per token, for backward; the rest is one workspace for all layers."""

    saved: int
    _forward: int
    _backward: int

    def forward(self, tokens: int) -> int:
        """Workspace and copies of the hidden states on the host, of a forward without gradients."""
        return tokens * self._forward

    def backward(self, tokens: int) -> int:
        """The same of a backward."""
        return tokens * self._backward


def slots_of(spec: KernelSpec, *, keep: bool, ranks: tuple[int, int] = (0, 0)) -> Slots:
    """Of a layer that keeps gate and up for backward, or else its input (and computes them again).

    `ranks` are those of LoRA on the first product and on down (0: none). Its gradients read the input too, and the
    low-rank values of each slot: rows of accumulators that are kept, and packed ones in the workspace.
    """
    item = _ITEM[spec.dtype]
    total = 8 if spec.dtype == "fp64" else 4  # sums are never less than fp32
    chosen, hidden, inter = spec.top_k or 0, padded(spec.hidden or 0), padded(spec.intermediate or 0)
    gate_up = chosen * (1 + spec.gated) * inter * item
    around = 2 * hidden * item  # what comes in and what goes out
    routed = chosen * hidden * item + hidden * total + chosen * total
    needs_input = not keep or any(ranks)
    first, both = ranks[:1], ranks
    rows, first_rows = (chosen * _padded_ranks(some, RANK_UNIT) for some in (both, first))
    packed_unit = PANEL if spec.isa == "amx" else PANEL // 2
    packed, first_packed = (chosen * _padded_ranks(some, packed_unit) for some in (both, first))
    integers = _integer_rows(spec) if spec.format_down == "int8" else 0
    lost = 0 if not integers or ranks[0] else chosen * hidden * item  # rows of elements that only LoRA reads
    repacked = chosen * inter * item if integers and ranks[1] else 0
    again = 0 if keep else first_rows * total + first_packed * item
    low_rank = packed * item + (2 * rows - first_rows) * total + again
    return Slots(
        saved=(gate_up + rows * total if keep else 0)
        + ((spec.hidden or 0) * item if needs_input else 0)
        + chosen * (_INDEX + total),
        _forward=around + routed - lost + chosen * inter * item + packed * item + integers + repacked,
        _backward=2 * around
        + routed
        + gate_up * (1 if keep else 2)
        + chosen * (inter // PANEL) * total
        + low_rank
        + (0 if keep else integers),
    )


def _integer_rows(spec: KernelSpec) -> int:
    """A token's codes and those of its slots, each with a scale."""
    unit, scale = CODES["int8"].unit, 4
    hidden, inter = (-(-(size or 0) // unit) * unit for size in (spec.hidden, spec.intermediate))
    return hidden + scale + (spec.top_k or 0) * (max(hidden, inter) + scale)


def _padded_ranks(ranks: tuple[int, ...], unit: int) -> int:
    return sum(-(-rank // unit) * unit for rank in ranks)
