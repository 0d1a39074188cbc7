"""Where one expert of a decoding step may be cut, so that two engines compute it: between two intermediate units.

In: the intermediate size, and the codes of down's panels. Out: the cuts, of which kernels know the distance and choices
the number. Importing this needs no torch: the cost model reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ktc.model.experts.layouts.panel_codes import PLAIN, WHOLE_ROW, PanelCodes

MOST_PARTS: Final = 16  # of an expert: an address has room for their number (`address_kernels.py`)
_PANEL: Final = 32  # units between which panels of gate and up begin, and blocks of down


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
    least = _PANEL if down is PLAIN else math.lcm(_PANEL, down.span)
    return Cuts(units, min(units, -(-units // (least * MOST_PARTS)) * least))
