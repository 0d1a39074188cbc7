"""Where the codes and scales of a panel are, for the formats whose codes a GPU multiplies.

In: a row of `ktc/foundation/formats.py`. Out: the bytes of its panels, as `runtime/include/ktc/weight_format` and
`panels.py` have them. Importing this needs no torch: the cost model reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ktc.foundation.formats import Blocks, Codes, Exponent, Format, Halves, ScaleAndZero

_WIDTH: Final = 32  # outputs of a panel
Numbers = Literal["signed4", "unsigned4", "e2m1", "int8", "e4m3"]
"""How a code is read: `signed4` is code - 8, `e2m1` twice the number of FP4, an integer."""
Scales = Literal["bf16", "fp16", "fp32", "power", "zero"]
"""How a scale is stored: `power` is a byte e, 2^(e - 128); `zero` an fp32 number whose lowest byte is a zero point."""
_NUMBERS: Final[dict[tuple[int, ...], Numbers]] = {
    tuple(range(-8, 8)): "signed4",
    tuple(range(16)): "unsigned4",
    (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12): "e2m1",
    (*range(128), *range(-128, 0)): "int8",
}
SCALE_BYTES: Final[dict[Scales, int]] = {"bf16": 2, "fp16": 2, "fp32": 4, "power": 1, "zero": 4}


@dataclass(frozen=True, slots=True)
class PanelCodes:
    """The bytes of a panel: for each `span` of columns `head` bytes of scales, then the codes of 32 outputs.

    A scale serves `group` columns of an output; those of 32 outputs are neighbours. With `least`, an fp16 minimum of
    each group, which is taken off, follows the scales.
    """

    numbers: Numbers
    scales: Scales
    group: int
    span: int
    least: bool = False

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return 8 if self.numbers in ("int8", "e4m3") else 4

    @property
    def head(self) -> int:
        """The bytes of the scales of a span."""
        return _WIDTH * SCALE_BYTES[self.scales] * (self.span // self.group) * (2 if self.least else 1)

    @property
    def nbytes(self) -> int:
        """The bytes of a span."""
        return self.head + _WIDTH * self.span * self.bits // 8


def codes_of(row: Format, group: int = 0) -> PanelCodes | None:
    """Return the codes of a format's panels, `group` as `panels_of` takes it; None for codes that no GPU multiplies."""
    if isinstance(row, Codes):
        if row.integer_products or group <= 0 or group % _WIDTH:
            return None
        match row.bits, row.float8, row.bf16_scales:
            case 8, True, False:
                return PanelCodes("e4m3", "fp32", group, group)
            case 4, False, True:
                return PanelCodes("signed4", "bf16", group, group)
            case _:
                return None
    numbers = _NUMBERS.get(row.numbers) if isinstance(row, Blocks) else None
    if not isinstance(row, Blocks) or numbers is None:
        return None
    match row.scales, numbers:
        case Halves(sixes=None, factors=None, minimum=None), "signed4" | "int8" if row.span == 1:
            return PanelCodes(numbers, "fp16", row.weights, row.weights)
        case Halves(sixes=None, factors=None, minimum=int()), "unsigned4" if row.span == 1:
            return PanelCodes(numbers, "fp16", row.weights, row.weights, least=True)
        case ScaleAndZero(), "unsigned4" if row.span == 1:
            return PanelCodes(numbers, "zero", row.weights, row.weights)
        case Exponent(), "e2m1":
            return PanelCodes(numbers, "power", row.weights, row.weights * row.span)
        case _:
            return None
