"""Where the codes and scales of a panel are, for the formats whose codes a GPU multiplies.

In: a row of `ktc/foundation/formats.py`. Out: the bytes of its panels, as `runtime/include/ktc/weight_format` and
`panels.py` have them. `cuts_of` says where an expert in such panels may be cut between two intermediate units, so that
two engines compute it in a decoding step. Importing this needs no torch: the cost model reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from ktc.foundation.formats import Blocks, Codes, Dense, Exponent, Float8Scales, Format, Halves, ScaleAndZero

_WIDTH: Final = 32  # outputs of a panel, and weights of each in a block
MOST_PARTS: Final = 16  # of an expert: an address has room for their number (`address_kernels.py`)
# Rows of an expert, on average, that a GPU multiplies with codes. For 256, a copy and `grouped_mm` take 0.7 of the
# time, and the Python of two chunks.
MOST_ROWS: Final = 128
WHOLE_ROW: Final = 1 << 30
"""The columns of a span whose scales serve a whole row."""
Numbers = Literal["signed4", "unsigned4", "e2m1", "unsigned5", "signed6", "int8", "e4m3", "bf16"]
"""How a code is read: `signed4` is code - 8, `signed6` code - 32, `e2m1` twice the number of FP4, an integer.

`bf16` are weights without scales."""
Scales = Literal["bf16", "fp16", "fp32", "power", "zero", "sixes", "factors", "float8"]
"""How a scale is stored: `power` is a byte e, 2^(e - 128); `zero` an fp32 number whose lowest byte is a zero point.

`sixes` are fp16 scales and minima of a span, with factors of 6 bits; `factors` fp16 scales with signed bytes; `float8`
fp32 scales with E4M3 numbers.
"""
_NUMBERS: Final[dict[tuple[int, ...], Numbers]] = {
    tuple(range(-8, 8)): "signed4",
    tuple(range(16)): "unsigned4",
    (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12): "e2m1",
    tuple(range(32)): "unsigned5",
    tuple(range(-32, 32)): "signed6",
    (*range(128), *range(-128, 0)): "int8",
}
_BITS: Final[dict[Numbers, int]] = {"unsigned5": 5, "signed6": 6, "int8": 8, "e4m3": 8, "bf16": 16}
SCALE_BYTES: Final[dict[Scales, int]] = {
    "bf16": 2, "fp16": 2, "fp32": 4, "power": 1, "zero": 4, "sixes": 2, "factors": 2, "float8": 4,
}  # fmt: skip
"""Of the numbers that a head begins with."""


@dataclass(frozen=True, slots=True)
class PanelCodes:
    """The bytes of a panel: for each `span` of columns `head` bytes of scales, then the codes of 32 outputs.

    A scale serves `group` columns of an output; those of 32 outputs are neighbours. With `least`, an fp16 minimum of
    each group, which is taken off, follows the scales. `neighbours` columns of codes of 8 bits are side by side.
    """

    numbers: Numbers
    scales: Scales
    group: int
    span: int
    head: int
    least: bool = False
    neighbours: int = 2

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return _BITS.get(self.numbers, 4)

    @property
    def nbytes(self) -> int:
        """The bytes of a span; of one that is a whole row, those of its scales."""
        if self.span == WHOLE_ROW:
            return self.head
        return self.head + _WIDTH * self.span * self.bits // 8


PLAIN: Final = PanelCodes("bf16", "bf16", WHOLE_ROW, WHOLE_ROW, 0)
"""Plain weights in bf16, for the kernels that read experts by their addresses."""


def addressed_codes_of(row: Format, group: int = 0) -> PanelCodes | None:
    """Return the codes of panels that a GPU multiplies by the address of their expert; None for others."""
    return PLAIN if isinstance(row, Dense) and row.computes == "bf16" else codes_of(row, group)


def codes_of(row: Format, group: int = 0) -> PanelCodes | None:
    """Return the codes of a format's panels, `group` as `panels_of` takes it; None for codes that no GPU multiplies."""
    if isinstance(row, Codes):
        return _of_groups(row, group)
    numbers = _NUMBERS.get(row.numbers) if isinstance(row, Blocks) else None
    if not isinstance(row, Blocks) or numbers is None:
        return None
    head = _WIDTH * row.head
    match row.scales, numbers:
        case Halves(sixes=int(), minimum=int()), "unsigned4" | "unsigned5" if row.weights == 256:
            return PanelCodes(numbers, "sixes", _WIDTH, row.weights, head)
        case Halves(factors=int(), minimum=None), "signed6" if row.weights == 256:
            return PanelCodes(numbers, "factors", _WIDTH // 2, row.weights, head)
        case Halves(sixes=None, factors=None, minimum=None), "signed4" | "int8" if row.span == 1:
            return PanelCodes(numbers, "fp16", row.weights, row.weights, head)
        case Halves(sixes=None, factors=None, minimum=int()), "unsigned4" if row.span == 1:
            return PanelCodes(numbers, "fp16", row.weights, row.weights, head, least=True)
        case ScaleAndZero(), "unsigned4" if row.span == 1:
            return PanelCodes(numbers, "zero", row.weights, row.weights, head)
        case Exponent(), "e2m1":
            return PanelCodes(numbers, "power", row.weights, row.weights * row.span, head)
        case Float8Scales(), "e2m1" if row.weights == _WIDTH:
            return PanelCodes(numbers, "float8", _WIDTH // 2, row.weights * row.span, head)
        case _:
            return None


def _of_groups(row: Codes, group: int) -> PanelCodes | None:
    head = _WIDTH * row.scale_bytes
    if row.integer_products:
        return PanelCodes("int8", "fp32", WHOLE_ROW, WHOLE_ROW, head, neighbours=4)
    if group <= 0 or group % _WIDTH:
        return None
    match row.bits, row.float8, row.bf16_scales:
        case 8, True, False:
            return PanelCodes("e4m3", "fp32", group, group, head)
        case 4, False, True:
            return PanelCodes("signed4", "bf16", group, group, head)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Cuts:
    """An expert may be cut after multiples of `step` of its `units`. One with a step of all units is not."""

    units: int
    step: int

    @property
    def parts(self) -> int:
        """The number of steps, of which the last may be shorter."""
        return -(-self.units // self.step)


def cuts_of(units: int, down: PanelCodes | None) -> Cuts:
    """Return the cuts of experts with panels of down in these codes: into at most `MOST_PARTS`, of equal size.

    Spans of scales stay whole. Scales of a row serve all units, and so do those by which the CPU rounds activations to
    integers: such experts are not cut.
    """
    if down is None or (down.span == WHOLE_ROW and down is not PLAIN):
        return Cuts(units, units)
    least = _WIDTH if down is PLAIN else math.lcm(_WIDTH, down.span)
    return Cuts(units, min(units, -(-units // (least * MOST_PARTS)) * least))
