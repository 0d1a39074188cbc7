"""The packed weights of one layer's routed experts, or of a linear layer in blocks, on the host, in bytes.

In: a spec. Out: exactly what its kernel packs (`runtime/include/ktc/weight_format`); tests compare the two.
"""

from __future__ import annotations

from typing import Final

from ktc.foundation.formats import BLOCKS, FORMATS, Blocks, Codes, Dense, WeightFormat
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.kernels.linear_spec import PackedLinearSpec

PANEL: Final = 32  # kernels pad every width to whole panels


def padded(size: int) -> int:
    """Return a width padded to whole panels."""
    return -(-size // PANEL) * PANEL


def packed_bytes(spec: FusedMoeSpec) -> int:
    """Bytes of one layer's packed weights; biases stay in fp32."""
    experts, hidden, inter = (size or 0 for size in (spec.num_experts, spec.hidden, spec.intermediate))
    first = (1 + spec.gated) * padded(inter) * _row_bytes(spec, spec.format_gate_up, padded(hidden))
    biases = 4 * (padded(inter) * (1 + spec.gated) + padded(hidden)) if spec.biased else 0
    down = padded(hidden) * _row_bytes(spec, spec.format_down, padded(inter))
    return experts * (first + down + biases)


def packed_linear_bytes(spec: PackedLinearSpec, outputs: int, inputs: int) -> int:
    """Bytes of a linear layer's weight in blocks."""
    return padded(outputs) * _block_row_bytes(BLOCKS[spec.weight_format], padded(inputs))


def _block_row_bytes(row: Blocks, columns: int) -> int:
    in_span = row.weights * row.span
    return -(-columns // in_span) * (row.head + in_span * row.bits // 8)


def _row_bytes(spec: FusedMoeSpec, weight_format: WeightFormat, columns: int) -> int:
    """Return the bytes of one output's weights, with the scales of their groups."""
    match FORMATS[weight_format]:
        case Blocks() as row:
            return _block_row_bytes(row, columns)
        case Codes() as row:
            group = spec.group_of(weight_format)
            groups = -(-columns // group) if group else 1
            return -(-columns // row.unit) * row.unit * row.bits // 8 + groups * row.scale_bytes
        case row:
            assert isinstance(row, Dense), weight_format
            return columns * row.bits // 8
